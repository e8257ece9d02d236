# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of a segment that replays a shared prefix.

Two parts with one softmax. *Prefix*: the queries of all branches are rows of
one tall matrix against one copy of the prefix keys. *Segment*: each branch
attends causally to itself. Both are tiled so that a score tile stays in cache;
they are merged in float32 by log-sum-exp, and the backward pass rebuilds
probabilities tile by tile from the merged log-sum-exp.

`forward` and `backward` read layer `layer` of a whole [L, K, P, D] prefix
state in place; `replay_attention` is the same pair as one differentiable
function of one layer.

Source of the tiling: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

import chex
import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops import tiling


@jax.custom_vjp
def _attend(q, k, v, prefix_k_LKPD, prefix_v_LKPD, prefix_length, lengths_G):
  return forward(
      q, k, v, (prefix_k_LKPD, prefix_v_LKPD), 0, prefix_length, lengths_G
  )


def _attend_forward(q, k, v, pk, pv, prefix_length, lengths_G):
  out, lse = forward(q, k, v, (pk, pv), 0, prefix_length, lengths_G)
  # The prefix is a residual by reference: replayed, never copied.
  return (out, lse), (q, k, v, pk, pv, prefix_length, out, lse)


def _attend_backward(residuals, cotangents):
  q, k, v, pk, pv, prefix_length, out, lse = residuals
  d_out, d_lse = cotangents
  wide = config_lib.at_least_float32(q.dtype)
  zeros = (jnp.zeros(pk.shape, wide), jnp.zeros(pv.shape, wide))
  dq, dk, dv, (dpk, dpv) = backward(
      d_out, q, k, v, out, lse, (pk, pv), 0, prefix_length,
      accumulator=zeros, d_lse=d_lse,
  )
  return (
      dq, dk.astype(k.dtype), dv.astype(v.dtype),
      dpk.astype(pk.dtype), dpv.astype(pv.dtype), None, None,
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
):
  """Attention of G branches to a shared prefix and, causally, to themselves.

  out = softmax(q [K_prefix; K_self]ᵀ / √D) [V_prefix; V_self].

  A row that may attend to nothing returns 0 with log-sum-exp −∞ and sends no
  gradient anywhere. Differentiable once, in q, k, v, the prefix and through
  both outputs.

  Args:
    q_KGRTD: queries; K·R heads of D of T tokens of G branches.
    k_KGTD: the branches' own keys.
    v_KGTD: the branches' own values.
    prefix_k_KPD: keys of the prefix, one copy for all branches; P may be 0.
    prefix_v_KPD: values of the prefix.
    prefix_length: i32 scalar, positions of the prefix that are real; dynamic,
      so that another length does not compile again.
    lengths_G: i32, tokens of each branch that are real; later rows attend to
      nothing. None means all T.

  Returns:
    out_KGRTD in the dtype of the queries, and lse_KGRT in at least float32.

  Source: the design follows https://arxiv.org/abs/2607.14952; the reference is
  `attention_reference.replay_attention`.
  """
  chex.assert_rank(
      [q_KGRTD, k_KGTD, v_KGTD, prefix_k_KPD, prefix_v_KPD], [5, 4, 4, 3, 3]
  )
  return _attend(
      q_KGRTD, k_KGTD, v_KGTD, prefix_k_KPD[None], prefix_v_KPD[None],
      prefix_length, lengths_G,
  )


def merge(out_a, lse_a, out_b, lse_b):
  """One attention over two disjoint sets of keys, from two partial ones.

  lse = log(eᵃ + eᵇ), out = (eᵃ out_a + eᵇ out_b) / (eᵃ + eᵇ). Not to be
  differentiated: two empty parts have no finite gradient.

  Args:
    out_a: [..., D], at least float32.
    lse_a: [...]; −∞ where a row saw no key.
    out_b: like out_a.
    lse_b: like lse_a.

  Returns:
    The merged (out, lse); (0, −∞) where both parts are empty.
  """
  top = _finite(jnp.maximum(lse_a, lse_b))
  a, b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
  out = a[..., None] * out_a + b[..., None] * out_b
  return _normalized(top, a + b, out)


