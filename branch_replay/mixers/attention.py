# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of full attention; see `mixers.kinds`.

Their state is a pair (k, v) of [L, K, P, D], and so is its cotangent. Queries
travel, keys stay: every device attends with the queries of all to the keys it
has, and gets its own queries' outputs back.
"""

import jax
from jax import lax
from jax.experimental import layout as layout_lib
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import host_memory
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import layers
from branch_replay.ops import attention

MIXED = 3  # queries, keys and values
STAGE = "rotate"


def zeros(config: config_lib.ModelConfig, count: int, slots: int, dtype):
  """Keys and values of so many positions, [L, K, slots, D] each."""
  shape = count, config.num_kv_heads, slots, config.head_dim
  return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def empty(config, count: int, sizes: sizes_lib.Sizes):
  """The state of no positions with room for `sizes.here`."""
  return zeros(config, count, sizes.here, config.compute_dtype)


def accumulator(config, count: int, sizes: sizes_lib.Sizes, dtype):
  """Zeros like the state, in another dtype."""
  return zeros(config, count, sizes.here, dtype)


def seen(stack):
  """All of it: `prefix_length` says how far a segment sees."""
  return stack


def fit(stack, here: int):
  """The state with room for `here` positions on this device."""
  def fit_one(x_LKPD):
    if x_LKPD.shape[2] >= here:
      return lax.slice_in_dim(x_LKPD, 0, here, axis=2)
    room = here - x_LKPD.shape[2]
    return jnp.pad(x_LKPD, ((0, 0), (0, 0), (0, room), (0, 0)))

  return tuple(fit_one(x) for x in stack)


def push(stack, present, chunk: sizes_lib.Chunk):
  """The state with a chunk's keys and values."""
  return tuple(
      lax.dynamic_update_slice_in_dim(
          x, host_memory.beside(new[:, :, 0], x), chunk.start, axis=2
      )
      for x, new in zip(stack, present, strict=True)
  )


def save(stack, size: int):
  """Nothing: positions past those of a segment's prefix are not seen."""
  del stack, size
  return ()


def restore(stack, saved, chunk: sizes_lib.Chunk):
  """The state as it is, see `save`."""
  del saved, chunk
  return stack


def extend(stack, present, chunk: sizes_lib.Chunk):
  """`push` of the real positions alone, as there may be no room for more."""
  at = jnp.arange(present[0].shape[3])
  at = jnp.where(at < chunk.tokens, chunk.start + at, stack[0].shape[2])
  return tuple(
      x.at[:, :, at].set(new[:, :, 0], mode="drop")
      for x, new in zip(stack, present, strict=True)
  )


def skip(stack, chunk: sizes_lib.Chunk):
  """The cotangents of other chunks stay where they are."""
  del chunk
  return stack


def rotate(config, params, mixed, positions_GT):
  """Queries, keys and values as the attention op reads them."""
  module = layers.Rotate(config)
  return module.apply({"params": params}, *mixed, positions_GT)


def forward(config, layout, params, mixed, layer, context, prefix):
  """One layer of a segment.

  Args:
    config: geometry.
    layout: where tokens live.
    params: of the stage `STAGE`.
    mixed: the layer's first `MIXED` projections.
    layer: i32 scalar, which of the stack.
    context: `segment.Context`.
    prefix: what is seen of the stack's state.

  Returns:
    out_KGRTD, the present (k, v), and what `backward` wants kept.
  """
  return attend(
      config, layout, params, mixed, layer, context, prefix,
      context.prefix_length,
  )


def attend(
    config, layout, params, mixed, layer, context, prefix, prefix_length,
    window=None, rotate=rotate,
):
  """`forward` on top of a number of positions, with a window, rotated so."""
  q, k, v = rotate(config, params, mixed, context.positions_GT)
  out, lse = layout.merge(*attention.forward(
      layout.all(q, 3), k, v, prefix, layer, prefix_length,
      context.lengths_G, stripe=layout.stripe(), window=window,
      kernel=layout.kernel(q), blocks=context.blocks,
  ))
  return out.astype(q.dtype), (k, v), lse


def backward(
    config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
    accumulator, popped,
):
  """Pulls the cotangent of a layer's output back.

  Args:
    config, layout, params, mixed, layer, context, prefix: as in `forward`.
    out: what `forward` returned.
    lse: what it wanted kept.
    d_out: cotangent of out.
    accumulator: of the state, added to in place; None to stop at the prefix.
    popped: `segment.Popped` if this is a chunk of the prefix, else None.

  Returns:
    Cotangents of `mixed` and of the parameters, and the accumulator.
  """
  return pull(
      config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
      accumulator, context.prefix_length,
      d_present=cotangent_of_present(layer, context, popped),
  )


