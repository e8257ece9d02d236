# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers as stacks: trees of arrays with a leading axis of layers, to scan.

Layer l has the kind `layer_pattern[l mod p]`, for a pattern of p kinds. A model
of one kind is one stack, whose arrays have a leading L axis. Any other model is
made of parts, each scanned on its own, with one stack for each place j of the
pattern:

  {"periods": {"0": stack, "1": stack, …}, "rest": {"0": stack, …}}

Stack j of "periods" holds layers j, j + p, …, one for each whole period.
"rest", which is there if p does not divide L, has stacks of one layer.
Parameters, prefix state, its cotangent and decoding caches are trees like this.

If the first layers have dense feed-forwards and the others experts, a part
"dense" comes first, with stacks of one layer; periods begin after it.
"""

from typing import NamedTuple

from branch_replay import config as config_lib


class Part(NamedTuple):
  """Layers that one scan runs: `count` turns, each over layers of `kinds`.

  Attributes:
    name: "" in a model of one kind, else "dense", "periods" or "rest".
    kinds: the kind of each layer of a turn; there is one stack for each.
    count: turns of the scan, the layers of each stack.
    first: number of the part's first layer in the model.
    experts: whether the layers' feed-forwards are mixtures of experts.
  """

  name: str
  kinds: tuple[config_lib.Kind, ...]
  count: int
  first: int
  experts: bool

  def path(self, place: int) -> str:
    """Path of a stack in the tree of a model's parameters."""
    return f"layers/{self.name}/{place}" if self.name else "layers"

  def layers(self, place: int) -> range:
    """Numbers of the model's layers that a stack holds."""
    first = self.first + place
    return range(
        first, first + self.count * len(self.kinds), len(self.kinds)
    )


def parts(config: config_lib.ModelConfig) -> list[Part]:
  """Lists the parts of a model, in the order in which they run."""
  experts, every = config.experts is not None, layers(config)
  dense = config.experts.first_dense if experts else 0
  period = len(config.layer_pattern)
  if period == 1 and not dense:
    return [Part("", config.layer_pattern, config.num_layers, 0, experts)]
  found = []
  if dense:
    found.append(Part("dense", tuple(every[:dense]), 1, 0, False))
  count, left = divmod(config.num_layers - dense, period)
  if count:
    kinds = tuple(every[dense : dense + period])
    found.append(Part("periods", kinds, count, dense, experts))
  if left:
    first = config.num_layers - left
    found.append(Part("rest", tuple(every[first:]), 1, first, experts))
  return found


def split(config: config_lib.ModelConfig, tree) -> list[list]:
  """Splits a tree into the stacks of each part; {} where it has none."""
  found = []
  for part in parts(config):
    if part.name:
      stacks = tree.get(part.name, {})
      found.append([stacks.get(str(j), {}) for j in range(len(part.kinds))])
    else:
      found.append([tree])
  return found


def join(config: config_lib.ModelConfig, stacks: list[list]):
  """Undoes `split`: makes the tree of the stacks of each part."""
  tree = {}
  for part, of_part in zip(parts(config), stacks, strict=True):
    if not part.name:
      return of_part[0]
    named = {
        str(j): stack for j, stack in enumerate(of_part) if _holds(stack)
    }
    if named:
      tree[part.name] = named
  return tree


def _holds(stack) -> bool:
  return not isinstance(stack, dict) or bool(stack)


def build(config: config_lib.ModelConfig, make):
  """Makes a tree whose stacks are make(kind, number of layers)."""
  return join(config, [
      [make(kind, part.count) for kind in part.kinds]
      for part in parts(config)
  ])


def over(config: config_lib.ModelConfig, function, *trees):
  """Maps function(kind, stack of each tree) over the stacks of trees."""
  return join(config, [
      [
          function(kind, *stacks)
          for kind, *stacks in zip(part.kinds, *of_part, strict=True)
      ]
      for part, *of_part in zip(
          parts(config), *(split(config, tree) for tree in trees), strict=True
      )
  ])


def leaves(config: config_lib.ModelConfig, tree) -> list:
  """Lists (kind, stack) of all stacks of a tree."""
  return [
      (kind, stack)
      for part, stacks in zip(parts(config), split(config, tree), strict=True)
      for kind, stack in zip(part.kinds, stacks, strict=True)
  ]


def layers(config: config_lib.ModelConfig) -> list[config_lib.Kind]:
  """Lists the kind of each layer of the model."""
  kinds = config.layer_pattern
  return [kinds[layer % len(kinds)] for layer in range(config.num_layers)]
