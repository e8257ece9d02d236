# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention layers with a sliding window; see `mixers.kinds`.

A segment continues from the last W − 1 positions before it. They stand in W'
slots, W − 1 rounded up to the devices, and so does the cotangent of a prefix of
any length. Popping a chunk needs the window before it: the positions
that pushing it pushed out, at most W', are kept.

Position p is on device p mod n here as anywhere: slot i of a device is the i-th
of its own among the W' positions before the segment. Slots of positions before
0 may hold anything and are never visible.
"""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import attention as full
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import layers
from branch_replay.ops import attention

MIXED, STAGE = full.MIXED, full.STAGE
cache, settle = full.cache, full.settle


def _rotate(config, params, mixed, positions_GT):
  module = layers.Rotate(config, "sliding")
  return module.apply({"params": params}, *mixed, positions_GT)


_Pair = tuple[jax.Array, jax.Array]  # keys and values, [L, K, slots, D]


def _slots(config: config_lib.ModelConfig, sizes: sizes_lib.Sizes) -> int:
  """W' on this device, but no more than the positions there will be."""
  return min(-(-(config.window - 1) // sizes.devices), sizes.room)


def empty(config, count: int, sizes: sizes_lib.Sizes) -> _Pair:
  """The state of no positions."""
  return full.zeros(
      config, count, _slots(config, sizes), config.compute_dtype
  )


def accumulator(config, count: int, sizes: sizes_lib.Sizes, dtype) -> _Pair:
  """Zeros like one window, in another dtype."""
  return full.zeros(config, count, _slots(config, sizes), dtype)


def seen(stack: _Pair) -> _Pair:
  """All of it: the window that segments continue from."""
  return stack


def fit(stack: _Pair, here: int) -> _Pair:
  """A window is of one size for any number of positions."""
  del here
  return stack


def push(stack: _Pair, present, chunk: sizes_lib.Chunk) -> _Pair:
  """The window after a chunk, which may end in padding."""
  present = tuple(x[:, :, 0] for x in present)
  slots = stack[0].shape[2]
  return tuple(
      lax.dynamic_slice_in_dim(
          jnp.concatenate([old, new], axis=2), chunk.tokens, slots, axis=2
      )
      for old, new in zip(stack, present, strict=True)
  )


def save(stack: _Pair, size: int) -> _Pair:
  """What a chunk of `size` positions may push out of the window."""
  return tuple(x[:, :, : min(x.shape[2], size)] for x in stack)


def restore(stack: _Pair, saved: _Pair, chunk: sizes_lib.Chunk) -> _Pair:
  """The window before the chunk that was pushed last."""
  def of(x, oldest):
    slots, count = x.shape[2], oldest.shape[2]
    padded = jnp.concatenate([oldest, jnp.zeros_like(x)], axis=2)
    # What the chunk left in the window stands that much further back.
    at = jnp.minimum(chunk.tokens, count)
    padded = lax.dynamic_update_slice_in_dim(padded, x, at, axis=2)
    padded = lax.dynamic_update_slice_in_dim(padded, oldest, 0, axis=2)
    return padded[:, :, :slots]

  return tuple(map(of, stack, saved))


def extend(stack: _Pair, present, chunk: sizes_lib.Chunk) -> _Pair:
  """`push`, of any number of positions."""
  return push(stack, present, chunk)


def skip(stack: _Pair, chunk: sizes_lib.Chunk) -> _Pair:
  """The cotangent of the window before a chunk that is not popped."""
  return tuple(_older(x, chunk.tokens) for x in stack)


def _older(x_LKSD, tokens):
  """Of a window after a chunk, what stood in the one before it."""
  slots = x_LKSD.shape[-2]
  padded = jnp.concatenate([jnp.zeros_like(x_LKSD), x_LKSD], axis=-2)
  start = slots - jnp.minimum(tokens, slots)
  return lax.dynamic_slice_in_dim(padded, start, slots, axis=-2)


def _newer(x_KSD, tokens, size: int):
  """Of a window after a chunk of `size`, what stands in the chunk."""
  slots = x_KSD.shape[1]
  padded = jnp.pad(x_KSD, ((0, 0), (size, size), (0, 0)))
  return lax.dynamic_slice_in_dim(
      padded, size + slots - tokens, size, axis=1
  )


def _reach(config, layout, positions_GT, slots: int) -> attention.Window:
  """How far back the tokens of all devices see, counted in slots."""
  tokens = positions_GT.shape[1] * layout.devices
  first = positions_GT[0, 0] - layout.stripe().offset
  lowest_T = jnp.maximum(first + jnp.arange(tokens) - config.window + 1, 0)
  return attention.Window(
      config.window, layout.here(lowest_T) - (layout.here(first) - slots)
  )


def forward(config, layout, params, mixed, layer, context, prefix):
  """One layer of a segment; see `mixers.attention.forward`."""
  slots = prefix[0].shape[2]
  return full.attend(
      config, layout, params, mixed, layer, context, prefix, slots,
      _reach(config, layout, context.positions_GT, slots), rotate=_rotate,
  )


def backward(
    config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
    accumulator, popped,
):
  """Pulls a layer's cotangent back; see `mixers.attention.backward`.

  What a chunk left behind is a window that holds its own last positions and,
  where it is short, some before it: their cotangents part here.
  """
  slots, newer = prefix[0].shape[2], None
  if popped is not None:
    tokens, size = popped.chunk.tokens, context.positions_GT.shape[1]
    after = tuple(
        lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
        for x in accumulator
    )
    accumulator = tuple(
        total.at[layer].set(_older(x, tokens))
        for total, x in zip(accumulator, after, strict=True)
    )
    newer = tuple(
        popped.scale * _newer(x, tokens, size)[:, None] for x in after
    )
  return full.pull(
      config, layout, params, mixed, out, lse, d_out, layer, context, prefix,
      accumulator, slots,
      d_present=None if newer is None else lambda _: newer,
      window=_reach(config, layout, context.positions_GT, slots),
      rotate=_rotate,
  )


def decode(
    config, params, mixed, layer, cache, stack, length, slots_GT
):
  """One layer of new tokens; see `mixers.attention.decode`."""
  size = stack[0].shape[2]
  positions_GT = length + slots_GT
  lowest_GT = jnp.maximum(positions_GT - config.window + 1, 0)
  return full.attend_cache(
      config, params, mixed, layer, cache, stack, size, slots_GT,
      positions_GT, window=config.window, lowest_GT=lowest_GT - length + size,
      rotate=_rotate,
  )
