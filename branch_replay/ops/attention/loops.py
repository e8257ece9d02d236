# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention as four loops: prefix and segment, forward and backward.

Scores are computed and everything is accumulated in at least float32. Loops
over heads, rows of queries and columns of keys are explicit, so that one tile
of scores exists at a time, and trip counts follow the length of the prefix and
stop at the diagonal.

Source: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops.attention import tiling


class QueryRows(NamedTuple):
  """What the backward pass reads of the queries; leading axes are alike.

  Attributes:
    d_out: cotangent of the merged output, [..., D].
    q: queries, [..., D].
    lse: merged log-sum-exp, [...]; +∞ for a query that saw no key, so that its
      probabilities are 0.
    delta: δ of `attention.row_delta`, [...].
  """

  d_out: jax.Array
  q: jax.Array
  lse: jax.Array
  delta: jax.Array

  def padded(self, axis: int, length: int) -> "QueryRows":
    """The rows with one axis padded by queries that saw no key."""
    return QueryRows(
        tiling.pad(self.d_out, axis, length), tiling.pad(self.q, axis, length),
        tiling.pad(self.lse, axis, length, value=jnp.inf),
        tiling.pad(self.delta, axis, length),
    )


def finite(top):
  """The shift of a softmax: `top`, or 0 where every score is −∞."""
  return jnp.where(top == -jnp.inf, 0.0, top)


def normalized(top, total, weighted):
  """(out, lse) of an online softmax; (0, −∞) where no key was seen."""
  empty = total == 0
  safe = jnp.where(empty, 1.0, total)
  return (
      weighted / safe[..., None],
      jnp.where(empty, -jnp.inf, top + jnp.log(safe)),
  )


def merge(out_a, lse_a, out_b, lse_b):
  """Merges attention to two disjoint sets of keys into attention to both.

  lse = log(eᵃ + eᵇ), out = (eᵃ out_a + eᵇ out_b) / (eᵃ + eᵇ). Do not
  differentiate it: two empty parts have no finite gradient.

  Args:
    out_a: [..., D], at least float32.
    lse_a: [...]; −∞ where a row saw no key.
    out_b: like out_a.
    lse_b: like lse_a.

  Returns:
    The merged (out, lse); (0, −∞) where both parts are empty.
  """
  top = finite(jnp.maximum(lse_a, lse_b))
  a, b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
  out = a[..., None] * out_a + b[..., None] * out_b
  return normalized(top, a + b, out)


def _dot(a, b, contract, dtype):
  """Matrix product over one axis of each operand, accumulated in `dtype`."""
  axes = ((contract[0],), (contract[1],)), ((), ())
  return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _softmax_tile(carry, q_ND, k_BD, v_BD, seen):
  """Adds one tile of keys to an online softmax over rows."""
  top_N, total_N, weighted_ND = carry
  dtype = total_N.dtype
  scores = _dot(q_ND, k_BD, (1, 1), dtype) * q_ND.shape[-1] ** -0.5
  scores = jnp.where(seen, scores, -jnp.inf)
  new_top_N = jnp.maximum(top_N, _row_max(scores))
  shift_N = finite(new_top_N)
  probs = jnp.exp(scores - shift_N[:, None])
  decay_N = jnp.exp(top_N - shift_N)
  # Rows are summed by a matrix product: XLA for CPU would reduce them number by
  # number, and compute every exponential twice. On accelerators the highest
  # precision keeps the summands from being rounded.
  ones_B1 = jnp.ones((v_BD.shape[0], 1), dtype)
  sums_N = lax.dot(probs, ones_B1, precision=lax.Precision.HIGHEST)[:, 0]
  return (
      new_top_N,
      total_N * decay_N + sums_N,
      weighted_ND * decay_N[:, None]
      + _dot(probs.astype(v_BD.dtype), v_BD, (1, 0), dtype),
  )


def _row_max(x_NB):
  """Row maxima; halves are compared as vectors before any row is reduced."""
  while x_NB.shape[1] % 2 == 0 and x_NB.shape[1] > 64:
    half = x_NB.shape[1] // 2
    x_NB = jnp.maximum(x_NB[:, :half], x_NB[:, half:])
  return jnp.max(x_NB, axis=-1)