def cotangent_of_present(layer, context, popped):
  """accumulator ↦ what it holds of a chunk's keys and values, or None."""
  if popped is None:
    return None
  tokens = context.positions_GT.shape[1]
  return lambda accumulator: tuple(
      popped.scale * _present(x, layer, popped.chunk.start, tokens)
      for x in accumulator
  )


def pull(
    config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
    accumulator, prefix_length, *, d_present, window=None, rotate=rotate,
):
  """`backward` with the cotangent of the present as a function, or None."""
  (q, k, v), pull_rotate = jax.vjp(
      lambda p, *raw: rotate(config, p, raw, context.positions_GT),
      params, *mixed,
  )
  delta = attention.row_delta(d_out, out)
  dq, dk, dv, accumulator = attention.backward_rows(
      layout.all(d_out, 3), layout.all(q, 3), k, v, layout.all(lse, 3),
      layout.all(delta, 3), prefix, layer, prefix_length,
      accumulator=accumulator, stripe=layout.stripe(), window=window,
      kernel=layout.kernel(q), blocks=context.blocks,
  )
  dq = layout.sum_mine(dq, 3).astype(q.dtype)
  if d_present is not None:
    # The op added to earlier positions only, so this may be read after it;
    # read before, XLA would keep a second copy of the whole accumulator.
    of_k, of_v = d_present(accumulator)
    dk, dv = dk + of_k, dv + of_v
  d_params, *d_mixed = pull_rotate(
      (dq, dk.astype(k.dtype), dv.astype(v.dtype))
  )
  return d_mixed, d_params, accumulator


def _present(x_LKPD, layer, start, tokens):
  """What stands at a segment of one row: [K, G=1, C, D]."""
  x_KPD = lax.dynamic_index_in_dim(x_LKPD, layer, 0, keepdims=False)
  x_KCD = lax.dynamic_slice_in_dim(x_KPD, start, tokens, axis=1)
  # What follows would rather have positions innermost; unpinned, XLA for TPU
  # keeps a transposed copy of the whole accumulator to read this from.
  x_KCD = with_layout_constraint(x_KCD, layout_lib.Layout((0, 1, 2)))
  return lax.optimization_barrier(x_KCD)[:, None]


def cache(config: config_lib.ModelConfig, count, branches, tokens, stack):
  """Room for the keys and values of each branch's own tokens."""
  del stack
  shape = count, config.num_kv_heads, branches, tokens, config.head_dim
  return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(2))


def decode(
    config, params, mixed, layer, cache, stack, length, slots_GT
):
  """One layer of new tokens of every branch.

  Args:
    config, params, mixed: as in `forward`.
    layer: scalar, which of the stack.
    cache: of the stack; its slot s is the token at position length + s.
    stack: the state of the prefix.
    length: i32 scalar, positions of the prefix.
    slots_GT: i32, the slots of the new tokens, consecutive in each branch.

  Returns:
    out_KGRTD, the cache with the new tokens, and what `settle` needs to take
    some of them in later: nothing here.
  """
  return attend_cache(
      config, params, mixed, layer, cache, stack, length, slots_GT,
      length + slots_GT,
  )


def write_cache(cache, layer, slots_GT, present):
  """A cache with new keys and values at their slots of one layer.

  Args:
    cache: pair of [L, K, G, S, D].
    layer: i32 scalar.
    slots_GT: where; slots ≥ S are dropped.
    present: pair of [K, G, T, D].
  """
  rows_G1 = jnp.arange(slots_GT.shape[0])[:, None]
  return tuple(
      old.at[layer, :, rows_G1, slots_GT].set(
          new.transpose(1, 2, 0, 3).astype(old.dtype), mode="drop"
      )
      for old, new in zip(cache, present, strict=True)
  )


def attend_cache(
    config, params, mixed, layer, cache, prefix, prefix_length, slots_GT,
    positions_GT, *, window=None, lowest_GT=None, rotate=rotate,
):
  """`decode` on top of a number of positions, with a window, rotated so."""
  q, k, v = rotate(config, params, mixed, positions_GT)
  cache = write_cache(cache, layer, slots_GT, (k, v))
  out = attention.decode(
      q, cache, layer, slots_GT, prefix, layer, prefix_length, window=window,
      lowest_GT=lowest_GT,
  )
  return out, cache, None


def settle(config, params, cache, block, taken_G):
  """Slots beyond those that a branch took are not seen, and written over.

  Args:
    config: geometry.
    params: of the stage `STAGE`, of the whole stack.
    cache: of the stack.
    block: what `decode` left of every layer.
    taken_G: i32, how many of the block's tokens each branch took.

  Returns:
    The cache after the tokens that were taken.
  """
  del config, params, block, taken_G
  return cache
