# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of single tokens, one equation each; `reductions` averages them.

Every function returns loss_GT, 0 outside the mask. Only the policy's own
log-probs (or values) get a gradient.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.rl import checks
from branch_replay.rl import divergences

DUAL_CLIP = 3.0  # c of the paper


def reinforce(log_probs_GT, advantages, mask_GT) -> jax.Array:
  """−Aₜ log π_θ(yₜ), Williams 1992, https://doi.org/10.1007/BF00992696.

  Args:
    log_probs_GT: log π_θ of the tokens.
    advantages: A, one per branch [..., G] or one per token [..., G, T].
    mask_GT: bool[..., G, T], the tokens that are trained.

  Returns:
    loss_GT.

  Raises:
    ValueError: shapes that do not fit, or a mask that is not bool.
  """
  checks.check_mask(mask_GT, log_probs=log_probs_GT)
  advantages_GT = lax.stop_gradient(checks.by_token(advantages, mask_GT))
  dtype = config_lib.at_least_float32(jnp.result_type(log_probs_GT))
  log_probs_GT = jnp.where(mask_GT, log_probs_GT, 0).astype(dtype)
  return -advantages_GT * log_probs_GT


def sequence_log_ratio(log_probs_GT, old_log_probs_GT, mask_GT) -> jax.Array:
  """log sᵢ = 1/|yᵢ| Σₜ log π_θ(yₜ) / π_old(yₜ), at every trained token.

  This is the length-normalised ratio of GSPO, arXiv 2507.18071, with ∇sᵢ =
  sᵢ/|yᵢ| Σₜ ∇ log π_θ(yₜ). All tokens of an answer carry the same sᵢ, and the
  mean over them is sᵢ again. So with the reduction "sequence_mean" the gradient
  is the paper's.

  Args:
    log_probs_GT: log π_θ of the tokens.
    old_log_probs_GT: log π_old, of the policy that sampled; it gets no
      gradient.
    mask_GT: bool[..., G, T], the tokens that are trained; |yᵢ| counts these.

  Returns:
    [..., G, T], the same at all trained tokens of an answer, 0 elsewhere.

  Raises:
    ValueError: see `divergences.log_ratio`.
  """
  ratio_GT = divergences.log_ratio(log_probs_GT, old_log_probs_GT, mask_GT)
  length_G1 = jnp.sum(mask_GT, axis=-1, keepdims=True)
  mean_G1 = jnp.sum(ratio_GT, -1, keepdims=True) / jnp.maximum(length_G1, 1)
  return jnp.where(mask_GT, mean_G1, 0)


def clip_bounds(
    advantages_GT, *, clip_low: float, clip_high: float,
    dual_clip: float | None,
):
  """The range of log r outside of which a token has no gradient.

  Args:
    advantages_GT: A of every token.
    clip_low: ε_low.
    clip_high: ε_high.
    dual_clip: c, or None for e²⁰.

  Returns:
    (low_GT, high_GT): (−∞, log(1 + ε_high)) where A ≥ 0, and
    (log(1 − ε_low), log c) where A < 0. No bound is above 20: beyond it one
    token would dominate the loss of a batch, and from 89 on float32 overflows.
  """
  up_GT = advantages_GT >= 0
  dual = math.inf if dual_clip is None else math.log(dual_clip)
  high, dual = (
      min(x, divergences.LARGEST) for x in (math.log1p(clip_high), dual)
  )
  return (
      jnp.where(up_GT, -jnp.inf, math.log1p(-clip_low)),
      jnp.where(up_GT, high, dual),
  )


def ppo_clip(
    log_ratio_GT, advantages, mask_GT, *, clip_low: float = 0.2,
    clip_high: float = 0.2, dual_clip: float | None = DUAL_CLIP,
) -> jax.Array:
  """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), arXiv 1707.06347, equation 7.

  The dual clip, arXiv 1912.09729, limits the loss of a token with A < 0 to c
  |A|. Without it a single token whose old log-prob is far too low, because it
  is stale or was rounded, can dominate the loss of a batch. Both clips clamp
  log r to a range that depends on the sign of A, before it is exponentiated, so
  a clipped ratio that would overflow sends back 0 and not NaN. A ratio on a
  bound keeps its gradient.

  Args:
    log_ratio_GT: log r, of tokens (`divergences.log_ratio`) or of answers
      (`sequence_log_ratio`).
    advantages: A, one per branch [..., G] or one per token [..., G, T].
    mask_GT: bool[..., G, T], the tokens that are trained.
    clip_low: ε_low in [0, 1).
    clip_high: ε_high ≥ 0.
    dual_clip: c > 1; None for e²⁰, which only keeps the loss finite.

  Returns:
    loss_GT.

  Raises:
    ValueError: shapes that do not fit, or a constant out of its range.
  """
  check_clip(clip_low, clip_high, dual_clip)
  checks.check_mask(mask_GT, log_ratio=log_ratio_GT)
  advantages_GT = lax.stop_gradient(checks.by_token(advantages, mask_GT))
  low_GT, high_GT = clip_bounds(
      advantages_GT, clip_low=clip_low, clip_high=clip_high,
      dual_clip=dual_clip,
  )
  log_ratio_GT = jnp.where(mask_GT, log_ratio_GT, 0)
  log_ratio_GT = jnp.where(log_ratio_GT > high_GT, high_GT, log_ratio_GT)
  log_ratio_GT = jnp.where(log_ratio_GT < low_GT, low_GT, log_ratio_GT)
  return -advantages_GT * jnp.exp(log_ratio_GT)


def value_loss(
    values_GT, old_values_GT, returns_GT, mask_GT, *, clip: float | None = 0.2
) -> jax.Array:
  """max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²) / 2.

  This is the clipped value loss of PPO implementations, arXiv 2005.12729.

  Args:
    values_GT: V.
    old_values_GT: V_old, of the policy that sampled; it gets no gradient.
    returns_GT: R; it gets no gradient.
    mask_GT: bool[..., G, T], the tokens that are trained.
    clip: ε > 0; None for (V − R)² / 2.

  Returns:
    loss_GT.

  Raises:
    ValueError: shapes that do not fit, or a clip that is not positive.
  """
  if clip is not None and not clip > 0:
    raise ValueError(f"clip must be > 0, or None for no clipping, not {clip}.")
  checks.check_mask(
      mask_GT, values=values_GT, old_values=old_values_GT, returns=returns_GT
  )
  dtype = config_lib.at_least_float32(jnp.result_type(values_GT))
  values_GT, old_GT, returns_GT = (
      jnp.where(mask_GT, x, 0).astype(dtype)
      for x in (
          values_GT, lax.stop_gradient(old_values_GT),
          lax.stop_gradient(returns_GT),
      )
  )
  loss_GT = jnp.square(values_GT - returns_GT)
  if clip is not None:
    near_GT = old_GT + jnp.clip(values_GT - old_GT, -clip, clip)
    clipped_GT = jnp.square(near_GT - returns_GT)
    loss_GT = jnp.where(clipped_GT > loss_GT, clipped_GT, loss_GT)
  return loss_GT / 2


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None):
  """Raises ValueError for clipping constants out of their range."""
  if not 0 <= clip_low < 1:
    raise ValueError(f"clip_low must lie in [0, 1), not {clip_low}.")
  if not clip_high >= 0:
    raise ValueError(f"clip_high must be ≥ 0, not {clip_high}.")
  if dual_clip is not None and not dual_clip > 1:
    raise ValueError(f"dual_clip must be > 1, or None, not {dual_clip}.")
