# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of KL(π_θ ‖ π_ref) from sampled tokens, and the entropy.

Let δ = log π_θ − log π_ref at a token drawn from π_θ. k1, k2 and k3 are the
estimators of J. Schulman (http://joschu.net/blog/kl-approx.html). A good
estimate of the value does not imply a good gradient: in a loss the sampled
token is held fixed, and the mean of that gradient is another matter
(arXiv 2506.09477). For one token drawn from π_θ:

         value            mean gradient when used as a loss
  k1     unbiased         0: it only adds noise
  k2     biased           ∇ KL(π_θ ‖ π_ref), the reverse KL
  k3     unbiased, ≥ 0    ∇ KL(π_ref ‖ π_θ), the forward KL

So k1 belongs in the reward, where the policy gradient weighs it. Losses per
token ignore the effect of a token on the divergence of later ones, and if the
samples are of an older policy none of these gradients is exact.
"""

from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.rl import checks

Estimator = Literal["k1", "k2", "k3"]

# Lower log-probs count as this, so that differences from log 0 are finite.
LEAST = -1000.0
# Higher log-ratios count as this when exponentiated, with gradient 0: e²⁰ is
# 5e8, whose squares can be summed over a batch in float32.
LARGEST = 20.0


def log_ratio(log_probs_GT, other_log_probs_GT, mask_GT) -> jax.Array:
  """δ = log π_θ − log π_other of the trained tokens, 0 elsewhere.

  The mask is applied before anything is exponentiated: a masked ratio that
  overflows would send NaN back through a mask applied later. Log-probs below
  −1000, including −∞, count as −1000, so δ is finite, and 0 where both are. NaN
  stays NaN.

  Args:
    log_probs_GT: log π_θ, at the temperature of the other policy's.
    other_log_probs_GT: log π_other; it gets no gradient.
    mask_GT: bool[..., G, T], the tokens that are trained.

  Returns:
    [..., G, T], at least float32.

  Raises:
    ValueError: different shapes, or a mask that is not bool.
  """
  checks.check_mask(
      mask_GT, log_probs=log_probs_GT, other_log_probs=other_log_probs_GT
  )
  dtype = config_lib.at_least_float32(jnp.result_type(log_probs_GT))
  other_GT = lax.stop_gradient(jnp.asarray(other_log_probs_GT))
  mine_GT = jnp.asarray(log_probs_GT).astype(dtype)
  difference_GT = jnp.maximum(mine_GT, LEAST) - jnp.maximum(other_GT, LEAST)
  return jnp.where(mask_GT, difference_GT, 0)


def k1(log_ratio_GT) -> jax.Array:
  """δ. Unbiased; as a loss its mean gradient is 0."""
  return log_ratio_GT


def k2(log_ratio_GT) -> jax.Array:
  """δ² / 2. Biased; as a loss its mean gradient is that of the reverse KL."""
  return jnp.square(log_ratio_GT) / 2


def k3(log_ratio_GT) -> jax.Array:
  """exp(−δ) − 1 + δ ≥ 0. Unbiased; as a loss, gradient of the forward KL.

  δ below −20 counts as −20, where the estimate is 4.9e8, and has gradient 0.
  """
  log_ratio_GT = jnp.maximum(log_ratio_GT, -LARGEST)
  return jnp.expm1(-log_ratio_GT) + log_ratio_GT


def penalty(
    log_probs_GT, reference_log_probs_GT, mask_GT, *,
    estimator: Estimator = "k3",
) -> jax.Array:
  """The chosen estimate at every token, 0 outside the mask.

  Args:
    log_probs_GT: log π_θ.
    reference_log_probs_GT: log π_ref; it gets no gradient.
    mask_GT: bool[..., G, T], the tokens that are trained.
    estimator: "k1", "k2" or "k3"; the module compares their gradients.

  Returns:
    [..., G, T], at least float32.

  Raises:
    ValueError: an unknown estimator; see also `log_ratio`.
  """
  checks.check_choice("estimator", estimator, Estimator)
  log_ratio_GT = log_ratio(log_probs_GT, reference_log_probs_GT, mask_GT)
  if estimator == "k1":
    return k1(log_ratio_GT)
  if estimator == "k2":
    return k2(log_ratio_GT)
  return k3(log_ratio_GT)


def entropy(logits_NV) -> jax.Array:
  """H = −Σᵥ pᵥ log pᵥ of softmax(logits), over the last axis.

  An id at −∞ adds nothing and gets no gradient. If all ids are at −∞, H = 0.

  Args:
    logits_NV: logits or log-probs, [..., V], −∞ allowed.

  Returns:
    [...], at least float32.
  """
  logits_NV = logits_NV.astype(config_lib.at_least_float32(logits_NV.dtype))
  there_NV = logits_NV > -jnp.inf
  smallest = jnp.finfo(logits_NV.dtype).min
  log_p_NV = jax.nn.log_softmax(jnp.where(there_NV, logits_NV, smallest))
  terms_NV = jnp.exp(log_p_NV) * log_p_NV
  return -jnp.sum(jnp.where(there_NV, terms_NV, 0), axis=-1)
