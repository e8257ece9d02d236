# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of packed samples to themselves and to a constant prefix.

Several short samples are in one row. Each sees itself and the prefix. The
scores within a row are held whole; the prefix is read in tiles, forward and
backward, and never copied.
"""

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops import attention
from branch_replay.ops.attention import loops


@jax.custom_vjp
def attend_prefix(q_KGRTD, prefix, layer, prefix_length):
  """Attention to a prefix alone; differentiable in the queries.

  Args:
    q_KGRTD: queries.
    prefix: pair (k_LKPD, v_LKPD) of constants, read in place.
    layer: i32 scalar, layer of the prefix.
    prefix_length: i32 scalar, number of real positions.

  Returns:
    out_KGRTD and lse_KGRT, at least float32; (0, −∞) for an empty prefix.
  """
  return _forward(q_KGRTD, prefix, layer, prefix_length)[0]


def _rows(x_KGRTD):
  return x_KGRTD.reshape(x_KGRTD.shape[0], -1, x_KGRTD.shape[-1])


def _forward(q_KGRTD, prefix, layer, prefix_length):
  out, lse = loops.prefix_forward(
      _rows(q_KGRTD), prefix, layer, prefix_length
  )
  out, lse = out.reshape(q_KGRTD.shape), lse.reshape(q_KGRTD.shape[:-1])
  return (out, lse), (q_KGRTD, prefix, layer, prefix_length, out, lse)


def _backward(residuals, cotangents):
  q_KGRTD, prefix, layer, prefix_length, out, lse = residuals
  d_out, d_lse = cotangents
  heads = q_KGRTD.shape[0]
  delta = attention.row_delta(d_out, out, d_lse)
  # exp(score − ∞) = 0: a query that saw no key has no gradient.
  lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
  rows = loops.QueryRows(
      _rows(d_out), _rows(q_KGRTD), lse.reshape(heads, -1),
      delta.reshape(heads, -1),
  )
  dq_KND, _ = loops.prefix_backward(rows, prefix, layer, prefix_length, None)
  dq_KGRTD = dq_KND.reshape(q_KGRTD.shape).astype(q_KGRTD.dtype)
  return dq_KGRTD, None, None, None


attend_prefix.defvjp(_forward, _backward)


def attend(
    q_KGRTD, k_KGTD, v_KGTD, segments_GT, prefix, *, layer, prefix_length
):
  """Causal attention within each sample of a row, and to the prefix.

  Args:
    q_KGRTD: queries.
    k_KGTD: keys of the same tokens.
    v_KGTD: their values.
    segments_GT: i32, number of the sample each token belongs to.
    prefix: pair (k_LKPD, v_LKPD) of constants; P may be 0.
    layer: i32 scalar, layer of the prefix.
    prefix_length: i32 scalar, number of real positions of the prefix.

  Returns:
    out_KGRTD in the dtype of the queries.
  """
  dtype = config_lib.at_least_float32(q_KGRTD.dtype)
  tokens = segments_GT.shape[1]
  seen_GTS = segments_GT[:, :, None] == segments_GT[:, None, :]
  seen_GTS &= jnp.tri(tokens, dtype=bool)[None]
  scores = jnp.einsum(
      "kgrtd,kgsd->kgrts", q_KGRTD, k_KGTD, preferred_element_type=dtype
  ) * q_KGRTD.shape[-1] ** -0.5
  scores = jnp.where(seen_GTS[None, :, None], scores, -jnp.inf)
  lse = jax.nn.logsumexp(scores, axis=-1)  # finite: a token sees itself
  weights = jnp.exp(scores - lse[..., None]).astype(v_KGTD.dtype)
  out = jnp.einsum(
      "kgrts,kgsd->kgrtd", weights, v_KGTD, preferred_element_type=dtype
  )
  if prefix[0].shape[2]:
    out_p, lse_p = attend_prefix(q_KGRTD, prefix, layer, prefix_length)
    both = jnp.logaddexp(lse, lse_p)
    out = (
        jnp.exp(lse - both)[..., None] * out
        + jnp.exp(lse_p - both)[..., None] * out_p
    )
  return out.astype(q_KGRTD.dtype)
