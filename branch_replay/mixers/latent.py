# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Latent attention layers; see `mixers.kinds` and `models.latent_layers`.

Their state is one array of [L, 1, P, C + D_r]: the latents and rotated keys
that all heads share, which attention reads as keys and as values. Cotangents of
the two uses are accumulated apart, as the op writes them.
"""

import jax.numpy as jnp

from branch_replay.mixers import attention as full
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import latent_layers

MIXED = 2  # queries and latents
STAGE = "rotate"
save, restore = full.save, full.restore
skip, settle = full.skip, full.settle


def _zeros(config, count: int, slots: int, dtype):
  return jnp.zeros((count, 1, slots, config.latent.slot), dtype)


def empty(config, count: int, sizes: sizes_lib.Sizes):
  """The state of no positions with room for `sizes.here`."""
  return _zeros(config, count, sizes.here, config.compute_dtype)


def accumulator(config, count: int, sizes: sizes_lib.Sizes, dtype):
  """Zeros for what reaches the state as keys, and as values."""
  return tuple(_zeros(config, count, sizes.here, dtype) for _ in range(2))


def seen(stack):
  """All of it, as keys and as values."""
  return stack, stack


def fit(stack, here: int):
  """The state with room for `here` positions on this device."""
  return full.fit((stack,), here)[0]


def push(stack, present, chunk: sizes_lib.Chunk):
  """The state with a chunk's latents."""
  return full.push((stack,), present[:1], chunk)[0]


def extend(stack, present, chunk: sizes_lib.Chunk):
  """`push` of the real positions alone."""
  return full.extend((stack,), present[:1], chunk)[0]


def _rotate(config, params, mixed, positions_GT):
  module = latent_layers.LatentRotate(config)
  return module.apply({"params": params}, *mixed, positions_GT)


def forward(config, layout, params, mixed, layer, context, prefix):
  """One layer of a segment; see `mixers.attention.forward`."""
  return full.attend(
      config, layout, params, mixed, layer, context, prefix,
      context.prefix_length, rotate=_rotate,
  )


def backward(
    config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
    accumulator, popped,
):
  """Pulls a layer's cotangent back; see `mixers.attention.backward`."""
  return full.pull(
      config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
      accumulator, context.prefix_length, rotate=_rotate,
      d_present=full.cotangent_of_present(layer, context, popped),
  )


def cache(config, count, branches, tokens, stack):
  """Room for each branch's own latents, as keys and as values."""
  del stack
  shape = count, 1, branches, tokens, config.latent.slot
  return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(2))


def decode(
    config, params, mixed, layer, cache, stack, length, slots_GT
):
  """One layer of new tokens; see `mixers.attention.decode`."""
  return full.attend_cache(
      config, params, mixed, layer, cache, (stack, stack), length, slots_GT,
      length + slots_GT, rotate=_rotate,
  )
