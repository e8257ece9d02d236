# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta layers.

Whatever its length, a prefix leaves behind one matrix for each value head and
the last inputs of the convolution. The state before each chunk is saved,
because popping a chunk runs it again from there. Heads are dealt to the devices
in blocks, with heads of zeros added where the devices do not divide their
number. Inputs travel to the device of their head, outputs back to the device of
their token.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import mixer
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import delta_layers
from branch_replay.ops import gated_delta


class Left(NamedTuple):
  """What a segment leaves behind.

  Attributes:
    matrix: [L, 1, K, R, D, E], at least float32.
    last: [L, 1, K, W − 1, X], in the compute dtype.
  """

  matrix: jax.Array
  last: jax.Array


class GatedDeltaMixer(mixer.Mixer):
  """Each value head has a matrix that decays, and that every token corrects."""

  positional, recurrent = False, True
  stage, takes = "recur", 2  # channels and rates
  geometry = "delta"
  transposes = True

  def project(self):
    return delta_layers.DeltaProject(self.config)

  def mix(self):
    return delta_layers.DeltaRecur(self.config)

  def join(self):
    return delta_layers.DeltaJoin(self.config)

  def whole(self, module, mixed, positions_GT, attend):
    del attend
    return module(*mixed, positions_GT.shape[1])

  def empty(self, count, sizes: sizes_lib.Sizes) -> Left:
    dtype = self.config.compute_dtype
    wide = config_lib.at_least_float32(dtype)
    return self._left(count, sizes.devices, wide, dtype)

  def accumulator(self, count, sizes: sizes_lib.Sizes, dtype) -> Left:
    """Makes zeros in the shape of the state, at least float32 for any `dtype`.
    """
    del dtype
    wide = config_lib.at_least_float32(self.config.compute_dtype)
    return self._left(count, sizes.devices, wide, wide)

  def _left(self, count, devices, matrix_dtype, last_dtype) -> Left:
    delta = self.config.delta
    heads = -(-delta.key_heads // devices)
    repeats = delta.value_heads // delta.key_heads
    at = count, 1, heads
    return Left(
        jnp.zeros((*at, repeats, delta.key_dim, delta.value_dim), matrix_dtype),
        jnp.zeros((*at, delta.conv_width - 1, delta.channels), last_dtype),
    )

  def push(self, stack: Left, present: Left, chunk) -> Left:
    del stack, chunk
    return present

  def extend(self, stack: Left, present: Left, chunk) -> Left:
    return self.push(stack, present, chunk)

  def save(self, stack: Left, size: int) -> Left:
    """Returns the whole state: a chunk cannot be taken out of the matrix."""
    del size
    return stack

  def restore(self, stack: Left, saved: Left, chunk) -> Left:
    del stack, chunk
    return saved

  def skip(self, stack: Left, chunk: sizes_lib.Chunk) -> Left:
    """Returns zeros: past a chunk that is left out no cotangent goes back."""
    del chunk
    return jax.tree.map(jnp.zeros_like, stack)

  def fit(self, stack: Left, here: int) -> Left:
    """Returns the state unchanged: its size does not follow the capacity."""
    del here
    return stack

  def _heads(self, layout, mixed, tokens: int):
    """Channels and rates of this device's heads, for all tokens."""
    heads = self.config.delta.key_heads
    return tuple(
        layout.to_heads(x.reshape(-1, tokens, heads, x.shape[-1] // heads))
        for x in mixed
    )

  def _mix(self, layout, params, mixed, left: Left, lengths_G):
    """`gated_delta.mix` of this device's heads on top of one state for all."""
    own = gated_delta.Parameters(*(
        layout.my_heads(params[name])
        for name in ("filter", "log_rate", "rate_bias")
    ))
    branches = mixed[0].shape[0]
    matrix, last = (
        jnp.broadcast_to(x, (branches, *x.shape[1:])) for x in left
    )
    out, matrix, last = gated_delta.mix(
        own, *mixed, matrix, last, lengths_G,
        key_dim=self.config.delta.key_dim,
    )
    return out, Left(matrix, last)

  def forward(self, at: mixer.OnPrefix, params, mixed):
    layout, context = at.layout, at.context
    tokens = context.positions_GT.shape[1]
    out, left = self._mix(
        layout, params, self._heads(layout, mixed, tokens),
        _at(at.prefix, at.layer), context.lengths_G,
    )
    return layout.to_tokens(out, self.config.delta.key_heads), left, None

  def backward(self, at, params, record, d_out, accumulator, popped):
    """See `Mixer.backward`; no collective is inside what `jax.vjp` is given.

    The accumulator holds the cotangent of the state a segment runs on. Tails
    add to it. A popped chunk replaces it, the cotangent of what the chunk left
    behind, by that of the state before the chunk.
    """
    layout, layer, context = at.layout, at.layer, at.context
    tokens = context.positions_GT.shape[1]
    of_heads = self._heads(layout, record.mixed, tokens)
    (_, left), pull = jax.vjp(
        lambda params, mixed, left: self._mix(
            layout, params, mixed, left, context.lengths_G
        ),
        params, of_heads, _at(at.prefix, layer),
    )
    if popped is None:
      d_left = jax.tree.map(jnp.zeros_like, left)
    else:
      d_left = jax.tree.map(
          lambda total, x: (popped.scale * total).astype(x.dtype),
          _at(accumulator, layer), left,
      )
    d_params, d_heads, d_before = pull((layout.to_heads(d_out), d_left))
    if accumulator is not None:
      def add(total, new):
        if popped is not None:
          return total.at[layer].set(new.astype(total.dtype))
        return total.at[layer].add(new.astype(total.dtype))

      accumulator = jax.tree.map(add, accumulator, d_before)
    heads = self.config.delta.key_heads
    d_mixed = tuple(
        layout.to_tokens(d, heads).reshape(x.shape)
        for d, x in zip(d_heads, record.mixed, strict=True)
    )
    return d_mixed, d_params, accumulator

  def cache(self, count, branches, tokens, stack: Left) -> Left:
    """Makes a copy of the prefix state for every branch, [L, K, G, ...]."""
    del count, tokens
    return jax.tree.map(
        lambda x: jnp.broadcast_to(
            jnp.moveaxis(x, 1, 2),
            (x.shape[0], x.shape[2], branches, *x.shape[3:]),
        ),
        stack,
    )

  def decode(self, at: mixer.NewTokens, params, mixed, cache: Left):
    """See `Mixer.decode`; several new tokens enter the cache only in `settle`.

    A single token always becomes part of its branch, so it goes into the cache
    at once. Of several a branch may accept only some, and a token cannot be
    taken out of the matrix again. So the cache stays as it was before them, and
    their inputs are kept for `settle`.
    """
    delta, (branches, tokens) = self.config.delta, at.slots_GT.shape
    block = tuple(
        x.reshape(branches, tokens, delta.key_heads, -1) for x in mixed
    )
    matrix, last = (x.swapaxes(0, 1) for x in _at(cache, at.layer))
    arguments = _own(params), *block, matrix, last
    if tokens > 1:
      out, _, _ = gated_delta.mix(*arguments, key_dim=delta.key_dim)
      return out, cache, block
    out, *left = gated_delta.step(*arguments, key_dim=delta.key_dim)
    return out, _put(cache, at.layer, left), None

  def settle(self, params, cache: Left, block, taken_G) -> Left:
    """Runs the accepted tokens once more, from the cache before all new ones.
    """
    if block is None:
      return cache

    def of_layer(cache, inputs):
      layer, params, block = inputs
      matrix, last = (x.swapaxes(0, 1) for x in _at(cache, layer))
      _, *left = gated_delta.mix(
          _own(params), *block, matrix, last, taken_G,
          key_dim=self.config.delta.key_dim,
      )
      return _put(cache, layer, left), None

    numbered = jnp.arange(cache.matrix.shape[0]), params, block
    cache, _ = lax.scan(of_layer, cache, numbered)
    return cache

  def weights(self) -> int:
    delta = self.config.delta
    channels = delta.key_heads * delta.channels
    values = delta.value_heads * (2 + 2 * delta.value_dim)
    projected = self.config.width * (channels + values)
    return projected + channels * delta.conv_width

  def operations(self, tokens: int, prefix: int) -> int:
    """6DE operations for each token and value head, whatever `prefix` is."""
    del prefix
    delta = self.config.delta
    return 6 * delta.value_heads * delta.key_dim * delta.value_dim * tokens

  def stage_bytes(self) -> int:
    delta = self.config.delta
    itemsize = jnp.dtype(self.config.compute_dtype).itemsize
    channels = delta.key_heads * delta.channels
    values = 2 * delta.value_heads * (1 + delta.value_dim)
    return itemsize * (2 * self.config.width + channels + values)


def _at(left: Left, layer) -> Left:
  return jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), left
  )


def _own(params) -> gated_delta.Parameters:
  return gated_delta.Parameters(
      params["filter"], params["log_rate"], params["rate_bias"]
  )


def _put(cache: Left, layer, left) -> Left:
  """The cache with what one layer left behind in every branch."""
  return jax.tree.map(
      lambda x, new: x.at[layer].set(new.swapaxes(0, 1).astype(x.dtype)),
      cache, Left(*left),
  )
