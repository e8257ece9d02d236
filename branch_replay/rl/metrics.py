# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Scalars to log, by name, of one batch. A mean over nothing is 0."""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.rl import advantages as advantages_lib
from branch_replay.rl import checks
from branch_replay.rl import divergences
from branch_replay.rl import surrogates


def mean(values, mask) -> jax.Array:
  """Mean over the entries of the mask; entries outside are not read."""
  values = jnp.where(mask, values, 0)
  return jnp.sum(values) / jnp.maximum(jnp.sum(mask), 1)


def ratios(
    log_ratio_GT, advantages, mask_GT, *, clip_low: float, clip_high: float,
    dual_clip: float | None = surrogates.DUAL_CLIP,
) -> dict[str, jax.Array]:
  """How far the policy has moved from the one that sampled.

  Args:
    log_ratio_GT: log r, made by `PolicyLoss.log_ratio`.
    advantages: [..., G] or [..., G, T].
    mask_GT: bool[..., G, T], the tokens that are trained.
    clip_low: ε_low of the loss.
    clip_high: ε_high of the loss.
    dual_clip: c of the loss, or None.

  Returns:
    ratio_mean, ratio_max: mean and maximum of r, where r above e²⁰ counts as
      e²⁰ here and below.
    clipped_low, clipped_high, clipped_dual: shares of tokens without a gradient
      because r is beyond a bound of `surrogates.clip_bounds`: r < 1 − ε_low and
      A < 0; r > 1 + ε_high and A > 0; r > c and A < 0.
    kl_old: mean of r − 1 − log r, an estimate of KL(π_old ‖ π_θ).
    effective_sample_size: (Σ r)² / (n Σ r²), 1 if all ratios are equal.
  """
  surrogates.check_clip(clip_low, clip_high, dual_clip)
  checks.check_mask(mask_GT, log_ratio=log_ratio_GT)
  advantages_GT = checks.by_token(advantages, mask_GT)
  log_ratio_GT = lax.stop_gradient(jnp.where(mask_GT, log_ratio_GT, 0))
  low_GT, high_GT = surrogates.clip_bounds(
      advantages_GT, clip_low=clip_low, clip_high=clip_high,
      dual_clip=dual_clip,
  )
  below_GT, above_GT = log_ratio_GT < low_GT, log_ratio_GT > high_GT
  log_ratio_GT = jnp.minimum(log_ratio_GT, divergences.LARGEST)
  largest = _largest(log_ratio_GT, mask_GT)
  # Divided by the largest, so that squares do not overflow.
  scaled_GT = jnp.where(mask_GT, jnp.exp(log_ratio_GT - largest), 0)
  square = jnp.sum(jnp.square(scaled_GT)) * jnp.sum(mask_GT)
  some = jnp.any(mask_GT)
  return {
      "ratio_mean": mean(jnp.exp(log_ratio_GT), mask_GT),
      "ratio_max": jnp.where(some, jnp.exp(largest), 0),
      "clipped_low": mean(below_GT, mask_GT),
      "clipped_high": mean(above_GT & (advantages_GT > 0), mask_GT),
      "clipped_dual": mean(above_GT & (advantages_GT < 0), mask_GT),
      "kl_old": mean(divergences.k3(-log_ratio_GT), mask_GT),
      "effective_sample_size": jnp.square(jnp.sum(scaled_GT))
      / jnp.where(some, square, 1),
  }


def kl_reference(
    log_probs_GT, reference_log_probs_GT, mask_GT
) -> dict[str, jax.Array]:
  """The mean of k3 over tokens, an estimate of KL(π_θ ‖ π_ref).

  Args:
    log_probs_GT: log π_θ.
    reference_log_probs_GT: log π_ref.
    mask_GT: bool, the tokens that count.

  Returns:
    {"kl_reference": scalar}, in nats per token.
  """
  penalty_GT = divergences.penalty(
      lax.stop_gradient(log_probs_GT), reference_log_probs_GT, mask_GT,
      estimator="k3",
  )
  return {"kl_reference": mean(penalty_GT, mask_GT)}


def mismatch(
    log_probs_GT, sampler_log_probs_GT, mask_GT
) -> dict[str, jax.Array]:
  """How well sampler and trainer agree, to be computed before the first update.

  Args:
    log_probs_GT: the trainer's log-probs, under the parameters that sampled.
    sampler_log_probs_GT: the sampler's, at the same temperature.
    mask_GT: bool[..., G, T], the tokens that were sampled.

  Returns:
    mismatch_mean, mismatch_max: of |log p_trainer − log p_sampler|, which is
    rounding error if both are the same policy.
  """
  distance_GT = jnp.abs(
      divergences.log_ratio(
          lax.stop_gradient(log_probs_GT), sampler_log_probs_GT, mask_GT
      )
  )
  return {
      "mismatch_mean": mean(distance_GT, mask_GT),
      "mismatch_max": jnp.max(distance_GT, initial=0.0),
  }


def rewards(rewards_G, mask_G=None) -> dict[str, jax.Array]:
  """Statistics of the rewards of groups.

  Args:
    rewards_G: [..., G].
    mask_G: bool[..., G], false for branches that are padding; None for all
      true.

  Returns:
    reward_mean: mean over answers.
    reward_spread: standard deviation within a group (dividing by n), averaged
      over groups.
    dead_groups: share of groups whose rewards are equal, `advantages.is_dead`.
  """
  rewards_G = jnp.asarray(rewards_G)
  if mask_G is None:
    mask_G = jnp.ones(rewards_G.shape, bool)
  centred_G = advantages_lib.group_relative(rewards_G, mask_G, normalize=False)
  count = jnp.sum(mask_G, axis=-1)
  variance = jnp.sum(jnp.square(centred_G), -1) / jnp.maximum(count, 1)
  return {
      "reward_mean": mean(rewards_G, mask_G),
      "reward_spread": mean(jnp.sqrt(variance), count > 0),
      "dead_groups": mean(
          advantages_lib.is_dead(rewards_G, mask_G), count > 0
      ),
  }


def answers(lengths_G, finished_G) -> dict[str, jax.Array]:
  """Statistics of the lengths of answers; answers of length 0 do not count.

  Args:
    lengths_G: i32[..., G], sampled tokens, `Rollout.lengths`.
    finished_G: bool[..., G], whether a stop id ended it, `Rollout.finished`.

  Returns:
    answer_length, answer_length_max: mean and maximum, in tokens.
    truncated: share of answers that did not finish.
  """
  lengths_G = jnp.asarray(lengths_G)
  there_G = lengths_G > 0
  return {
      "answer_length": mean(lengths_G, there_G),
      "answer_length_max": jnp.max(lengths_G, initial=0),
      "truncated": mean(~jnp.asarray(finished_G), there_G),
  }


def _largest(x_GT, mask_GT):
  """The largest masked entry, 0 if there is none."""
  largest = jnp.max(
      jnp.where(mask_GT, x_GT, -jnp.inf), initial=-jnp.inf
  )
  return jnp.where(jnp.any(mask_GT), largest, 0)
