# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of a segment of new tokens to itself and to a shared prefix.

One softmax covers two parts. *Prefix*: the queries of all branches are the rows
of one tall matrix, which meets one copy of the prefix's keys. *Segment*: each
branch attends causally to itself. Both are tiled so that a tile of scores stays
in cache. The two outputs are merged in float32 by their log-sum-exps, and the
backward pass recomputes probabilities tile by tile from the merged log-sum-exp.

`forward` and `backward` read one layer of a whole [L, K, P, D] prefix state in
place (`PrefixLayer`). `replay_attention` is the same pair as a differentiable
function of one layer.

Source of the tiling: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops.attention import kernels
from branch_replay.ops.attention import loops
from branch_replay.ops.attention import stretches
from branch_replay.ops.attention import tiling
from branch_replay.ops.attention.loops import QueryRows
from branch_replay.ops.attention.loops import merge


class PrefixLayer(NamedTuple):
  """One layer of a prefix state, which is read in place.

  Attributes:
    state: pair (k_LKPD, v_LKPD) of all layers.
    layer: i32 scalar, which of the L layers.
    length: i32 scalar, number of real positions; it is dynamic, so another one
      does not compile again.
  """

  state: tuple[jax.Array, jax.Array]
  layer: jax.Array | int
  length: jax.Array | int


class Band(NamedTuple):
  """To which keys the queries of a segment send cotangents, and get them from.

  A query reaches the keys from its lowest position on, and the first keys of
  all, the sinks. Other pairs exchange no cotangents, though the query sees the
  keys: probabilities and δ are those of the whole softmax.

  Attributes:
    lowest_GT: i32, for every query the first place that it reaches, among the
      places of the prefix on this device.
    segment: the same for the keys of the segment, a `tiling.Reach`.
    sinks: i32 scalar, how many of the first places on this device are sinks.
    size: the most that `sinks` can be on any device.
  """

  lowest_GT: jax.Array
  segment: tiling.Reach
  sinks: jax.Array | int
  size: int


class _Options(NamedTuple):
  """Static arguments of `replay_attention`."""

  window: int | None
  kernel: kernels.Kernel | None
  block: int | None
  sinks: int

  def of(self, q_KGRTD, prefix_length, lengths_G) -> dict:
    """The keyword arguments of `forward` and `backward`."""
    return dict(
        window=_window(self.window, q_KGRTD, prefix_length),
        kernel=self.kernel, blocks=_blocks(self.block, q_KGRTD, lengths_G),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, q, k, v, prefix, lengths):
  """`prefix` is (k_LKPD, v_LKPD).

  `lengths` are (prefix_length, lengths_G, lowest_GT).
  """
  prefix_length, lengths_G, _ = lengths
  out, lse = forward(
      q, k, v, PrefixLayer(prefix, 0, prefix_length), lengths_G,
      **options.of(q, prefix_length, lengths_G),
  )
  return out.astype(q.dtype), lse


def _blocks(size, q_KGRTD, lengths_G):
  """Blocks from the first token of every branch on, or None."""
  if size is None:
    return None
  if lengths_G is None:
    lengths_G = jnp.full(q_KGRTD.shape[1], q_KGRTD.shape[3], jnp.int32)
  return tiling.Blocks(size, 0, jnp.asarray(lengths_G))


def _band(sinks, prefix_length, lengths_G, lowest_GT):
  """The band of branches that follow a prefix, or None."""
  del lengths_G
  if lowest_GT is None:
    return None
  segment = tiling.Reach(lowest_GT - prefix_length, sinks - prefix_length)
  return Band(lowest_GT, segment, sinks, sinks)


def _window(size, q_KGRTD, prefix_length):
  """The window of branches that follow a prefix, or None."""
  if size is None:
    return None
  query_T = prefix_length + jnp.arange(q_KGRTD.shape[3])
  return Window(size, jnp.maximum(query_T - size + 1, 0))


def _attend_forward(options, q, k, v, prefix, lengths):
  arguments = q, k, v, prefix, lengths
  out, lse = _attend(options, *arguments)
  # The prefix is saved by reference and never copied.
  return (out, lse), (*arguments, out, lse)


