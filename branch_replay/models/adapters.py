# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters, and which parameters train: all, or adapters alone."""

import dataclasses
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.models import params as params_lib

Trainable = Literal["all", "adapters"]
_NAMES = ("adapter_in", "adapter_out")


def check_trainable(trainable: str, config: config_lib.ModelConfig):
  """Raises ValueError if a model of this config has no such parameters."""
  check_name(trainable)
  if trainable == "adapters" and config.adapter is None:
    raise ValueError(
        "trainable='adapters', but the model has none: use adapters.add."
    )


def check_name(trainable: str):
  """Raises ValueError unless `trainable` is "all" or "adapters"."""
  if trainable not in get_args(Trainable):
    raise ValueError(
        f"Unknown trainable={trainable!r}: use one of "
        f"{', '.join(get_args(Trainable))}."
    )


def select(params, trainable: str):
  """Selects the subtree of the parameters that is trained, without copies."""
  if trainable == "all":
    return params
  found = {}
  for name, child in params.items():
    if isinstance(child, dict):
      child = select(child, trainable)
      if child:
        found[name] = child
    elif name in _NAMES:
      found[name] = child
  return found


def pick(tree, like):
  """Selects the part of a nested dict whose names `like` has too."""
  if not isinstance(like, dict):
    return tree
  return {name: pick(tree[name], child) for name, child in like.items()}


def replace(params, part):
  """Replaces the leaves of the parameters that the subtree `part` has."""
  if not isinstance(part, dict):
    return part
  return params | {
      name: replace(params[name], child) for name, child in part.items()
  }


def add(model: decoder.Decoder, params, adapter: config_lib.Adapter, key):
  """Adds adapters to a model, with B = 0, so that its outputs do not change.

  Args:
    model: a decoder without adapters.
    params: its parameters; the result shares them.
    adapter: rank, scale, and which matrices get adapters.
    key: PRNG key to draw A from.

  Returns:
    The new model and its parameters.

  Raises:
    ValueError: the model has adapters already.
  """
  params_lib.check(model, params)
  checks.instance(adapter, "adapter", config_lib.Adapter)
  checks.key(key)
  if model.config.adapter is not None:
    raise ValueError("The model has adapters: merge them first.")
  model = decoder.Decoder(dataclasses.replace(model.config, adapter=adapter))

  def fresh(key):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return select(model.init(key, tokens)["params"], "adapters")

  def put(params, part):
    return params | {
        name: put(params[name], child) if name in params else child
        for name, child in part.items()
    }

  return model, put(params, jax.jit(fresh)(key))


def merge(model: decoder.Decoder, params):
  """Merges adapters into the matrices they adapt: W becomes W + (α/r)AB.

  Merged matrices are at least float32: bfloat16 would round away most of what
  was trained.

  Args:
    model: a decoder with adapters.
    params: its parameters.

  Returns:
    A model without adapters that computes the same, and its parameters.

  Raises:
    ValueError: the model has no adapters.
  """
  params_lib.check(model, params)
  adapter = model.config.adapter
  if adapter is None:
    raise ValueError("The model has no adapters.")

  def merged(tree):
    if not isinstance(tree, dict):
      return tree
    if "adapter_in" not in tree:
      return {name: merged(child) for name, child in tree.items()}
    a, b = tree["adapter_in"], tree["adapter_out"]
    kernel = tree["kernel"]
    wide = kernel.astype(a.dtype) + adapter.alpha / adapter.rank * (a @ b)
    rest = {name: x for name, x in tree.items() if name not in _NAMES}
    return rest | {"kernel": wide}

  param_dtype = str(config_lib.at_least_float32(model.config.param_dtype))
  config = dataclasses.replace(
      model.config, adapter=None, param_dtype=param_dtype
  )
  return decoder.Decoder(config), merged(params)
