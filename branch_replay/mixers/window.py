# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention layers with a sliding window.

A segment continues from the last W − 1 positions before it. They stand in W'
slots, W − 1 rounded up to the devices, and so does the cotangent of a prefix of
any length. Popping a chunk needs the window before it, so of every chunk its
last W' positions are kept too, or all of them where it has no more.

Position p is on device p mod n here as anywhere: slot i of a device is the i-th
of its own among the W' positions before the segment. Slots of positions before
0 may hold anything and are never visible.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.mixers import attention as full
from branch_replay.mixers import mixer
from branch_replay.mixers import places
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.ops import attention

_Pair = tuple[jax.Array, jax.Array]  # keys and values, [L, K, slots, D]


class SlidingWindow(full.FullAttention):
  """Every token attends to the last W positions, its own included."""

  positional = False
  geometry = "window"

  @property
  def rope(self):
    """That of the config, unless sliding layers have a base of their own."""
    if self.config.rope_theta_local is None:
      return super().rope
    return self.config.rope_theta_local, None

  @property
  def window(self) -> int:
    return self.config.window

  def slots(self, sizes: sizes_lib.Sizes) -> int:
    """W' on this device, but no more than the positions there will be."""
    return min(-(-(self.window - 1) // sizes.devices), sizes.room)

  def whole(self, module, mixed, positions_GT, attend):
    attend = functools.partial(attend, window=self.window)
    return super().whole(module, mixed, positions_GT, attend)

  def empty(self, count, sizes: sizes_lib.Sizes) -> _Pair:
    return self.zeros(count, self.slots(sizes), self.config.compute_dtype)

  def accumulator(self, count, sizes: sizes_lib.Sizes, dtype) -> _Pair:
    """Zeros like one window, in another dtype."""
    return self.zeros(count, self.slots(sizes), dtype)

  def push(self, stack: _Pair, present, chunk: sizes_lib.Chunk) -> _Pair:
    """The window after a chunk, which may end in padding."""
    slots = stack[0].shape[2]
    return tuple(
        lax.dynamic_slice_in_dim(
            jnp.concatenate([old, new[:, :, 0]], axis=2), chunk.tokens, slots,
            axis=2,
        )
        for old, new in zip(stack, present, strict=True)
    )

  def extend(self, stack: _Pair, present, chunk: sizes_lib.Chunk) -> _Pair:
    return self.push(stack, present, chunk)

  def save(self, stack: _Pair, size: int) -> _Pair:
    """What a chunk of `size` positions may push out of the window."""
    return tuple(x[:, :, : min(x.shape[2], size)] for x in stack)

  def restore(self, stack: _Pair, saved, chunk: sizes_lib.Chunk) -> _Pair:
    """What was pushed out, and then what is left of the window before."""
    def of(x, oldest):
      slots, count = x.shape[2], oldest.shape[2]
      padded = jnp.concatenate([oldest, jnp.zeros_like(x)], axis=2)
      at = jnp.minimum(chunk.tokens, count)
      padded = lax.dynamic_update_slice_in_dim(padded, x, at, axis=2)
      return padded[:, :, :slots]

    return tuple(map(of, stack, saved))

  def skip(self, stack: _Pair, chunk: sizes_lib.Chunk) -> _Pair:
    """The cotangent of the window before a chunk that is not popped."""
    return tuple(_older(x, chunk.tokens) for x in stack)

  def fit(self, stack: _Pair, here: int) -> _Pair:
    """A window is of one size for any number of positions."""
    del here
    return stack

  def reach(self, at: mixer.OnPrefix):
    """All slots, and how far back the tokens of all devices see in them."""
    layout, positions_GT = at.layout, at.context.positions_GT
    slots = at.prefix[0].shape[2]
    tokens = positions_GT.shape[1] * layout.devices
    first = positions_GT[0, 0] - layout.stripe().offset
    lowest_T = jnp.maximum(first + jnp.arange(tokens) - self.window + 1, 0)
    return slots, attention.Window(
        self.window, layout.here(lowest_T) - (layout.here(first) - slots)
    )

  def backward(self, at, params, record, d_out, accumulator, popped):
    """Parts the cotangent of the window that a chunk left behind.

    It holds the chunk's own last positions and, where the chunk is short, some
    before it.
    """
    newer = None
    if popped is not None:
      tokens, size = popped.chunk.tokens, at.context.positions_GT.shape[1]
      after = tuple(
          lax.dynamic_index_in_dim(x, at.layer, 0, keepdims=False)
          for x in accumulator
      )
      accumulator = tuple(
          total.at[at.layer].set(_older(x, tokens))
          for total, x in zip(accumulator, after, strict=True)
      )
      newer = tuple(
          popped.scale * _newer(x, tokens, size)[:, None] for x in after
      )
    return self.pull(
        at, params, record, d_out, accumulator,
        None if newer is None else lambda _: newer,
    )

  def decode(self, at: mixer.NewTokens, params, mixed, cache):
    size = at.stack[0].shape[2]
    positions_GT = at.length + at.slots_GT
    lowest_GT = jnp.maximum(positions_GT - self.window + 1, 0)
    q, k, v = self.heads(params, mixed, positions_GT)
    cache = places.write_cache(cache, at.layer, at.slots_GT, (k, v))
    out = attention.decode(
        q, cache, at.layer, at.slots_GT,
        attention.PrefixLayer(at.stack, at.layer, size), window=self.window,
        lowest_GT=lowest_GT - at.length + size,
    )
    return out, cache, None


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
