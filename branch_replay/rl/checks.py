# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes and names that the losses share; they work under `jit`."""

from typing import get_args

import jax.numpy as jnp


def check_mask(mask_GT, **arrays):
  """Raises ValueError unless mask is bool[..., G, T] and all have its shape."""
  mask_GT = jnp.asarray(mask_GT)
  if mask_GT.dtype != bool or mask_GT.ndim < 2:
    raise ValueError(
        f"mask of {mask_GT.dtype}{list(mask_GT.shape)}: it must be "
        "bool[..., G, T], true for the tokens that are trained."
    )
  for name, array in arrays.items():
    if jnp.shape(array) != mask_GT.shape:
      raise ValueError(
          f"{name} has shape {jnp.shape(array)} and mask {mask_GT.shape}: "
          "both must be [..., G, T]."
      )


def check_choice(field: str, value, allowed):
  """Raises ValueError for a value that the given Literal does not allow."""
  if value not in get_args(allowed):
    raise ValueError(
        f"Unknown {field} {value!r}: use one of {', '.join(get_args(allowed))}."
    )


def by_token(advantages, mask_GT):
  """Advantages per branch, [..., G], or per token, as [..., G, T]; 0 outside.

  Raises:
    ValueError: neither shape.
  """
  advantages = jnp.asarray(advantages)
  if advantages.shape == mask_GT.shape[:-1]:
    advantages = advantages[..., None]
  elif advantages.shape != mask_GT.shape:
    raise ValueError(
        f"advantages has shape {advantages.shape} and mask {mask_GT.shape}: "
        "one advantage a branch, [..., G], or one a token, [..., G, T]."
    )
  return jnp.where(mask_GT, advantages, 0)