def _attend_backward(options, residuals, cotangents):
  q, k, v, prefix, lengths, out, lse = residuals
  d_out, d_lse = cotangents
  wide = config_lib.at_least_float32(q.dtype)
  dq, dk, dv, d_prefix = backward(
      q, k, v, PrefixLayer(prefix, 0, lengths[0]), out=out, lse=lse,
      d_out=d_out, d_lse=d_lse,
      accumulator=tuple(jnp.zeros(x.shape, wide) for x in prefix),
      band=_band(options.sinks, *lengths), **options.of(q, *lengths[:2]),
  )
  return (
      dq, dk.astype(k.dtype), dv.astype(v.dtype),
      tuple(d.astype(x.dtype) for d, x in zip(d_prefix, prefix, strict=True)),
      None,
  )


_attend.defvjp(_attend_forward, _attend_backward)


def replay_attention(
    q_KGRTD,
    k_KGTD,
    v_KGTD,
    prefix_k_KPD,
    prefix_v_KPD,
    prefix_length,
    *,
    lengths_G=None,
    window=None,
    implementation: kernels.Name = "auto",
    block=None,
    lowest_GT=None,
    sinks=0,
):
  """Attention of G branches to a shared prefix and, causally, to themselves.

  out = softmax(q [K_prefix; K_self]ᵀ / √D) [V_prefix; V_self].

  A row that may attend to nothing returns 0 and log-sum-exp −∞, and gets no
  gradient. Differentiable once, in q, k, v and the prefix, through both
  outputs.

  Args:
    q_KGRTD: queries.
    k_KGTD: the branches' own keys.
    v_KGTD: the branches' own values.
    prefix_k_KPD: keys of the prefix, one copy for all branches; P may be 0.
    prefix_v_KPD: values of the prefix.
    prefix_length: i32 scalar, number of real positions of the prefix. It is
      dynamic: another length does not compile again.
    lengths_G: i32, real tokens of each branch; later rows attend to nothing.
      None for all T.
    window: W; the query at position i sees the keys at j with i − j < W, where
      the branches' tokens are at positions `prefix_length` and after. Static.
      None to see all earlier keys.
    implementation: see `kernels`; with a window or blocks always the loops.
    block: B; a branch's tokens are in blocks of B, and the query at t sees the
      real keys at s with ⌊s/B⌋ ≤ ⌊t/B⌋. Static. None for causal attention.
    lowest_GT: i32; the backward pass sends nothing between a query and the keys
      at positions below this, but for the first `sinks` positions. The forward
      pass is not changed. None to send between all pairs.
    sinks: see `lowest_GT`. Static.

  Returns:
    out_KGRTD in the dtype of the queries, and lse_KGRT in at least float32.

  Raises:
    ValueError: an implementation that does not run here or does not support
      these arrays.
  """
  heads, branches, _, tokens, head_dim = q_KGRTD.shape
  chex.assert_shape([k_KGTD, v_KGTD], (heads, branches, tokens, head_dim))
  chex.assert_shape([prefix_k_KPD, prefix_v_KPD], (heads, None, head_dim))
  kernel = kernels.choose(
      implementation, kernels.platform(), q_KGRTD.dtype, head_dim
  )
  return _attend(
      _Options(window, kernel, block, sinks), q_KGRTD, k_KGTD, v_KGTD,
      (prefix_k_KPD[None], prefix_v_KPD[None]),
      (prefix_length, lengths_G, lowest_GT),
  )


class Stripe(NamedTuple):
  """Which keys of a segment this device has: offset, offset + stride, ….

  On one device these are all. On several, each device has every n-th position,
  so that all have the same share of the work below the diagonal.
  """

  stride: int = 1
  offset: jax.Array | int = 0


class Window(NamedTuple):
  """How far back the tokens of a segment can see.

  Attributes:
    size: W; the query at position i sees the keys at j with i − j < W.
    lowest_T: i32, for every query the smallest index, among the prefix
      positions on this device, that lies in its window.
  """

  size: int
  lowest_T: jax.Array


def _reach(window, q_KGRTD):
  """(W, lowest index of the prefix for every row), or (None, None)."""
  if window is None:
    return None, None
  shape = q_KGRTD.shape[1:4]
  rows = jnp.broadcast_to(window.lowest_T[None, None], shape)
  return window.size, rows.reshape(-1)


