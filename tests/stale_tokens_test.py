# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One log-prob that is far off spoils no batch: losses and metrics are finite.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.rl import divergences
from branch_replay.rl import metrics
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.rl import surrogates
from branch_replay.training import algorithms

OBJECTIVES = {
    "grpo": objectives.grpo, "dapo": objectives.dapo, "gspo": objectives.gspo,
    "dr_grpo": functools.partial(objectives.dr_grpo, max_tokens=4),
    "ppo": objectives.ppo,
}
FAR = (-200.0, -np.inf)
NEW_GT = np.log(np.array([[0.5, 0.3, 0.9, 0.6], [0.2, 0.7, 0.8, 0.4]]))
MASK_GT = jnp.ones((2, 4), bool)


def old(far):
  """Log-probs like the new ones, but for the second token of the second row."""
  old_GT = NEW_GT.copy()
  old_GT[1, 1] = old_GT[1, 1] + far
  return jnp.asarray(old_GT)


def value_and_slope(objective, old_GT, advantages=(1.0, -1.0), **known):
  answers = objective.answers(
      MASK_GT, jnp.array(advantages), old_log_probs=old_GT, **known
  )
  return jax.value_and_grad(objective)(jnp.asarray(NEW_GT), answers)


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stale_token_is_bounded_and_has_no_gradient(name, far):
  objective = OBJECTIVES[name]()
  known = {}
  if objective.kl_coefficient:
    known["reference_log_probs"] = jnp.asarray(NEW_GT)
  loss, slope_GT = value_and_slope(objective, old(far), **known)
  _, even_GT = value_and_slope(objective, old(0.0), **known)
  # All ratios 1 but that one, which counts as 3 where A = −1.
  excess = 2 / 8 if name != "gspo" else 8 / 8
  np.testing.assert_allclose(loss, excess, atol=1e-6)
  if name == "gspo":  # the whole answer's ratio is clipped
    even_GT = even_GT.at[1].set(0)
  np.testing.assert_allclose(slope_GT, even_GT.at[1, 1].set(0), atol=1e-6)


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_without_a_dual_clip_the_loss_is_finite(name, far, advantage):
  objective = OBJECTIVES[name](dual_clip=None)
  known = {}
  if objective.kl_coefficient:
    known["reference_log_probs"] = jnp.asarray(NEW_GT)
  loss, slope_GT = value_and_slope(
      objective, old(far), (1.0, advantage), **known
  )
  assert np.isfinite(loss) and np.all(np.isfinite(slope_GT))
  if advantage < 0 and name == "grpo":
    np.testing.assert_allclose(loss, (np.exp(20) - 1) / 8, rtol=1e-3)


@pytest.mark.parametrize("far", FAR)
def test_advantages_of_tokens_are_bounded_too(far):
  objective = objectives.ppo()
  answers = objective.answers(
      MASK_GT, -jnp.ones((2, 4)), old_log_probs=old(far)
  )
  loss, slope_GT = jax.value_and_grad(objective)(jnp.asarray(NEW_GT), answers)
  np.testing.assert_allclose(loss, (7 + 3) / 8, rtol=1e-6)
  assert np.all(np.isfinite(slope_GT)) and slope_GT[1, 1] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mine, reference", [
    (-0.5, -200.0), (-0.5, -np.inf), (-200.0, -0.5), (-np.inf, -0.5),
    (-np.inf, -np.inf),
])
def test_estimates_of_the_divergence_are_finite(estimator, mine, reference):
  def total(mine_GT):
    return jnp.sum(divergences.penalty(
        mine_GT, jnp.array([[reference, -1.0]]), jnp.ones((1, 2), bool),
        estimator=estimator,
    ))

  value, slope_GT = jax.value_and_grad(total)(jnp.array([[mine, -1.0]]))
  assert np.isfinite(value) and np.all(np.isfinite(slope_GT))
  if mine == reference:
    assert value == 0


def test_up_to_twenty_nats_the_estimates_are_those_of_the_formula(x64):
  delta_N = np.linspace(-19.9, 300, 50)
  np.testing.assert_allclose(
      divergences.k3(jnp.asarray(delta_N)), np.exp(-delta_N) - 1 + delta_N,
      rtol=1e-12,
  )


def test_a_log_prob_that_is_no_number_is_not_hidden():
  ratio_GT = divergences.log_ratio(
      jnp.array([[jnp.nan, -1.0]]), jnp.array([[-1.0, jnp.nan]]),
      jnp.ones((1, 2), bool),
  )
  assert np.all(np.isnan(ratio_GT))


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_metrics_are_finite(name, far):
  objective = OBJECTIVES[name]()
  known = {}
  if objective.kl_coefficient:
    known["reference_log_probs"] = old(far)
  answers = objective.answers(
      MASK_GT, jnp.array([1.0, -1.0]), old_log_probs=old(far), **known
  )
  report = algorithms.policy_report(
      objective, jnp.asarray(NEW_GT), old(far), answers
  )
  assert all(np.isfinite(value) for value in report.values()), report
  if name == "grpo":
    np.testing.assert_allclose(report["ratio_max"], np.exp(20), rtol=1e-5)
    np.testing.assert_allclose(report["clipped_dual"], 1 / 8)
  back = metrics.ratios(  # the other way round
      -objective.log_ratio(jnp.asarray(NEW_GT), answers),
      jnp.array([1.0, -1.0]), MASK_GT, clip_low=0.2, clip_high=0.2,
  )
  assert all(np.isfinite(value) for value in back.values()), back


def test_an_unbounded_clip_above_stays_finite():
  loss_GT = surrogates.ppo_clip(
      jnp.array([[500.0]]), jnp.ones(1), jnp.ones((1, 1), bool),
      clip_high=np.inf,
  )
  np.testing.assert_allclose(loss_GT, -np.exp(20.0), rtol=1e-6)


@pytest.mark.parametrize("loss", [preference.Dpo(), preference.Ipo()])
def test_pairs_with_an_impossible_token_are_finite(loss):
  pairs = preference.Pairs.create(MASK_GT, old(-np.inf))
  value, slope_GT = jax.value_and_grad(loss)(jnp.asarray(NEW_GT), pairs)
  assert np.isfinite(value) and np.all(np.isfinite(slope_GT))
