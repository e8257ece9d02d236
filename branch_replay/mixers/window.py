# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention layers with a sliding window.

A segment runs on top of the last W − 1 positions before it. They stand in W'
slots, W − 1 rounded up to a multiple of the number of devices. The cotangent of
a prefix has W' slots too, however long the prefix is. To pop a chunk the window
before it is needed. So for every chunk the slots that it pushes out of the
window are saved: W', or as many as it has positions if these are fewer.

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

  positional = attends = False
  geometry = "window"

  @property
  def rope(self):
    """Base and scaling of the rotary frequencies.

    They are `rope_theta_local` without scaling if the config has it, and those
    of full attention otherwise.
    """
    if self.config.rope_theta_local is None:
      return super().rope
    return self.config.rope_theta_local, None

  @property
  def window(self) -> int:
    return self.config.window

  def slots(self, sizes: sizes_lib.Sizes) -> int:
    """Slots of a device: its share of W', or all it has positions for if fewer.
    """
    return min(-(-(self.window - 1) // sizes.devices), sizes.room)

  def whole(self, module, mixed, positions_GT, attend):
    attend = functools.partial(attend, window=self.window)
    return super().whole(module, mixed, positions_GT, attend)

  def empty(self, count, sizes: sizes_lib.Sizes) -> _Pair:
    return self.zeros(count, self.slots(sizes), self.config.compute_dtype)

  def accumulator(self, count, sizes: sizes_lib.Sizes, dtype) -> _Pair:
    """Makes zeros in the shape of one window, in another dtype."""
    return self.zeros(count, self.slots(sizes), dtype)

  def push(self, stack: _Pair, present, chunk: sizes_lib.Chunk) -> _Pair:
    """Returns the window after a chunk, which may end in padding."""
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
    """Returns the oldest slots, which a chunk of `size` positions may push out.
    """
    return tuple(x[:, :, : min(x.shape[2], size)] for x in stack)

  def restore(self, stack: _Pair, saved, chunk: sizes_lib.Chunk) -> _Pair:
    """Joins the slots that were pushed out with those that are still there."""
    def of(x, oldest):
      slots, count = x.shape[2], oldest.shape[2]
      padded = jnp.concatenate([oldest, jnp.zeros_like(x)], axis=2)
      at = jnp.minimum(chunk.tokens, count)
      padded = lax.dynamic_update_slice_in_dim(padded, x, at, axis=2)
      return padded[:, :, :slots]

    return tuple(map(of, stack, saved))

  def skip(self, stack: _Pair, chunk: sizes_lib.Chunk) -> _Pair:
    """Returns the cotangent of the window before a chunk that is left out.

    What had accumulated for positions of the chunk is dropped.
    """
    return tuple(_older(x, chunk.tokens) for x in stack)

  def fit(self, stack: _Pair, here: int) -> _Pair:
    """Returns the window unchanged: its size does not follow the capacity.

    `empty` has given it slots enough for any capacity up to `sizes.room`, so
    nothing is cut or padded for `here` positions.
    """
    del here
    return stack

  def reach(self, at: mixer.OnPrefix):
    """Returns the number of slots, and the lowest slot that each token sees.

    The tokens are those of all devices.
    """
    layout, positions_GT = at.layout, at.context.positions_GT
    slots = at.prefix[0].shape[2]
    tokens = positions_GT.shape[1] * layout.devices
    first = positions_GT[0, 0] - layout.stripe().offset
    lowest_T = jnp.maximum(first + jnp.arange(tokens) - self.window + 1, 0)
    return slots, attention.Window(
        self.window, layout.here(lowest_T) - (layout.here(first) - slots)
    )

  def band(self, at: mixer.OnPrefix) -> None:
    """Returns None: a window is pulled back whole, also in "banded"."""
    del at

  def backward(self, at, params, record, d_out, accumulator, popped):
    """See `Mixer.backward`; for a popped chunk, first divides the accumulator.

    It then holds the cotangent of the window after the chunk: of the chunk's
    own last positions, which are pulled back now, and, where the chunk is
    shorter than the window, of positions before it, which stay in the
    accumulator.
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