def forward(
    q_KGRTD, k_KGSD, v_KGSD, prefix: PrefixLayer, lengths_G=None, *,
    stripe=Stripe(), window=None, kernel=None, blocks=None,
):
  """Output and log-sum-exp of one layer; see `replay_attention`.

  Args:
    q_KGRTD: queries.
    k_KGSD: keys of the segment on this device; all T on one device.
    v_KGSD: their values.
    prefix: the prefix.
    lengths_G: i32, real tokens of each branch; None for all.
    stripe: which keys of the segment are on this device.
    window: `Window`; None to see all earlier keys.
    kernel: `kernels.Kernel`; None for the loops. Layers with a window or blocks
      always run the loops.
    blocks: `tiling.Blocks`, in which queries see later keys; None for a causal
      segment.

  Returns:
    out_KGRTD and lse_KGRT, at least float32, to be merged with those of other
    devices.
  """
  size, lowest_N = _reach(window, q_KGRTD)
  by_loops = kernel is None or window is not None or blocks is not None
  if by_loops:
    out, lse = loops.segment_forward(
        q_KGRTD, k_KGSD, v_KGSD, stripe, size, blocks
    )
  else:
    out, lse = stretches.segment_forward(
        kernel, q_KGRTD, k_KGSD, v_KGSD, stripe
    )
  if prefix.state[0].shape[2]:
    rows = q_KGRTD.reshape(q_KGRTD.shape[0], -1, q_KGRTD.shape[-1])
    if by_loops:
      out_p, lse_p = loops.prefix_forward(rows, *prefix, lowest_N)
    else:
      out_p, lse_p = stretches.prefix_forward(kernel, rows, *prefix)
    out, lse = merge(
        out_p.reshape(out.shape), lse_p.reshape(lse.shape), out, lse
    )
  if lengths_G is not None:
    real_GT = jnp.arange(lse.shape[-1])[None] < lengths_G[:, None]
    real = jnp.broadcast_to(real_GT[None, :, None], lse.shape)
    out = jnp.where(real[..., None], out, 0)
    lse = jnp.where(real, lse, -jnp.inf)
  return out, lse


def decode(
    q_KGRTD, cache, cache_layer, slots_GT, prefix: PrefixLayer, *, window=None,
    lowest_GT=None,
):
  """Attention of T new tokens of each branch to the prefix and to a cache.

  The cache has the keys of the branch's earlier tokens and of the new ones. The
  prefix is shared as in `forward`.

  Args:
    q_KGRTD: queries of the new tokens; T is small.
    cache: pair (k_LKGSD, v_LKGSD), the branches' own keys and values.
    cache_layer: i32 scalar, layer of the cache.
    slots_GT: i32, the last slot of the cache each new token sees; −1 for none.
    prefix: the prefix.
    window: number of slots a new token sees, its own included; None for all.
    lowest_GT: i32, the first position of the prefix each new token sees; None
      for all.

  Returns:
    out_KGRTD in the dtype of the queries.
  """
  out, lse = loops.cache_forward(
      q_KGRTD, cache, cache_layer, slots_GT, window
  )
  if prefix.state[0].shape[2]:
    rows = q_KGRTD.reshape(q_KGRTD.shape[0], -1, q_KGRTD.shape[-1])
    lowest_N = None
    if lowest_GT is not None:
      shape = q_KGRTD.shape[1:4]
      lowest_N = jnp.broadcast_to(lowest_GT[:, None], shape).reshape(-1)
    out_p, lse_p = loops.prefix_forward(rows, *prefix, lowest_N)
    out, _ = merge(
        out_p.reshape(out.shape), lse_p.reshape(lse.shape), out, lse
    )
  return out.astype(q_KGRTD.dtype)


