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
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.mixers import attention as full
from branch_replay.mixers import mixer
from branch_replay.mixers import places
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.ops import attention

_Pair = tuple[jax.Array, jax.Array]  # keys and values, [L, K, slots, D]


class Windowed(NamedTuple):
  """The state of a stack.

  Attributes:
    now: the window that tails continue from.
    history: a window of nothing, then what is kept of each chunk; no slots
      where no chunk will be popped.
  """

  now: _Pair
  history: _Pair


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

  def empty(self, count, sizes: sizes_lib.Sizes) -> Windowed:
    slots = self.slots(sizes)
    kept = slots + sizes.chunks * min(slots, sizes.chunk) if sizes.chunks else 0
    return Windowed(*(
        self.zeros(count, size, self.config.compute_dtype)
        for size in (slots, kept)
    ))

  def accumulator(self, count, sizes: sizes_lib.Sizes, dtype) -> _Pair:
    """Zeros like one window, in another dtype."""
    return self.zeros(count, self.slots(sizes), dtype)

  def seen(self, stack: Windowed, index, chunk: int) -> _Pair:
    """The window before chunk `index`, or the one that tails continue from."""
    if index is None:
      return stack.now
    slots = stack.now[0].shape[2]
    start = index * min(slots, chunk)
    return tuple(
        lax.dynamic_slice_in_dim(x, start, slots, axis=2)
        for x in stack.history
    )

  def push(self, stack: Windowed, present, chunk: sizes_lib.Chunk) -> Windowed:
    """The state after a chunk, which may end in padding."""
    present = tuple(x[:, :, 0] for x in present)
    slots, size = stack.now[0].shape[2], present[0].shape[2]
    now = tuple(
        lax.dynamic_slice_in_dim(
            jnp.concatenate([old, new], axis=2), chunk.tokens, slots, axis=2
        )
        for old, new in zip(stack.now, present, strict=True)
    )
    if not stack.history[0].shape[2]:
      return Windowed(now, stack.history)
    keep = min(slots, size)
    return Windowed(now, tuple(
        lax.dynamic_update_slice_in_dim(
            x, new[:, :, size - keep :], slots + chunk.index * keep, axis=2
        )
        for x, new in zip(stack.history, present, strict=True)
    ))

  def extend(self, stack: Windowed, present, chunk) -> Windowed:
    """`push` without a history, of which these are no chunks."""
    nothing = tuple(x[:, :, :0] for x in stack.history)
    return self.push(Windowed(stack.now, nothing), present, chunk)

  def skip(self, stack: _Pair, chunk: sizes_lib.Chunk) -> _Pair:
    """The cotangent of the window before a chunk that is not popped."""
    return tuple(_older(x, chunk.tokens) for x in stack)

  def fit(self, stack: Windowed, here: int) -> Windowed:
    """A window is of one size for any number of positions."""
    del here
    return stack

  def complete(self, stack: Windowed, chunks: int, chunk: int) -> bool:
    """Whether the windows before these chunks are there."""
    slots = stack.now[0].shape[2]
    return stack.history[0].shape[2] == slots + chunks * min(slots, chunk)

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
    size = at.stack.now[0].shape[2]
    positions_GT = at.length + at.slots_GT
    lowest_GT = jnp.maximum(positions_GT - self.window + 1, 0)
    q, k, v = self.heads(params, mixed, positions_GT)
    cache = places.write_cache(cache, at.layer, at.slots_GT, (k, v))
    out = attention.decode(
        q, cache, at.layer, at.slots_GT, at.stack.now, at.layer, size,
        window=self.window, lowest_GT=lowest_GT - at.length + size,
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
