# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readable attention: plain einsums and ordinary autodiff.

`attention` is tested against it, forward and backward.
"""

import chex
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib


def causal(
    q_KGRTD, k_KGTD, v_KGTD, *, window=None, block=None, start=0,
    lengths_G=None, lowest_GT=None, sinks=0,
):
  """Causal grouped-query attention of whole sequences.

  Args:
    q_KGRTD: queries.
    k_KGTD: keys.
    v_KGTD: values.
    window: W; a query sees no key W or more positions before it. None for all.
    block: B; the tokens from `start` on are in blocks of B tokens that see all
      of their own block. None for causal attention.
    start: i32 scalar, first token of the first block.
    lengths_G: i32, real tokens of each sequence; None for all.
    lowest_GT, sinks: as in `attention.replay_attention`.

  Returns:
    out_KGRTD in the dtype of the queries.
  """
  heads, _, _, _, head_dim = q_KGRTD.shape
  nothing_KPD = jnp.zeros((heads, 0, head_dim), k_KGTD.dtype)
  out_KGRTD, _ = replay_attention(
      q_KGRTD, k_KGTD, v_KGTD, nothing_KPD, nothing_KPD, 0, window=window,
      block=block, start=start, lengths_G=lengths_G, lowest_GT=lowest_GT,
      sinks=sinks,
  )
  return out_KGRTD


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
    block=None,
    start=0,
    lowest_GT=None,
    sinks=0,
):
  """Reference of `attention.replay_attention`: same arguments and results.

  In addition, `start` is the first token of the first block.
  """
  chex.assert_rank([q_KGRTD, k_KGTD, prefix_k_KPD], [5, 4, 3])
  branches, tokens, positions = (
      k_KGTD.shape[1], k_KGTD.shape[2], prefix_k_KPD.shape[1],
  )
  dtype = config_lib.at_least_float32(q_KGRTD.dtype)
  scale = q_KGRTD.shape[-1] ** -0.5
  to_prefix = jnp.einsum(
      "kgrtd,kpd->kgrtp", q_KGRTD, prefix_k_KPD, preferred_element_type=dtype
  )
  to_segment = jnp.einsum(
      "kgrtd,kgsd->kgrts", q_KGRTD, k_KGTD, preferred_element_type=dtype
  )
  seen_P = jnp.arange(positions) < prefix_length
  query_T = jnp.arange(tokens)[:, None]
  key_S = jnp.arange(tokens)[None, :]
  seen_TS = key_S <= query_T
  if block is not None:
    of_query, of_key = (query_T - start) // block, (key_S - start) // block
    seen_TS |= (key_S >= start) & (of_key <= of_query)
  seen = jnp.concatenate(
      [jnp.broadcast_to(seen_P, (tokens, positions)), seen_TS], axis=-1
  )[None]
  if block is not None and lengths_G is not None:
    real_GS = key_S < lengths_G[:, None]
    real_GP = jnp.ones((branches, positions), bool)
    seen = seen & jnp.concatenate([real_GP, real_GS], axis=-1)[:, None]
  if window is not None:
    at = jnp.concatenate(
        [jnp.arange(positions), prefix_length + jnp.arange(tokens)]
    )
    seen &= (prefix_length + query_T - at[None] < window)[None]
  if lengths_G is not None:
    seen = seen & (query_T[None] < lengths_G[:, None, None])
  seen = jnp.broadcast_to(seen, (branches, tokens, positions + tokens))
  seen = seen[None, :, None]

  logits = jnp.concatenate([to_prefix, to_segment], axis=-1) * scale
  sends = True
  if lowest_GT is not None:
    at = jnp.concatenate(
        [jnp.arange(positions), prefix_length + jnp.arange(tokens)]
    )[None, None]
    sends = (at >= lowest_GT[..., None]) | (at < sinks)
    sends = sends[None, :, None]
    logits = jnp.where(sends, logits, lax.stop_gradient(logits))
  logits = jnp.where(seen, logits, -jnp.inf)
  top = jnp.max(logits, axis=-1, keepdims=True)
  # A row that sees nothing: shift by 0 and divide by 1, for finite gradients.
  top = jnp.where(jnp.isfinite(top), top, 0.0)
  weights = jnp.where(seen, jnp.exp(jnp.where(seen, logits - top, 0.0)), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  empty = total == 0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, -jnp.inf, jnp.log(total) + top)[..., 0]

  probs = (weights / total).astype(v_KGTD.dtype)

  def weighted(probs, prefix_v_KPD, v_KGTD):
    return jnp.einsum(
        "kgrtp,kpd->kgrtd", probs[..., :positions], prefix_v_KPD,
        preferred_element_type=dtype,
    ) + jnp.einsum(
        "kgrts,kgsd->kgrtd", probs[..., positions:], v_KGTD,
        preferred_element_type=dtype,
    )

  out = weighted(jnp.where(sends, probs, 0), prefix_v_KPD, v_KGTD)
  if lowest_GT is not None:  # the same numbers, without their values' cotangent
    out += weighted(
        jnp.where(sends, 0, probs), lax.stop_gradient(prefix_v_KPD),
        lax.stop_gradient(v_KGTD),
    )
  return out.astype(q_KGRTD.dtype), lse
