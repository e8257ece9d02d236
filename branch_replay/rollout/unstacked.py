# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A model's layers one by one, in the form that few rows run fastest in.

A scan over stacked layers copies each to its turn on CPU, and the product x W
of a few rows copies W once more, see `ops.few_rows`: most of what a round of
decoding reads and writes. Without both a round takes less time, for a
second copy of the parameters, and for programs in which every layer stands by
itself, which take longer to compile.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import fingerprint
from branch_replay import pattern
from branch_replay.mixers import kinds


class Layers(NamedTuple):
  """Layers one by one.

  Attributes:
    parts: parameters by part, turn and place, as `segment.decode` takes them:
      as the layers have them, without the leading axis; linear maps have
      "kernel_T", [out, in], in place of "kernel".
    version: u32[], of the parameters they were made from.
  """

  parts: Any
  version: jax.Array


def layers(
    config: config_lib.ModelConfig, params, *, version=None
) -> Layers:
  """The layers of a model one by one, a copy.

  Args:
    config: geometry.
    params: of the whole model.
    version: u32 that stands for them, instead of a fingerprint.
  """
  if version is None:
    version = fingerprint.of_params(params)
  return Layers(_parts(config, params["layers"]), version)


def check(made: Layers, params, version=None):
  """Raises ValueError for layers that were made from other parameters."""
  if version is None:
    version = fingerprint.of_params(params)
  if int(made.version) != int(version):
    raise ValueError(
        "layers= were made from other parameters: make them again after an "
        "update."
    )


@functools.partial(jax.jit, static_argnums=0)
def _parts(config: config_lib.ModelConfig, layer_params):
  transposed = functools.partial(_transposed, config.compute_dtype)
  return [
      [
          [
              # Only `models.layers.Linear` reads a kernel in this form.
              transposed(_of(stack, turn))
              if kinds.of(config, kind).transposes else _of(stack, turn)
              for kind, stack in zip(part.kinds, stacks, strict=True)
          ]
          for turn in range(part.count)
      ]
      for part, stacks in zip(
          pattern.parts(config), pattern.split(config, layer_params),
          strict=True,
      )
  ]


def _of(stack, turn: int):
  return jax.tree.map(lambda x: x[turn], stack)


def _transposed(dtype, tree, name=""):
  """A tree with the kernels of linear maps transposed.

  Those wider than `dtype`, which they are multiplied in, are rounded to it here
  and not in every round.
  """
  if not isinstance(tree, dict):
    return tree
  tree = {key: _transposed(dtype, child, key) for key, child in tree.items()}
  kernel_AB = tree.get("kernel")
  # A router's is no linear map's, and experts have one matrix each.
  if kernel_AB is None or kernel_AB.ndim != 2 or name == "router":
    return tree
  rest = {key: child for key, child in tree.items() if key != "kernel"}
  if kernel_AB.dtype.itemsize > jnp.dtype(dtype).itemsize:
    kernel_AB = kernel_AB.astype(dtype)
  return rest | {"kernel_T": kernel_AB.T}