def _cotangent_tile(rows: QueryRows, k_BD, v_BD, seen):
  """(dq, dkᵀ, dvᵀ) that one tile of rows and keys contributes."""
  d_out_ND, q_ND, lse_N, delta_N = rows
  dtype, scale = lse_N.dtype, q_ND.shape[-1] ** -0.5
  scores = _dot(q_ND, k_BD, (1, 1), dtype) * scale
  probs = jnp.where(seen, jnp.exp(scores - lse_N[:, None]), 0)
  d_probs = _dot(d_out_ND, v_BD, (1, 1), dtype)
  d_scores = probs * (d_probs - delta_N[:, None]) * scale
  d_scores = d_scores.astype(q_ND.dtype)
  return (
      _dot(d_scores, k_BD, (1, 0), dtype),
      _dot(q_ND, d_scores, (0, 0), dtype),
      _dot(d_out_ND, probs.astype(d_out_ND.dtype), (0, 0), dtype),
  )


def _if(condition, function, carry):
  """function(carry) if the condition holds, else carry.

  It is a loop of at most one turn, which updates in place; `lax.cond` would
  copy the carry.
  """
  return lax.fori_loop(
      0, condition.astype(jnp.int32), lambda _, carry: function(carry), carry
  )


def _empty_softmax(rows, head_dim, dtype):
  return (
      jnp.full((rows,), -jnp.inf, dtype),
      jnp.zeros((rows,), dtype),
      jnp.zeros((rows, head_dim), dtype),
  )


def prefix_forward(q_KND, prefix, layer, prefix_length, lowest_N=None):
  """(out_KND, lse_KN) of queries against the first positions of a prefix.

  With `lowest_N`, row n sees the positions from lowest_N[n] on only.
  """
  heads, rows, head_dim = q_KND.shape
  dtype = config_lib.at_least_float32(q_KND.dtype)
  row = tiling.even(rows, tiling.FORWARD_ROWS)
  column = tiling.PrefixTiles(prefix[0].shape[2], tiling.FORWARD_COLUMNS)
  q_KND = tiling.pad(q_KND, 1, row.padded)
  columns = column.count(prefix_length)
  if lowest_N is not None:
    lowest_N = _padded_lowest(lowest_N, row, prefix)
    columns = jnp.asarray(columns, lowest_N.dtype)

  def visit(index, outputs):
    head, start = index // row.count, index % row.count * row.size
    q_ND = tiling.read(q_KND, (head, start), row.size)
    first, of_rows = 0, None
    if lowest_N is not None:
      of_rows = tiling.read(lowest_N, (start,), row.size)
      first = column.holding(jnp.min(of_rows))

    def tile(j, carry):
      k_BD, v_BD = column.read(prefix, (layer, head), j)
      return _softmax_tile(
          carry, q_ND, k_BD, v_BD, column.seen(j, prefix_length, of_rows)
      )

    carry = _empty_softmax(row.size, head_dim, dtype)
    out, lse = normalized(*lax.fori_loop(first, columns, tile, carry))
    return (
        tiling.write(outputs[0], (head, start), out),
        tiling.write(outputs[1], (head, start), lse),
    )

  shape = (heads, row.padded)
  outputs = jnp.zeros((*shape, head_dim), dtype), jnp.zeros(shape, dtype)
  out, lse = lax.fori_loop(0, heads * row.count, visit, outputs)
  return out[:, :rows], lse[:, :rows]


def _padded_lowest(lowest_N, row: tiling.Even, prefix):
  """lowest_N with rows of padding, which see nothing."""
  capacity = prefix[0].shape[2]
  return tiling.pad(
      lowest_N.astype(jnp.int32), 0, row.padded, value=capacity
  )