def forward(
    q_KGRTD, k_KGTD, v_KGTD, prefix, layer, prefix_length, lengths_G=None
):
  """Output and merged log-sum-exp of one layer; see `replay_attention`.

  Args:
    q_KGRTD: queries.
    k_KGTD: keys of the segment.
    v_KGTD: values of the segment.
    prefix: pair (k_LKPD, v_LKPD), read in place.
    layer: i32 scalar, which layer of the prefix.
    prefix_length: i32 scalar.
    lengths_G: i32 or None.

  Returns:
    out_KGRTD in the dtype of the queries, lse_KGRT in at least float32.
  """
  q_scaled = q_KGRTD * jnp.asarray(q_KGRTD.shape[-1] ** -0.5, q_KGRTD.dtype)
  out, lse = _segment_forward(q_scaled, k_KGTD, v_KGTD)
  if prefix[0].shape[2]:
    rows = q_scaled.reshape(q_KGRTD.shape[0], -1, q_KGRTD.shape[-1])
    out_p, lse_p = _prefix_forward(rows, prefix, layer, prefix_length)
    out, lse = merge(
        out_p.reshape(out.shape), lse_p.reshape(lse.shape), out, lse
    )
  if lengths_G is not None:
    real_GT = jnp.arange(lse.shape[-1]) < lengths_G[:, None]
    real = real_GT[None, :, None]
    out = jnp.where(real[..., None], out, 0)
    lse = jnp.where(real, lse, -jnp.inf)
  return out.astype(q_KGRTD.dtype), lse


def backward(
    d_out, q_KGRTD, k_KGTD, v_KGTD, out, lse, prefix, layer, prefix_length,
    *, accumulator=None, d_lse=None,
):
  """Cotangents of one layer, given the merged output and log-sum-exp.

  Args:
    d_out: cotangent of the output, like q_KGRTD.
    q_KGRTD: queries.
    k_KGTD: keys of the segment.
    v_KGTD: values of the segment.
    out: what `forward` returned.
    lse: what `forward` returned.
    prefix: pair (k_LKPD, v_LKPD).
    layer: i32 scalar.
    prefix_length: i32 scalar.
    accumulator: pair like `prefix`, at least float32, to which the prefix's
      cotangents are added at `layer`, in place; None spends nothing on them.
    d_lse: cotangent of the log-sum-exp, or None for zero.

  Returns:
    dq_KGRTD in the dtype of the queries, dk_KGTD and dv_KGTD in at least
    float32, and the updated accumulator.
  """
  wide = config_lib.at_least_float32(q_KGRTD.dtype)
  scale = jnp.asarray(q_KGRTD.shape[-1] ** -0.5, q_KGRTD.dtype)
  q_scaled = q_KGRTD * scale
  # ∂ℓ/∂scores = p · (∂ℓ/∂p − delta): one number a row for both parts.
  delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
  if d_lse is not None:
    delta = delta - d_lse
  # exp(score − ∞) = 0: a row that saw nothing sends nothing.
  lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
  dq, dk, dv = _segment_backward(d_out, q_scaled, k_KGTD, v_KGTD, lse, delta)
  if prefix[0].shape[2]:
    heads, head_dim = q_KGRTD.shape[0], q_KGRTD.shape[-1]
    dq_rows, accumulator = _prefix_backward(
        d_out.reshape(heads, -1, head_dim),
        q_scaled.reshape(heads, -1, head_dim),
        lse.reshape(heads, -1),
        delta.reshape(heads, -1),
        prefix, layer, prefix_length, accumulator,
    )
    dq = dq + dq_rows.reshape(dq.shape)
  return (dq * scale).astype(q_KGRTD.dtype), dk, dv, accumulator


def _finite(top):
  """The shift of a softmax: 0 where every score is −∞."""
  return jnp.where(top == -jnp.inf, 0.0, top)


def _normalized(top, total, weighted):
  """(out, lse) of an online softmax; (0, −∞) where nothing was seen."""
  empty = total == 0
  safe = jnp.where(empty, 1.0, total)
  return (
      weighted / safe[..., None],
      jnp.where(empty, -jnp.inf, top + jnp.log(safe)),
  )


def _dot(a, b, contract, dtype):
  """Matrix product over one axis of each operand, accumulated in `dtype`."""
  axes = ((contract[0],), (contract[1],)), ((), ())
  return lax.dot_general(a, b, axes, preferred_element_type=dtype)


def _softmax_tile(carry, q_ND, k_BD, v_BD, seen):
  """Adds one tile of keys to an online softmax over rows."""
  top_N, total_N, weighted_ND = carry
  dtype = total_N.dtype
  scores = _dot(q_ND, k_BD, (1, 1), dtype)
  scores = jnp.where(seen, scores, -jnp.inf)
  new_top_N = jnp.maximum(top_N, jnp.max(scores, axis=-1))
  shift_N = _finite(new_top_N)
  probs = jnp.exp(scores - shift_N[:, None])
  decay_N = jnp.exp(top_N - shift_N)
  return (
      new_top_N,
      total_N * decay_N + jnp.sum(probs, axis=-1),
      weighted_ND * decay_N[:, None]
      + _dot(probs.astype(v_BD.dtype), v_BD, (1, 0), dtype),
  )


