# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics by hand, and finite where there is nothing to measure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.rl import divergences
from branch_replay.rl import metrics
from branch_replay.rl import objectives

BOUNDS = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def close(got, **right):
  assert got.keys() >= right.keys()
  for name, value in right.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_ratios_by_hand():
  ratio_GT = jnp.array([
      [1.5, 1.0, 0.5, 1.2],  # A > 0: one clipped above
      [0.5, 4.0, 2.0, 9.0],  # A < 0: one clipped below, one by the dual clip
      [5.0, 0.1, 9.0, 9.0],  # A = 0: no gradient that could be clipped
  ])
  mask_GT = jnp.arange(4)[None] < jnp.array([[4], [3], [2]])
  got = metrics.ratios(
      jnp.log(ratio_GT), jnp.array([1.0, -1.0, 0.0]), mask_GT, **BOUNDS
  )
  kept = np.asarray(ratio_GT)[np.asarray(mask_GT)]
  close(
      got,
      ratio_mean=15.8 / 9,
      ratio_max=5.0,
      clipped_high=1 / 9,
      clipped_low=1 / 9,
      clipped_dual=1 / 9,
      kl_old=np.mean(kept - 1 - np.log(kept)),
      effective_sample_size=kept.sum() ** 2 / (9 * np.sum(kept**2)),
  )


@pytest.mark.parametrize(
    "bound,changed",
    [
        (dict(clip_low=0.6), "clipped_low"),
        (dict(clip_high=0.6), "clipped_high"),
        (dict(dual_clip=None), "clipped_dual"),
    ],
)
def test_every_bound_is_wired(bound, changed):
  ratio_GT = jnp.array([[1.5, 0.5], [0.5, 4.0]])
  of = jnp.log(ratio_GT), jnp.array([1.0, -1.0]), jnp.ones((2, 2), bool)
  before, after = metrics.ratios(*of, **BOUNDS), metrics.ratios(
      *of, **BOUNDS | bound
  )
  assert {name for name in before if before[name] != after[name]} == {changed}


def test_clipped_tokens_are_those_without_a_gradient(x64):
  random = np.random.default_rng(0)
  objective = objectives.PolicyLoss("token", "token_mean", dual_clip=1.5)
  log_probs_GT = jnp.asarray(random.normal(size=(5, 20)))
  answers = objective.answers(
      jnp.asarray(random.random((5, 20)) < 0.8),
      jnp.asarray(random.normal(size=5)), old_log_probs=jnp.zeros((5, 20)),
  )
  gradient_GT = jax.grad(objective)(log_probs_GT, answers)
  still_GT = answers.mask & (gradient_GT == 0)
  got = metrics.ratios(
      objective.log_ratio(log_probs_GT, answers), answers.advantages,
      answers.mask, clip_low=0.2, clip_high=0.2, dual_clip=1.5,
  )
  parts = [got[f"clipped_{side}"] for side in ("low", "high", "dual")]
  assert all(0 < part < 0.5 for part in parts)
  np.testing.assert_allclose(
      sum(parts), metrics.mean(still_GT, answers.mask), rtol=1e-12
  )


def test_the_same_policy_has_ratio_one():
  zeros_GT = jnp.zeros((3, 4))
  got = metrics.ratios(
      zeros_GT, jnp.array([1.0, -1.0, 0.0]), jnp.ones((3, 4), bool), **BOUNDS
  )
  close(
      got, ratio_mean=1, ratio_max=1, clipped_low=0, clipped_high=0,
      clipped_dual=0, kl_old=0, effective_sample_size=1,
  )


def test_one_token_with_all_the_weight():
  log_ratio_GT = jnp.zeros((2, 5)).at[1, 1].set(80.0)  # counts as 20
  got = metrics.ratios(
      log_ratio_GT, jnp.ones(2), jnp.ones((2, 5), bool), **BOUNDS
  )
  close(got, effective_sample_size=0.1, ratio_max=np.exp(20.0))
  got = metrics.ratios(
      log_ratio_GT - 200, jnp.ones(2), jnp.ones((2, 5), bool), **BOUNDS
  )
  close(got, effective_sample_size=0.1, ratio_max=0)


