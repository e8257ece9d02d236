# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers as stacks: one for every place in a model's repeating pattern.

Layer l has the kind `layer_pattern[l mod p]`, for a pattern of p kinds. A model
of one kind is one stack: a tree whose arrays have a leading L axis. Any other
is two parts, each scanned with one stack a place:

  {"periods": {"0": stack, "1": stack, …}, "rest": {"0": stack, …}}

Stack j of "periods" has one layer a whole period, layers j, j + p, …; "rest",
which is there if p does not divide L, has one layer a stack. Parameters,
prefix state, its cotangent, and decoding caches are all trees of this shape.

Where the first layers have a dense feed-forward and the others experts, the
first ones are a part before these, "dense", with one layer a stack; periods
begin after it.
"""

from typing import NamedTuple

from branch_replay import config as config_lib


class Part(NamedTuple):
  """Layers that one scan runs: `count` turns over `kinds`.

  Attributes:
    name: "" in a model of one kind, else "dense", "periods" or "rest".
    kinds: of the layers of a turn.
    count: turns.
    first: the first of its layers.
    experts: whether its feed-forwards are mixtures of experts.
  """

  name: str
  kinds: tuple[config_lib.Kind, ...]
  count: int
  first: int
  experts: bool

  def path(self, place: int) -> str:
    """Where a stack of parameters stands in the tree of a model."""
    return f"layers/{self.name}/{place}" if self.name else "layers"

  def layers(self, place: int) -> range:
    """Which layers of the model a stack holds."""
    first = self.first + place
    return range(
        first, first + self.count * len(self.kinds), len(self.kinds)
    )


def parts(config: config_lib.ModelConfig) -> list[Part]:
  """The parts of a model, in the order they run in."""
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
  """The stacks of every part; {} for those that a tree of a part lacks."""
  found = []
  for part in parts(config):
    if part.name:
      stacks = tree.get(part.name, {})
      found.append([stacks.get(str(j), {}) for j in range(len(part.kinds))])
    else:
      found.append([tree])
  return found


def join(config: config_lib.ModelConfig, stacks: list[list]):
  """Undoes `split`."""
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
  """The tree of make(kind, layers) of every stack."""
  return join(config, [
      [make(kind, part.count) for kind in part.kinds]
      for part in parts(config)
  ])


def over(config: config_lib.ModelConfig, function, *trees):
  """The tree of function(kind, stack of each tree) of every stack."""
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
  """(kind, stack) of every stack."""
  return [
      (kind, stack)
      for part, stacks in zip(parts(config), split(config, tree), strict=True)
      for kind, stack in zip(part.kinds, stacks, strict=True)
  ]


def layers(config: config_lib.ModelConfig) -> list[config_lib.Kind]:
  """The kind of every layer."""
  kinds = config.layer_pattern
  return [kinds[layer % len(kinds)] for layer in range(config.num_layers)]