def _cotangent_tile(d_out_ND, q_ND, lse_N, delta_N, k_BD, v_BD, seen):
  """(dq, dk, dv) that one tile of rows and keys contributes."""
  dtype = lse_N.dtype
  scores = _dot(q_ND, k_BD, (1, 1), dtype)
  probs = jnp.where(seen, jnp.exp(scores - lse_N[:, None]), 0)
  d_probs = _dot(d_out_ND, v_BD, (1, 1), dtype)
  d_scores = (probs * (d_probs - delta_N[:, None])).astype(q_ND.dtype)
  return (
      _dot(d_scores, k_BD, (1, 0), dtype),
      _dot(d_scores, q_ND, (0, 0), dtype),
      _dot(probs.astype(d_out_ND.dtype), d_out_ND, (0, 0), dtype),
  )


def _empty_softmax(rows, head_dim, dtype):
  return (
      jnp.full((rows,), -jnp.inf, dtype),
      jnp.zeros((rows,), dtype),
      jnp.zeros((rows, head_dim), dtype),
  )


def _prefix_forward(q_KND, prefix, layer, prefix_length):
  heads, rows, head_dim = q_KND.shape
  dtype = config_lib.at_least_float32(q_KND.dtype)
  row = tiling.even(rows, tiling.FORWARD_ROWS)
  column = tiling.Columns(prefix[0].shape[2], tiling.FORWARD_COLUMNS)
  q_KND = tiling.pad(q_KND, 1, row.padded)
  columns = column.count(prefix_length)

  def visit(index, outputs):
    head, start = index // row.count, index % row.count * row.size
    q_ND = tiling.read(q_KND, (head, start), row.size)

    def tile(j, carry):
      k_BD, v_BD = column.read(prefix, (layer, head), j)
      return _softmax_tile(
          carry, q_ND, k_BD, v_BD, column.seen(j, prefix_length)
      )

    carry = _empty_softmax(row.size, head_dim, dtype)
    out, lse = _normalized(*lax.fori_loop(0, columns, tile, carry))
    return (
        tiling.write(outputs[0], (head, start), out),
        tiling.write(outputs[1], (head, start), lse),
    )

  shape = (heads, row.padded)
  outputs = jnp.zeros((*shape, head_dim), dtype), jnp.zeros(shape, dtype)
  out, lse = lax.fori_loop(0, heads * row.count, visit, outputs)
  return out[:, :rows], lse[:, :rows]


def _prefix_backward(
    d_out_KND, q_KND, lse_KN, delta_KN, prefix, layer, prefix_length,
    accumulator,
):
  heads, rows, head_dim = q_KND.shape
  dtype = lse_KN.dtype
  row = tiling.even(rows, tiling.BACKWARD_ROWS)
  column = tiling.Columns(prefix[0].shape[2], tiling.BACKWARD_COLUMNS)
  d_out_KND = tiling.pad(d_out_KND, 1, row.padded)
  q_KND = tiling.pad(q_KND, 1, row.padded)
  lse_KN = tiling.pad(lse_KN, 1, row.padded, value=jnp.inf)
  delta_KN = tiling.pad(delta_KN, 1, row.padded)
  columns = column.count(prefix_length)

  def visit(index, carry):
    dq_KND, accumulator = carry
    head, j = index // columns, index % columns
    k_BD, v_BD = column.read(prefix, (layer, head), j)
    seen = column.seen(j, prefix_length)

    def tile(i, carry):
      dq_KND, dk_BD, dv_BD = carry
      at = head, i * row.size
      dq, dk, dv = _cotangent_tile(
          *(tiling.read(x, at, row.size) for x in (d_out_KND, q_KND)),
          *(tiling.read(x, at, row.size) for x in (lse_KN, delta_KN)),
          k_BD, v_BD, seen,
      )
      dq_KND = tiling.add(dq_KND, at, dq)
      if accumulator is None:  # dk and dv are dead code, and cost nothing.
        return dq_KND, dk_BD, dv_BD
      return dq_KND, dk_BD + dk, dv_BD + dv

    zeros = jnp.zeros((column.size, head_dim), dtype)
    dq_KND, dk_BD, dv_BD = lax.fori_loop(
        0, row.count, tile, (dq_KND, zeros, zeros)
    )
    if accumulator is not None:
      accumulator = column.add(accumulator, (layer, head), j, (dk_BD, dv_BD))
    return dq_KND, accumulator

  carry = jnp.zeros((heads, row.padded, head_dim), dtype), accumulator
  dq_KND, accumulator = lax.fori_loop(0, heads * columns, visit, carry)
  return dq_KND[:, :rows], accumulator