def test_kl_to_the_reference():
  log_probs_GT = jnp.array([[-1.0, -2.0, 5.0]])
  mask_GT = jnp.array([[True, True, False]])
  got = metrics.kl_reference(log_probs_GT, jnp.full((1, 3), -2.0), mask_GT)
  close(got, kl_reference=np.exp(-1) / 2)  # exp(−1) − 1 + 1, and 0


def test_sampler_and_trainer():
  mask_GT = jnp.array([[True, True, False], [True, False, False]])
  got = metrics.mismatch(
      jnp.array([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]]),
      jnp.array([[-1.1, -2.0, -9.0], [-2.5, jnp.nan, 0.0]]), mask_GT,
  )
  close(got, mismatch_mean=0.2, mismatch_max=0.5)


def test_rewards_of_groups():
  rewards = jnp.array([
      [1.0, 0.0, 1.0, 0.0], [0.7, 0.7, 0.7, jnp.nan], [jnp.nan] * 4,
  ])
  mask = jnp.array([[True] * 4, [True] * 3 + [False], [False] * 4])
  close(
      metrics.rewards(rewards, mask),
      reward_mean=4.1 / 7, reward_spread=0.25, dead_groups=0.5,
  )
  close(
      metrics.rewards(jnp.array([3.0, 1.0])),
      reward_mean=2, reward_spread=1, dead_groups=0,
  )


def test_answers():
  got = metrics.answers(
      jnp.array([[3, 5], [7, 0]]), jnp.array([[True, False], [True, False]])
  )
  close(got, answer_length=5, answer_length_max=7, truncated=1 / 3)


def test_a_mean_of_what_is_there():
  entropy_GT = divergences.entropy(
      jnp.array([[[0.0, 0.0], [0.0, -jnp.inf]], [[jnp.nan] * 2] * 2])
  )
  mask_GT = jnp.array([[True, True], [False, False]])
  np.testing.assert_allclose(
      metrics.mean(entropy_GT, mask_GT), np.log(2) / 2, rtol=1e-6
  )


@pytest.mark.parametrize("shape", ((3, 4), (3, 0), (2, 3, 4)))
def test_nothing_to_measure_is_finite(shape):
  mask = jnp.zeros(shape, bool)
  bad = jnp.full(shape, jnp.nan)
  branches = shape[:-1]
  everything = (
      metrics.ratios(bad, jnp.full(branches, jnp.nan), mask, **BOUNDS)
      | metrics.kl_reference(bad, bad, mask)
      | metrics.mismatch(bad, bad, mask)
      | metrics.rewards(bad[..., 0:1].sum(-1), mask.any(-1))
      | metrics.answers(jnp.zeros(branches, int), jnp.zeros(branches, bool))
  )
  assert len(everything) == 16
  for name, value in everything.items():
    assert value == 0 and value.shape == (), name


def test_metrics_send_no_gradient():
  of = jnp.array([1.0]), jnp.ones((1, 2), bool)

  def total(log_probs_GT):
    log_ratio_GT = divergences.log_ratio(
        log_probs_GT, jnp.zeros((1, 2)), of[1]
    )
    return sum(
        (metrics.ratios(log_ratio_GT, *of, **BOUNDS)
         | metrics.kl_reference(log_probs_GT, jnp.zeros((1, 2)), of[1])
         | metrics.mismatch(log_probs_GT, jnp.zeros((1, 2)), of[1])).values()
    )

  np.testing.assert_array_equal(jax.grad(total)(jnp.ones((1, 2))), 0)


def test_bad_input_is_an_error():
  mask_GT = jnp.ones((2, 3), bool)
  with pytest.raises(ValueError, match=r"log_ratio has shape \(2,\)"):
    metrics.ratios(jnp.ones(2), jnp.ones(2), mask_GT, **BOUNDS)
  with pytest.raises(ValueError, match="clip_low"):
    metrics.ratios(
        jnp.ones((2, 3)), jnp.ones(2), mask_GT, clip_low=1.0, clip_high=0.2
    )
