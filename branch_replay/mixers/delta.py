# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Gated delta layers; see `mixers.kinds`.

A prefix of any length leaves behind one matrix a value head and the last inputs
of the convolution. Those before a chunk are kept, because popping it runs it
again from there. Heads are dealt to the devices in
blocks, padded where their number does not divide: inputs travel to the device
of their head, outputs to that of their token.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.ops import gated_delta

MIXED = 2  # channels and rates
STAGE = "recur"


class Left(NamedTuple):
  """What a segment leaves behind.

  Attributes:
    matrix: [L, 1, K, R, D, E], at least float32.
    last: [L, 1, K, W − 1, X], in the compute dtype.
  """

  matrix: jax.Array
  last: jax.Array


def _left(config, count, devices, matrix_dtype, last_dtype) -> Left:
  delta = config.delta
  heads = -(-delta.key_heads // devices)
  repeats = delta.value_heads // delta.key_heads
  at = count, 1, heads
  return Left(
      jnp.zeros((*at, repeats, delta.key_dim, delta.value_dim), matrix_dtype),
      jnp.zeros((*at, delta.conv_width - 1, delta.channels), last_dtype),
  )


def empty(config, count: int, sizes: sizes_lib.Sizes) -> Left:
  """The state of no positions."""
  dtype = config.compute_dtype
  wide = config_lib.at_least_float32(dtype)
  return _left(config, count, sizes.devices, wide, dtype)


def accumulator(config, count: int, sizes: sizes_lib.Sizes, dtype) -> Left:
  """Zeros like what a segment continues from; never less than float32."""
  del dtype
  wide = config_lib.at_least_float32(config.compute_dtype)
  return _left(config, count, sizes.devices, wide, wide)


def seen(stack: Left) -> Left:
  """All of it: what segments continue from."""
  return stack


def fit(stack: Left, here: int) -> Left:
  """It is of one size for any number of positions."""
  del here
  return stack


def push(stack: Left, present: Left, chunk: sizes_lib.Chunk) -> Left:
  """The state after a chunk."""
  del stack, chunk
  return present


def save(stack: Left, size: int) -> Left:
  """All of it."""
  del size
  return stack


def restore(stack: Left, saved: Left, chunk: sizes_lib.Chunk) -> Left:
  """The state before the chunk that was pushed last."""
  del stack, chunk
  return saved


extend = push


def skip(stack: Left, chunk: sizes_lib.Chunk) -> Left:
  """A chunk that is not popped sends nothing to those before."""
  del chunk
  return jax.tree.map(jnp.zeros_like, stack)


def _heads(config, layout, mixed, tokens):
  """Channels and rates of this device's heads, for all tokens."""
  heads = config.delta.key_heads
  return tuple(
      layout.to_heads(x.reshape(-1, tokens, heads, x.shape[-1] // heads))
      for x in mixed
  )


def _mix(config, layout, params, mixed, left: Left, lengths_G):
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
      own, *mixed, matrix, last, lengths_G, key_dim=config.delta.key_dim
  )
  return out, Left(matrix, last)


def _at(left: Left, layer) -> Left:
  return jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, layer, 0, keepdims=False), left
  )


def forward(config, layout, params, mixed, layer, context, prefix):
  """One layer of a segment; see `mixers.attention.forward`."""
  tokens = context.positions_GT.shape[1]
  out, left = _mix(
      config, layout, params, _heads(config, layout, mixed, tokens),
      _at(prefix, layer), context.lengths_G,
  )
  return layout.to_tokens(out, config.delta.key_heads), left, None


def backward(
    config, layout, params, mixed, out, of_mixer, d_out, layer, context,
    prefix, accumulator, popped,
):
  """Pulls a layer's cotangent back; see `mixers.attention.backward`.

  Collectives stand outside of what is differentiated. A chunk of the prefix
  replaces the cotangent of what it left behind by that of what it continued
  from; tails add to it.
  """
  del out, of_mixer
  tokens = context.positions_GT.shape[1]
  of_heads = _heads(config, layout, mixed, tokens)
  (_, left), pull = jax.vjp(
      lambda params, mixed, left: _mix(
          config, layout, params, mixed, left, context.lengths_G
      ),
      params, of_heads, _at(prefix, layer),
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
  d_mixed = tuple(
      layout.to_tokens(d, config.delta.key_heads).reshape(x.shape)
      for d, x in zip(d_heads, mixed, strict=True)
  )
  return d_mixed, d_params, accumulator


def cache(config, count, branches, tokens, stack: Left) -> Left:
  """A copy for every branch, [L, K, G, ...]."""
  del config, count, tokens
  return jax.tree.map(
      lambda x: jnp.broadcast_to(
          jnp.moveaxis(x, 1, 2),
          (x.shape[0], x.shape[2], branches, *x.shape[3:]),
      ),
      stack,
  )


def decode(
    config, params, mixed, layer, cache: Left, stack, length, slots_GT
):
  """One layer of a block of new tokens; see `mixers.attention.decode`.

  One token is taken at once: it is the token that the branch has. What more of
  them would be added to cannot be taken back, so the cache stays as it was
  before a longer block, whose inputs are kept for `settle`.
  """
  del stack, length
  heads, (branches, tokens) = config.delta.key_heads, slots_GT.shape
  block = tuple(x.reshape(branches, tokens, heads, -1) for x in mixed)
  matrix, last = (x.swapaxes(0, 1) for x in _at(cache, layer))
  arguments = _own(params), *block, matrix, last
  key_dim = config.delta.key_dim
  if tokens > 1:
    out, _, _ = gated_delta.mix(*arguments, key_dim=key_dim)
    return out, cache, block
  out, *left = gated_delta.step(*arguments, key_dim=key_dim)
  return out, _put(cache, layer, left), None


def settle(config, params, cache: Left, block, taken_G) -> Left:
  """Runs the tokens that were taken once more, from before the block.

  See `mixers.attention.settle`.
  """
  if block is None:
    return cache

  def of_layer(cache, inputs):
    layer, params, block = inputs
    matrix, last = (x.swapaxes(0, 1) for x in _at(cache, layer))
    _, *left = gated_delta.mix(
        _own(params), *block, matrix, last, taken_G,
        key_dim=config.delta.key_dim,
    )
    return _put(cache, layer, left), None

  numbered = jnp.arange(cache.matrix.shape[0]), params, block
  cache, _ = lax.scan(of_layer, cache, numbered)
  return cache


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
