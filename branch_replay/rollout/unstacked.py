# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A model's layers one by one, in the form that is fastest for few rows on CPU.

A scan over stacked layers copies each layer before it runs it, and the product
x W of a few rows copies W once more, see `ops.few_rows`. These copies are most
of the memory traffic of a decoding round on CPU. Layers that are stored apart
and transposed need neither. The price is a second copy of the parameters, and
programs with every layer written out, which take longer to compile.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import fingerprint
from branch_replay.mixers import kinds
from branch_replay.models import pattern


class Layers(NamedTuple):
  """The layers of a model, one by one.

  Attributes:
    parts: parameters by part, turn and place, as `decoding.decode` takes them:
      like those of the stacked layers without the leading axis, but linear maps
      have "kernel_T", [out, in], in place of "kernel".
    version: u32[], marks the parameters they were made from.
  """

  parts: Any
  version: jax.Array


def layers(
    config: config_lib.ModelConfig, params, *, version=None
) -> Layers:
  """Copies the layers of a model into this form.

  Args:
    config: the model's geometry.
    params: parameters of the whole model.
    version: u32 that stands for `params`; None computes a fingerprint.
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

  Kernels wider than `dtype`, the dtype they are multiplied in, are rounded here
  once and not in every round.
  """
  if not isinstance(tree, dict):
    return tree
  tree = {key: _transposed(dtype, child, key) for key, child in tree.items()}
  kernel_AB = tree.get("kernel")
  # A router is not a `Linear`, and experts have stacked matrices.
  if kernel_AB is None or kernel_AB.ndim != 2 or name == "router":
    return tree
  rest = {key: child for key, child in tree.items() if key != "kernel"}
  if kernel_AB.dtype.itemsize > jnp.dtype(dtype).itemsize:
    kernel_AB = kernel_AB.astype(dtype)
  return rest | {"kernel_T": kernel_AB.T}