def _segment_forward(q_KGRTD, k_KGTD, v_KGTD):
  heads, branches, repeats, tokens, head_dim = q_KGRTD.shape
  dtype = config_lib.at_least_float32(q_KGRTD.dtype)
  grid = tiling.causal(
      tokens, repeats, tiling.FORWARD_ROWS, tiling.FORWARD_COLUMNS
  )
  q_KGRTD = tiling.pad(q_KGRTD, 3, grid.padded)
  k_KGTD, v_KGTD = (tiling.pad(x, 2, grid.padded) for x in (k_KGTD, v_KGTD))

  def visit(index, outputs):
    head, branch, i = grid.unravel(index, branches)
    q_ND = grid.rows(q_KGRTD, head, branch, i)

    def tile(j, carry):
      at = head, branch, j * grid.column
      k_BD = tiling.read(k_KGTD, at, grid.column)
      v_BD = tiling.read(v_KGTD, at, grid.column)
      return _softmax_tile(carry, q_ND, k_BD, v_BD, grid.seen(i, j))

    carry = _empty_softmax(q_ND.shape[0], head_dim, dtype)
    columns = i // grid.rows_per_column + 1  # stops at the diagonal
    out, lse = _normalized(*lax.fori_loop(0, columns, tile, carry))
    return (
        grid.write_rows(outputs[0], head, branch, i, out),
        grid.write_rows(outputs[1], head, branch, i, lse),
    )

  shape = (heads, branches, repeats, grid.padded)
  outputs = jnp.zeros((*shape, head_dim), dtype), jnp.zeros(shape, dtype)
  total = heads * branches * grid.row_count
  out, lse = lax.fori_loop(0, total, visit, outputs)
  return out[:, :, :, :tokens], lse[:, :, :, :tokens]


def _segment_backward(d_out, q_KGRTD, k_KGTD, v_KGTD, lse, delta):
  heads, branches, repeats, tokens, head_dim = q_KGRTD.shape
  dtype = lse.dtype
  grid = tiling.causal(
      tokens, repeats, tiling.BACKWARD_ROWS, tiling.BACKWARD_COLUMNS
  )
  d_out, q_KGRTD, delta = (
      tiling.pad(x, 3, grid.padded) for x in (d_out, q_KGRTD, delta)
  )
  lse = tiling.pad(lse, 3, grid.padded, value=jnp.inf)
  k_KGTD, v_KGTD = (tiling.pad(x, 2, grid.padded) for x in (k_KGTD, v_KGTD))
  columns = grid.padded // grid.column

  def visit(index, carry):
    dq, dk, dv = carry
    head, branch = index // (branches * columns), index // columns % branches
    j = index % columns
    at = head, branch, j * grid.column
    k_BD = tiling.read(k_KGTD, at, grid.column)
    v_BD = tiling.read(v_KGTD, at, grid.column)

    def tile(i, carry):
      dq, dk_BD, dv_BD = carry
      where = head, branch, i
      dq_ND, dk_tile, dv_tile = _cotangent_tile(
          *(grid.rows(x, *where) for x in (d_out, q_KGRTD, lse, delta)),
          k_BD, v_BD, grid.seen(i, j),
      )
      old = grid.rows(dq, *where)
      dq = grid.write_rows(dq, *where, old + dq_ND)
      return dq, dk_BD + dk_tile, dv_BD + dv_tile

    zeros = jnp.zeros((grid.column, head_dim), dtype)
    first = j * grid.rows_per_column  # rows above the diagonal see nothing
    dq, dk_BD, dv_BD = lax.fori_loop(
        first, grid.row_count, tile, (dq, zeros, zeros)
    )
    return dq, tiling.write(dk, at, dk_BD), tiling.write(dv, at, dv_BD)

  carry = (
      jnp.zeros(q_KGRTD.shape, dtype),
      jnp.zeros(k_KGTD.shape, dtype),
      jnp.zeros(v_KGTD.shape, dtype),
  )
  total = heads * branches * columns
  dq, dk, dv = lax.fori_loop(0, total, visit, carry)
  return dq[:, :, :, :tokens], dk[:, :, :tokens], dv[:, :, :tokens]
