# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates of KL(π_θ ‖ π_ref) from sampled tokens, and the entropy.

With δ = log π_θ − log π_ref at a token drawn from π_θ, k1, k2, k3 are the
estimators of J. Schulman (http://joschu.net/blog/kl-approx.html). A good
estimate of the value need not have a good gradient: as a loss the sampled token
is held fixed, and what its gradient is in the mean is a property of its own
(arXiv 2506.09477). For one token, with x drawn from π_θ itself:

         value            gradient of the mean as a loss
  k1     unbiased         0: it only adds noise
  k2     biased           ∇ KL(π_θ ‖ π_ref), the reverse KL
  k3     unbiased, ≥ 0    ∇ KL(π_ref ‖ π_θ), the forward KL

k1 belongs into the reward, where the policy gradient weighs it. Token losses
do not tell a token what it does to the divergence of later ones, and under
samples of an older policy none of the gradients is exact.
"""

from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.rl import checks

Estimator = Literal["k1", "k2", "k3"]

# Log-probs below are read as this: log 0 then has a finite difference from any.
LEAST = -1000.0
# Log-ratios above are exponentiated as this, with gradient 0: e²⁰ is 5e8, and
# sums of its square over a batch are far from overflowing in float32.
LARGEST = 20.0


def log_ratio(log_probs_GT, other_log_probs_GT, mask_GT) -> jax.Array:
  """δ = log π_θ − log π_other of trained tokens, 0 elsewhere.

  Masked before anything is exponentiated: a masked ratio that overflows would
  send NaN back through a mask that comes after it. Log-probs below −1000, −∞
  too, count as −1000: δ is finite, and 0 where both are. NaN stays NaN.

  Args:
    log_probs_GT: log π_θ at the temperature that the other's are taken at.
    other_log_probs_GT: those of a fixed policy, through which no gradient goes.
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
  """δ. Unbiased; as a loss its gradient is 0 in the mean."""
  return log_ratio_GT


def k2(log_ratio_GT) -> jax.Array:
  """δ² / 2. Biased; as a loss its gradient is that of the reverse KL."""
  return jnp.square(log_ratio_GT) / 2


def k3(log_ratio_GT) -> jax.Array:
  """exp(−δ) − 1 + δ. Unbiased and ≥ 0; as a loss that of the forward KL.

  At most that of δ = −20, 4.9e8, with gradient 0 beyond.
  """
  log_ratio_GT = jnp.maximum(log_ratio_GT, -LARGEST)
  return jnp.expm1(-log_ratio_GT) + log_ratio_GT


def penalty(
    log_probs_GT, reference_log_probs_GT, mask_GT, *,
    estimator: Estimator = "k3",
) -> jax.Array:
  """The estimate at every token, 0 outside the mask.

  Args:
    log_probs_GT: log π_θ.
    reference_log_probs_GT: log π_ref, a constant.
    mask_GT: bool[..., G, T], the tokens that are trained.
    estimator: "k1", "k2" or "k3"; for a loss see the module on what their
      gradients are.

  Returns:
    [..., G, T], at least float32.

  Raises:
    ValueError: an unknown estimator; see `log_ratio`.
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

  An id at −∞ adds nothing and gets no gradient; a row of nothing else has
  entropy 0.

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
