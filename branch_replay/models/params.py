# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that parameters fit a model, by names and shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.models import decoder


def check(model: decoder.Decoder, params) -> None:
  """Checks that a tree has all parameters of a model, and none it ignores.

  Readouts may own further parameters under top-level names of their own.

  Args:
    model: the decoder.
    params: the tree of parameters; its leaves are arrays or shapes.

  Raises:
    TypeError: `model` is no decoder or `params` no dict.
    ValueError: a parameter is missing, has another shape or is not of floats;
      or the model would not read it.
  """
  check_model(model)
  checks.params_tree(params)
  wanted, found = _expected(model.config), _named(params)
  for name, shape in wanted.items():
    leaf = found.get(name)
    if leaf is None:
      raise ValueError(
          f"params has no {name}, of shape {shape}: they are not of this "
          f"model. It has {_some(found)}."
      )
    if tuple(np.shape(leaf)) != shape:
      raise ValueError(
          f"params has {name} of shape {tuple(np.shape(leaf))}, and the model's"
          f" is {shape}: they are of another config."
      )
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(
        leaf.dtype, jnp.floating
    ):
      raise ValueError(
          f"params has {name} of {getattr(leaf, 'dtype', type(leaf).__name__)}:"
          " parameters are arrays of floats."
      )
  unread = [
      name for name in found if name not in wanted
      and name.split("/")[0] in ("layers", "embed", "head", "final_norm")
  ]
  if unread:
    raise ValueError(
        f"params has {_some(unread)}, which a model of this config does not "
        "read: they are of another config (adapters, a head of its own)."
    )


def check_model(model) -> None:
  """Raises TypeError for anything but a `Decoder`."""
  if not isinstance(model, decoder.Decoder):
    hint = ""
    if isinstance(model, config_lib.ModelConfig):
      hint = " Wrap it: Decoder(config)."
    elif hasattr(model, "model"):
      hint = " Pass its .model."
    raise TypeError(
        f"model must be a Decoder, not a {type(model).__name__}.{hint}"
    )
  checks.instance(model.config, "Decoder.config", config_lib.ModelConfig)


def _named(tree) -> dict:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {checks.path_name(path): leaf for path, leaf in leaves}


@functools.lru_cache(maxsize=64)
def _expected(config: config_lib.ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shapes of the parameters of a model, by name."""
  model = decoder.Decoder(config)
  shapes = jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  return {name: tuple(x.shape) for name, x in _named(shapes).items()}


def _some(names) -> str:
  names = list(names)
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return (", ".join(names[:3]) or "nothing") + more