def backward(
    q_KGRTD, k_KGSD, v_KGSD, prefix: PrefixLayer, *, out, lse, d_out,
    d_lse=None, accumulator=None, window=None, kernel=None, blocks=None,
    band=None,
):
  """Cotangents of one layer, from the merged output and log-sum-exp.

  Args:
    q_KGRTD: queries.
    k_KGSD: keys of the segment.
    v_KGSD: values of the segment.
    prefix: the prefix.
    out: output of `forward`.
    lse: log-sum-exp of `forward`.
    d_out: cotangent of the output, like q_KGRTD.
    d_lse: cotangent of the log-sum-exp; None for zero.
    accumulator: pair like `prefix.state`, at least float32, to which the
      cotangents of the prefix's keys and values are added at its layer, in
      place; None if they are not needed, and then they are not computed.
    window: as in `forward`.
    kernel: as in `forward`.
    blocks: as in `forward`.
    band: `Band`; None to send cotangents between all pairs.

  Returns:
    dq_KGRTD in the dtype of the queries, dk_KGSD and dv_KGSD in at least
    float32, and the updated accumulator.
  """
  rows = QueryRows(d_out, q_KGRTD, lse, row_delta(d_out, out, d_lse))
  dq, dk, dv, accumulator = backward_rows(
      rows, k_KGSD, v_KGSD, prefix, accumulator=accumulator, window=window,
      kernel=kernel, blocks=blocks, band=band,
  )
  return dq.astype(q_KGRTD.dtype), dk, dv, accumulator


def row_delta(d_out, out, d_lse=None):
  """δ in ∂ℓ/∂scores = p · (∂ℓ/∂p − δ): Σ d_out · out − d_lse, one per query."""
  wide = config_lib.at_least_float32(out.dtype)
  delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
  return delta if d_lse is None else delta - d_lse


def backward_rows(
    rows: QueryRows, k_KGSD, v_KGSD, prefix: PrefixLayer, *, accumulator=None,
    stripe=Stripe(), window=None, kernel=None, blocks=None, band=None,
):
  """`backward` from δ instead of the output, for queries of all devices.

  Args:
    rows: the queries [K, G, R, T] of all devices; the log-sum-exp of one that
      saw no key may also be −∞.
    k_KGSD: keys of the segment on this device.
    v_KGSD: their values.
    prefix: the prefix on this device.
    accumulator: as in `backward`.
    stripe: which keys of the segment are on this device.
    window: as in `forward`.
    kernel: as in `forward`.
    blocks: as in `forward`.
    band: as in `backward`. With a band the loops are run.

  Returns:
    As `backward`, but dq is at least float32, and only the part that the keys
    on this device contribute.
  """
  # exp(score − ∞) = 0: a query that saw no key has no gradient.
  rows = rows._replace(lse=jnp.where(rows.lse == -jnp.inf, jnp.inf, rows.lse))
  size, lowest_N = _reach(window, rows.q)
  masked = any(x is not None for x in (window, blocks, band))
  by_loops = kernel is None or masked
  segment = rows, k_KGSD, v_KGSD, stripe
  if by_loops:
    reach = None if band is None else band.segment
    dq, dk, dv = loops.segment_backward(*segment, size, blocks, reach)
  else:
    dq, dk, dv = stretches.segment_backward(kernel, *segment)
  if prefix.state[0].shape[2]:
    heads, head_dim = rows.q.shape[0], rows.q.shape[-1]
    flat = QueryRows(
        rows.d_out.reshape(heads, -1, head_dim),
        rows.q.reshape(heads, -1, head_dim),
        rows.lse.reshape(heads, -1),
        rows.delta.reshape(heads, -1),
    )
    arguments = flat, *prefix, accumulator
    if band is not None:
      dq_rows, accumulator = _banded(band, *arguments, rows.q.shape)
    elif by_loops:
      dq_rows, accumulator = loops.prefix_backward(*arguments, lowest_N)
    else:
      dq_rows, accumulator = stretches.prefix_backward(kernel, *arguments)
    dq = dq + dq_rows.reshape(dq.shape)
  return dq, dk, dv, accumulator


def _banded(
    band: Band, flat: QueryRows, state, layer, length, accumulator, shape
):
  """The prefix part of `backward_rows` with a band, and no window.

  The sinks are a short prefix that all queries reach. What is left of the band
  is a window that begins behind the sinks at the earliest.
  """
  lowest_GT = jnp.maximum(band.lowest_GT, band.sinks)
  lowest_GRT = jnp.broadcast_to(lowest_GT[:, None], shape[1:4])
  dq, accumulator = loops.prefix_backward(
      flat, state, layer, length, accumulator, lowest_GRT.reshape(-1)
  )
  size = min(band.size, state[0].shape[2])
  if size:
    of_sinks, accumulator = loops.sinks_backward(
        flat, state, layer, jnp.minimum(band.sinks, length), size, accumulator
    )
    dq += of_sinks
  return dq, accumulator
