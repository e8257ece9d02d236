# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations on stacks of arrays with a place per position, [L, K, P, D].

A stack is a tuple of such arrays, of attention (keys, values).
"""

import jax
from jax import lax
from jax.experimental import layout as layout_lib
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp

from branch_replay.devices import host_memory
from branch_replay.mixers import sizes as sizes_lib


def fit(stack, here: int):
  """Cuts or pads the arrays to `here` positions."""
  def fit_one(x_LKPD):
    if x_LKPD.shape[2] >= here:
      return lax.slice_in_dim(x_LKPD, 0, here, axis=2)
    room = here - x_LKPD.shape[2]
    return jnp.pad(x_LKPD, ((0, 0), (0, 0), (0, room), (0, 0)))

  return tuple(fit_one(x) for x in stack)


def push(stack, present, chunk: sizes_lib.Chunk):
  """Writes a chunk's arrays `present`, [L, K, G=1, C, D], at its places."""
  return tuple(
      lax.dynamic_update_slice_in_dim(
          x, host_memory.beside(new[:, :, 0], x), chunk.start, axis=2
      )
      for x, new in zip(stack, present, strict=True)
  )


def extend(stack, present, chunk: sizes_lib.Chunk):
  """As `push`, but does not write padding, which may have no room."""
  at = jnp.arange(present[0].shape[3])
  at = jnp.where(at < chunk.tokens, chunk.start + at, stack[0].shape[2])
  return tuple(
      x.at[:, :, at].set(new[:, :, 0], mode="drop")
      for x, new in zip(stack, present, strict=True)
  )


def read(x_LKPD, layer, start, tokens: int):
  """Reads positions start … start + tokens of one layer, [K, G=1, C, D]."""
  x_KPD = lax.dynamic_index_in_dim(x_LKPD, layer, 0, keepdims=False)
  x_KCD = lax.dynamic_slice_in_dim(x_KPD, start, tokens, axis=1)
  # Later operations prefer positions innermost. Without this constraint XLA for
  # TPU keeps a transposed copy of the whole accumulator to read this from.
  x_KCD = with_layout_constraint(x_KCD, layout_lib.Layout((0, 1, 2)))
  return lax.optimization_barrier(x_KCD)[:, None]


def write_cache(cache, layer, slots_GT: jax.Array, present):
  """Writes new keys and values into the slots of one layer of a cache.

  Args:
    cache: pair of [L, K, G, S, D].
    layer: i32 scalar, which layer.
    slots_GT: i32, the slot of each new token; slots ≥ S are not written.
    present: keys and values of the new tokens, pair of [K, G, T, D].
  """
  rows_G1 = jnp.arange(slots_GT.shape[0])[:, None]
  return tuple(
      old.at[layer, :, rows_G1, slots_GT].set(
          new.transpose(1, 2, 0, 3).astype(old.dtype), mode="drop"
      )
      for old, new in zip(cache, present, strict=True)
  )