def cache_forward(q_KGRTD, cache, layer, slots_GT, window=None):
  """(out_KGRTD, lse_KGRT) of new tokens against each branch's own cache.

  Tiles that no token sees are not read, so the work follows the longest branch
  and not the capacity of the cache.
  """
  dtype = config_lib.at_least_float32(q_KGRTD.dtype)
  room = cache[0].shape[3]
  size = min(room, tiling.CACHE_COLUMNS)
  tiles = jnp.minimum(-(-(jnp.max(slots_GT) + 1) // size), -(-room // size))

  def visit(j, carry):
    top, total, weighted = carry
    start = jnp.minimum(j * size, room - size)
    k_KGBD, v_KGBD = (
        tiling.read_cache(x, layer, start, size) for x in cache
    )
    place_B = start + jnp.arange(size)
    # The last tile is moved back; slots that were read before are hidden.
    seen_GTB = (place_B >= j * size)[None, None] & (
        place_B[None, None] <= slots_GT[..., None]
    )
    if window is not None:
      seen_GTB &= slots_GT[..., None] - place_B[None, None] < window
    scores = jnp.einsum(
        "kgrtd,kgbd->kgrtb", q_KGRTD, k_KGBD, preferred_element_type=dtype
    ) * q_KGRTD.shape[-1] ** -0.5
    scores = jnp.where(seen_GTB[None, :, None], scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    shift = finite(new_top)
    probs = jnp.exp(scores - shift[..., None])
    decay = jnp.exp(top - shift)
    more = jnp.einsum(
        "kgrtb,kgbd->kgrtd", probs.astype(v_KGBD.dtype), v_KGBD,
        preferred_element_type=dtype,
    )
    return (
        new_top,
        total * decay + jnp.sum(probs, axis=-1),
        weighted * decay[..., None] + more,
    )

  rows = q_KGRTD.shape[:-1]
  start = (
      jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype),
      jnp.zeros(q_KGRTD.shape, dtype),
  )
  return normalized(*lax.fori_loop(0, tiles, visit, start))


def prefix_backward(
    rows: QueryRows, prefix, layer, prefix_length, accumulator, lowest_N=None
):
  """dq_KND, and the accumulator with the prefix's cotangents added.

  If the accumulator is None, the products for keys and values are not computed.
  Other arguments are as in `prefix_forward`.
  """
  heads, count, head_dim = rows.q.shape
  dtype = rows.lse.dtype
  row = tiling.even(count, tiling.BACKWARD_ROWS)
  column = tiling.PrefixTiles(prefix[0].shape[2], tiling.BACKWARD_COLUMNS)
  rows = rows.padded(1, row.padded)
  columns, first = column.count(prefix_length), 0
  if lowest_N is not None:
    lowest_N = _padded_lowest(lowest_N, row, prefix)
    first = column.holding(jnp.min(lowest_N))
    columns = jnp.maximum(jnp.asarray(columns, first.dtype) - first, 0)

  def visit(index, carry):
    dq_KND, accumulator = carry
    head, j = index // columns, first + index % columns
    k_BD, v_BD = column.read(prefix, (layer, head), j)

    def tile(i, carry):
      dq_KND, dk_DB, dv_DB = carry
      at = head, i * row.size
      of_rows = None
      if lowest_N is not None:
        of_rows = tiling.read(lowest_N, at[1:], row.size)
      seen = column.seen(j, prefix_length, of_rows)
      dq, dk, dv = _cotangent_tile(
          QueryRows(*(tiling.read(x, at, row.size) for x in rows)), k_BD, v_BD,
          seen,
      )
      dq_KND = tiling.add(dq_KND, at, dq)
      if accumulator is None:
        return dq_KND, dk_DB, dv_DB
      return dq_KND, dk_DB + dk, dv_DB + dv

    def tile_in_reach(i, carry):
      of_rows = tiling.read(lowest_N, (i * row.size,), row.size)
      reached = jnp.min(of_rows) < (j + 1) * column.size
      return _if(reached, lambda carry: tile(i, carry), carry)

    zeros = jnp.zeros((head_dim, column.size), dtype)
    dq_KND, dk_DB, dv_DB = lax.fori_loop(
        0, row.count, tile if lowest_N is None else tile_in_reach,
        (dq_KND, zeros, zeros),
    )
    if accumulator is not None:
      windows = dk_DB.T, dv_DB.T
      accumulator = column.add(accumulator, (layer, head), j, windows)
    return dq_KND, accumulator

  carry = jnp.zeros((heads, row.padded, head_dim), dtype), accumulator
  dq_KND, accumulator = lax.fori_loop(0, heads * columns, visit, carry)
  return dq_KND[:, :count], accumulator


def sinks_backward(
    rows: QueryRows, prefix, layer, sinks, size: int, accumulator
):
  """As `prefix_backward`, for the first positions of a prefix alone.

  Args:
    rows, prefix, layer, accumulator: as in `prefix_backward`.
    sinks: i32 scalar, how many positions.
    size: the most that `sinks` can be. So many positions are cut out, because
      tiles are wider than most numbers of sinks.
  """
  cut = tuple(tiling.read_stretch(x, layer, 0, size)[None] for x in prefix)
  zeros = None
  if accumulator is not None:
    zeros = tuple(jnp.zeros(x.shape, rows.lse.dtype) for x in cut)
  dq_KND, of_cut = prefix_backward(rows, cut, 0, sinks, zeros)
  if accumulator is not None:
    accumulator = tuple(
        tiling.add_stretch(x, layer, 0, new[0])
        for x, new in zip(accumulator, of_cut, strict=True)
    )
  return dq_KND, accumulator


def segment_forward(
    q_KGRTD, k_KGSD, v_KGSD, stripe, window=None, blocks=None
):
  """(out_KGRTD, lse_KGRT) of branches that attend causally to themselves.

  With a window W a query sees no key W or more positions before it. With
  `tiling.Blocks` it sees all keys of its own block.
  """
  heads, branches, repeats, tokens, head_dim = q_KGRTD.shape
  dtype = config_lib.at_least_float32(q_KGRTD.dtype)
  grid = tiling.causal(
      tokens, repeats, tiling.FORWARD_ROWS, tiling.FORWARD_COLUMNS,
      stripe.stride,
  )
  q_KGRTD = tiling.pad(q_KGRTD, 3, grid.padded)
  k_KGSD, v_KGSD = (tiling.pad(x, 2, grid.keys) for x in (k_KGSD, v_KGSD))

  def visit(index, outputs):
    head, branch, i = grid.unravel(index, branches)
    q_ND = grid.rows(q_KGRTD, head, branch, i)

    def tile(j, carry):
      at = head, branch, j * grid.column
      k_BD = tiling.read(k_KGSD, at, grid.column)
      v_BD = tiling.read(v_KGSD, at, grid.column)
      seen = grid.seen(i, j, stripe.offset, window, blocks, branch)
      return _softmax_tile(carry, q_ND, k_BD, v_BD, seen)

    carry = _empty_softmax(q_ND.shape[0], head_dim, dtype)
    out, lse = normalized(
        *lax.fori_loop(*grid.columns(i, window, blocks), tile, carry)
    )
    return (
        grid.write_rows(outputs[0], head, branch, i, out),
        grid.write_rows(outputs[1], head, branch, i, lse),
    )

  shape = (heads, branches, repeats, grid.padded)
  outputs = jnp.zeros((*shape, head_dim), dtype), jnp.zeros(shape, dtype)
  total = heads * branches * grid.row_count
  out, lse = lax.fori_loop(0, total, visit, outputs)
  return out[:, :, :, :tokens], lse[:, :, :, :tokens]


def segment_backward(
    rows: QueryRows, k_KGSD, v_KGSD, stripe, window=None, blocks=None,
    reach=None,
):
  """(dq, dk, dv) of the segment part; arguments as in `segment_forward`.

  With a `tiling.Reach` only keys that a query reaches exchange cotangents with
  it, and tiles without such a pair are skipped.
  """
  heads, branches, repeats, tokens, head_dim = rows.q.shape
  dtype = rows.lse.dtype
  grid = tiling.causal(
      tokens, repeats, tiling.BACKWARD_ROWS, tiling.BACKWARD_COLUMNS,
      stripe.stride,
  )
  keys = k_KGSD.shape[2]
  rows = rows.padded(3, grid.padded)
  k_KGSD, v_KGSD = (tiling.pad(x, 2, grid.keys) for x in (k_KGSD, v_KGSD))
  reach = None if reach is None else reach.padded(grid.padded)
  columns = grid.keys // grid.column

  def visit(index, carry):
    dq, dk, dv = carry
    head, branch = index // (branches * columns), index // columns % branches
    j = index % columns
    at = head, branch, j * grid.column
    k_BD = tiling.read(k_KGSD, at, grid.column)
    v_BD = tiling.read(v_KGSD, at, grid.column)

    def tile(i, carry, reached=True):
      dq, dk_DB, dv_DB = carry
      where = head, branch, i
      seen = grid.seen(i, j, stripe.offset, window, blocks, branch)
      dq_ND, dk_tile, dv_tile = _cotangent_tile(
          QueryRows(*(grid.rows(x, *where) for x in rows)), k_BD, v_BD,
          seen & reached,
      )
      old = grid.rows(dq, *where)
      dq = grid.write_rows(dq, *where, old + dq_ND)
      return dq, dk_DB + dk_tile, dv_DB + dv_tile

    def tile_in_reach(i, carry):
      reached, some = grid.reached(i, j, reach, stripe.offset, branch)
      return _if(some, lambda carry: tile(i, carry, reached), carry)

    zeros = jnp.zeros((head_dim, grid.column), dtype)
    dq, dk_DB, dv_DB = lax.fori_loop(
        *grid.visible_to(j, window, blocks),
        tile if reach is None else tile_in_reach, (dq, zeros, zeros),
    )
    return dq, tiling.write(dk, at, dk_DB.T), tiling.write(dv, at, dv_DB.T)

  carry = (
      jnp.zeros(rows.q.shape, dtype),
      jnp.zeros(k_KGSD.shape, dtype),
      jnp.zeros(v_KGSD.shape, dtype),
  )
  total = heads * branches * columns
  dq, dk, dv = lax.fori_loop(0, total, visit, carry)
  return dq[:, :, :, :tokens], dk[:, :, :keys], dv[:, :, :keys]
