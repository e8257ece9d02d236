# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of full attention.

Their state is a pair (k, v) of [L, K, P, D], and so is its cotangent. Queries
travel, keys stay: every device attends with the queries of all to the keys it
has, and gets its own queries' outputs back.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import mixer
from branch_replay.mixers import places
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import layers
from branch_replay.ops import attention
from branch_replay.ops.attention import tiling


class FullAttention(mixer.Mixer):
  """Every token attends to all before it, and to itself.

  A subclass may override `rotate`, which makes the queries, keys and values
  that attention reads, and inherit everything else.
  """

  positional, recurrent = True, False
  stage, takes = "rotate", 3
  transposes = attends = True

  @property
  def rope(self) -> tuple[float, config_lib.RopeScaling | None]:
    """Base and scaling of the rotary frequencies."""
    return self.config.rope_theta, self.config.rope_scaling

  @property
  def window(self) -> int | None:
    """Positions that a token sees, its own included; None for all."""
    return None

  @property
  def slot_shape(self) -> tuple[int, int]:
    """(K, D) of the state's arrays: key heads, and the width of a head."""
    return self.config.num_kv_heads, self.config.head_dim

  def project(self) -> nn.Module:
    return layers.Project(self.config)

  def mix(self) -> nn.Module:
    return layers.Rotate(self.config, self.rope)

  def join(self) -> nn.Module:
    return layers.Join(self.config)

  def rotate(self, module: nn.Module, mixed, positions_GT):
    """Makes the queries, keys and values that attention reads.

    Args:
      module: what `mix` made, bound to its parameters.
      mixed: the first `takes` projections.
      positions_GT: i32, absolute positions of the tokens.

    Returns:
      q_KGRTD, k_KGTD, v_KGTD.
    """
    return module(*mixed, positions_GT)

  def heads(self, params, mixed, positions_GT):
    """Calls `rotate` with the parameters named `stage`."""
    rotate = nn.apply(self.rotate, self.mix())
    return rotate({"params": params}, mixed, positions_GT)

  def whole(self, module, mixed, positions_GT, attend):
    return attend(*self.rotate(module, mixed, positions_GT))

  def zeros(self, count: int, slots: int, dtype):
    """Makes keys and values that are all 0, for a stack of layers.

    Args:
      count: L, layers of the stack.
      slots: places along the axis of positions.
      dtype: dtype of both arrays.

    Returns:
      (keys, values), each [L, K, slots, D], with K and D of `slot_shape`.
    """
    heads, size = self.slot_shape
    shape = count, heads, slots, size
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

  def empty(self, count, sizes: sizes_lib.Sizes):
    return self.zeros(count, sizes.here, self.config.compute_dtype)

  def accumulator(self, count, sizes: sizes_lib.Sizes, dtype):
    return self.zeros(count, sizes.here, dtype)

  def push(self, stack, present, chunk: sizes_lib.Chunk):
    return places.push(stack, present, chunk)

  def extend(self, stack, present, chunk: sizes_lib.Chunk):
    return places.extend(stack, present, chunk)

  def save(self, stack, size: int):
    """Returns (), because a chunk overwrites nothing that was before it."""
    del stack, size
    return ()

  def restore(self, stack, saved, chunk: sizes_lib.Chunk):
    """Returns the state unchanged: segments do not read past their own prefix.
    """
    del saved, chunk
    return stack

  def skip(self, stack, chunk: sizes_lib.Chunk):
    """Returns the accumulator unchanged: other chunks have places of their own.
    """
    del chunk
    return stack

  def fit(self, stack, here: int):
    return places.fit(stack, here)

  def reach(self, at: mixer.OnPrefix):
    """Says which places of the prefix a segment sees.

    Returns:
      How many of the first places it sees, and an `attention.Window` if each
      token sees only some of these; None if it sees them all.
    """
    return at.context.prefix_length, None

  def band(self, at: mixer.OnPrefix) -> attention.Band | None:
    """Says which keys a segment's queries exchange cotangents with.

    Returns:
      The `attention.Band` on this device; None for all that the queries see.
    """
    layout, reach = at.layout, at.context.reach
    if reach is None:
      return None
    first = at.context.positions_GT[0, 0] - layout.stripe().offset
    return attention.Band(
        layout.here(reach.lowest_GT),
        tiling.Reach(reach.lowest_GT - first, reach.sinks - first),
        layout.here(reach.sinks), -(-reach.sinks // layout.devices),
    )

  def forward(self, at: mixer.OnPrefix, params, mixed):
    """See `Mixer.forward`; keeps the log-sum-exp of the scores for `backward`.
    """
    layout, context = at.layout, at.context
    q, k, v = self.heads(params, mixed, context.positions_GT)
    slots, window = self.reach(at)
    out, lse = layout.merge(*attention.forward(
        layout.all(q, 3), k, v,
        attention.PrefixLayer(at.prefix, at.layer, slots), context.lengths_G,
        stripe=layout.stripe(), window=window, kernel=layout.kernel(q),
        blocks=context.blocks,
    ))
    return out.astype(q.dtype), (k, v), lse

  def backward(self, at, params, record, d_out, accumulator, popped):
    def d_present(accumulator):
      tokens = at.context.positions_GT.shape[1]
      return tuple(
          popped.scale * places.read(x, at.layer, popped.chunk.start, tokens)
          for x in accumulator
      )

    return self.pull(
        at, params, record, d_out, accumulator,
        None if popped is None else d_present,
    )

  def pull(
      self, at: mixer.OnPrefix, params, record: mixer.Record, d_out,
      accumulator, d_present,
  ):
    """`backward`, for any way to find the cotangent of the segment's own keys.

    Args:
      at, params, record, d_out, accumulator: as in `backward`.
      d_present: function from the updated accumulator to what has accumulated
        for the segment's own keys and values; None if nothing has.
    """
    layout, context = at.layout, at.context
    (q, k, v), pull_heads = jax.vjp(
        lambda p, *mixed: self.heads(p, mixed, context.positions_GT),
        params, *record.mixed,
    )
    slots, window = self.reach(at)
    rows = attention.QueryRows(
        d_out, q, record.extra, attention.row_delta(d_out, record.out)
    )
    dq, dk, dv, accumulator = attention.backward_rows(
        attention.QueryRows(*(layout.all(x, 3) for x in rows)), k, v,
        attention.PrefixLayer(at.prefix, at.layer, slots),
        accumulator=accumulator, stripe=layout.stripe(), window=window,
        kernel=layout.kernel(q), blocks=context.blocks, band=self.band(at),
    )
    dq = layout.sum_mine(dq, 3).astype(q.dtype)
    if d_present is not None:
      # The op added to earlier positions only, so this may be read after it;
      # read before, XLA would keep a second copy of the whole accumulator.
      of_k, of_v = d_present(accumulator)
      dk, dv = dk + of_k, dv + of_v
    d_params, *d_mixed = pull_heads(
        (dq, dk.astype(k.dtype), dv.astype(v.dtype))
    )
    return d_mixed, d_params, accumulator

  def attended(self, out, extra):
    """Outputs and log-sum-exps, with the query heads as one axis."""
    heads = self.config.num_heads
    return (
        out.reshape(heads, 1, *out.shape[3:]),
        extra.reshape(heads, 1, extra.shape[3], 1),
    )

  def given(self, attended):
    out, lse = attended
    heads, _ = self.slot_shape
    return (
        out.reshape(heads, 1, -1, *out.shape[1:]),
        lse.reshape(heads, 1, -1, lse.shape[1]),
    )

  def attended_zeros(self, count, slots):
    dtype = self.config.compute_dtype
    shape = count, self.config.num_heads, slots
    return (
        jnp.zeros((*shape, self.slot_shape[1]), dtype),
        jnp.zeros((*shape, 1), config_lib.at_least_float32(dtype)),
    )

  def cache(self, count, branches, tokens, stack):
    """Makes zeros for the keys and values of each branch's own tokens."""
    del stack
    heads, size = self.slot_shape
    shape = count, heads, branches, tokens, size
    return tuple(jnp.zeros(shape, self.config.compute_dtype) for _ in range(2))

  def decode(self, at: mixer.NewTokens, params, mixed, cache):
    """See `Mixer.decode`; keeps nothing for `settle`."""
    positions_GT = at.length + at.slots_GT
    q, k, v = self.heads(params, mixed, positions_GT)
    cache = places.write_cache(cache, at.layer, at.slots_GT, (k, v))
    out = attention.decode(
        q, cache, at.layer, at.slots_GT,
        attention.PrefixLayer(self.seen(at.stack), at.layer, at.length),
    )
    return out, cache, None

  def settle(self, params, cache, block, taken_G):
    """Returns the cache unchanged.

    The slots of tokens that a branch does not accept are not read, and its next
    tokens overwrite them.
    """
    del params, block, taken_G
    return cache

  def weights(self) -> int:
    config = self.config
    heads = (2 + config.output_gate) * config.num_heads
    heads += 2 * config.num_kv_heads
    return config.width * heads * config.head_dim

  def operations(self, tokens: int, prefix: int) -> int:
    """4d operations for each pair of a query and a key that it sees.

    d is heads · width of a head; scores and outputs cost 2d each. The pair of a
    query and its own key counts half.
    """
    def pairs(positions):
      """Twice the pairs of a query and a key that it sees."""
      near = positions if self.window is None else min(positions, self.window)
      return near * (2 * positions - near)

    d = self.config.num_heads * self.slot_shape[1]
    return 2 * d * (pairs(prefix + tokens) - pairs(prefix))

  def banded_operations(self, tokens: int, window: int, sinks: int) -> int:
    if not self.attends:
      return self.operations(tokens, 0)
    near = min(tokens, window)
    beyond = tokens - near  # queries with positions before their window
    few = min(beyond, sinks)
    pairs = near * (2 * tokens - near) + few * (2 * beyond - few)
    return 2 * self.config.num_heads * self.slot_shape[1] * pairs

  def stage_bytes(self) -> int:
    config = self.config
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    wide = config_lib.at_least_float32(config.compute_dtype).itemsize
    heads = (2 + config.output_gate) * config.num_heads * config.head_dim
    keys = 2 * config.num_kv_heads * config.head_dim
    numbers = 2 * config.width + heads + keys
    return itemsize * numbers + wide * config.num_heads
