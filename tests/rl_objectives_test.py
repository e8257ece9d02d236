# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses by hand, their gradients, and that splitting does not show."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from branch_replay.rl import objectives
from branch_replay.rl import reductions
from branch_replay.rl import surrogates

OBJECTIVES = {
    "reinforce": objectives.reinforce(),
    "ppo": objectives.ppo(dual_clip=3.0, kl_coefficient=0.1),
    "grpo": objectives.grpo(),
    "dr_grpo": objectives.dr_grpo(max_tokens=9),
    "dapo": objectives.dapo(),
    "gspo": objectives.gspo(clip_low=0.05, clip_high=0.07),
}

every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def batch(objective, branches=8, tokens=6, seed=0):
  """Log-probs, and answers of all lengths from 0 on, one with a hole."""
  random = np.random.default_rng(seed)
  log_probs_GT, old_GT, reference_GT = (
      jnp.asarray(-1 + 0.3 * random.normal(size=(branches, tokens)))
      for _ in range(3)
  )
  lengths_G = np.arange(branches) % (tokens + 1)
  mask_GT = np.arange(tokens) < lengths_G[:, None]
  mask_GT[tokens, 2] = False
  answers = objective.answers(
      jnp.asarray(mask_GT), jnp.asarray(random.normal(size=branches)),
      old_log_probs=None if objective.ratio == "none" else old_GT,
      reference_log_probs=reference_GT if objective.kl_coefficient else None,
  )
  return log_probs_GT, answers


def rows(tree, start, stop):
  return jax.tree.map(lambda x: x[start:stop], tree)


def test_gspo_has_the_value_and_gradient_of_the_paper(x64):
  objective = objectives.gspo(clip_low=0.9, clip_high=9.0)
  log_probs_GT, answers = batch(objective)
  value, gradient_GT = jax.value_and_grad(objective)(log_probs_GT, answers)
  mask_GT = np.asarray(answers.mask)
  length_G = mask_GT.sum(axis=1)
  ratio_GT = np.where(mask_GT, log_probs_GT - answers.old_log_probs, 0)
  s_G = np.exp(ratio_GT.sum(axis=1) / np.maximum(length_G, 1))
  real = (length_G > 0).sum()
  of_G = -s_G * answers.advantages / real * (length_G > 0)
  np.testing.assert_allclose(value, of_G.sum(), rtol=1e-12)
  right_GT = (of_G / np.maximum(length_G, 1))[:, None] * mask_GT
  np.testing.assert_allclose(gradient_GT, right_GT, rtol=1e-12)
  # Clipped as a whole: an answer beyond the bound has no gradient at all.
  tight = dataclasses.replace(objective, clip_low=1e-9, clip_high=1e-9)
  gradient_GT = np.asarray(jax.grad(tight)(log_probs_GT, answers))
  cut_G = np.where(answers.advantages > 0, s_G > 1, s_G < 1)
  assert cut_G[1:].any() and not cut_G[1:].all()
  np.testing.assert_array_equal(gradient_GT[cut_G], 0)
  np.testing.assert_allclose(gradient_GT[~cut_G], right_GT[~cut_G], rtol=1e-12)


def test_named_objectives_are_compositions(x64):
  """The loss of a batch, written out for GRPO, DAPO and REINFORCE."""
  for objective in (OBJECTIVES["grpo"], OBJECTIVES["dapo"]):
    log_probs_GT, answers = batch(objective)
    losses = []  # of each answer, token by token
    for g in range(8):
      tokens, a = np.flatnonzero(answers.mask[g]), answers.advantages[g]
      row = []
      for t in tokens:
        r = math.exp(log_probs_GT[g, t] - answers.old_log_probs[g, t])
        inside = min(max(r, 1 - objective.clip_low), 1 + objective.clip_high)
        row.append(-min(r * a, inside * a))
        if objective.kl_coefficient:
          d = answers.reference_log_probs[g, t] - log_probs_GT[g, t]
          row[-1] += 0.04 * (math.exp(d) - d - 1)
      losses.append(row)
    losses = [row for row in losses if row]
    if objective.reduction == "sequence_mean":
      right = np.mean([np.mean(row) for row in losses])
    else:
      right = np.mean(np.concatenate(losses))
    np.testing.assert_allclose(
        objective(log_probs_GT, answers), right, rtol=1e-12
    )
  objective = OBJECTIVES["reinforce"]
  log_probs_GT, answers = batch(objective)
  sums_G = jnp.sum(jnp.where(answers.mask, log_probs_GT, 0), axis=1)
  real = jnp.any(answers.mask, axis=1).sum()
  np.testing.assert_allclose(
      objective(log_probs_GT, answers),
      -jnp.sum(answers.advantages * sums_G) / real, rtol=1e-12,
  )


@every_objective
def test_gradients_are_those_of_finite_differences(x64, name):
  log_probs_GT, answers = batch(OBJECTIVES[name])
  check_grads(
      lambda x: OBJECTIVES[name](x, answers), (log_probs_GT,), order=1,
      modes=["rev"], atol=1e-6, rtol=1e-6,
  )


@every_objective
@pytest.mark.parametrize("part", (1, 3, 4))
def test_no_split_changes_loss_or_gradient(x64, name, part):
  objective = OBJECTIVES[name]
  log_probs_GT, answers = batch(objective)
  of = jax.value_and_grad(objective)
  value, gradient_GT = of(log_probs_GT, answers)
  values, gradients = zip(
      *(of(*rows((log_probs_GT, answers), i, i + part))
        for i in range(0, 8, part)),
      strict=True,
  )
  np.testing.assert_allclose(sum(values), value, rtol=1e-12)
  np.testing.assert_allclose(
      np.concatenate(gradients), gradient_GT, rtol=1e-12
  )
  # The other way: sums and weights of parts that know nothing of each other.
  totals = [
      reductions.reduce(
          objective.per_token(*rows((log_probs_GT, answers), i, i + part)),
          answers.mask[i : i + part], objective.reduction,
          max_tokens=objective.max_tokens,
      )
      for i in range(0, 8, part)
  ]
  total = jax.tree.map(lambda *x: sum(x), *totals)
  np.testing.assert_allclose(total.mean(), value, rtol=1e-12)


@every_objective
def test_groups_may_be_stacked(x64, name):
  objective = OBJECTIVES[name]
  log_probs_GT, answers = batch(objective)
  stacked = jax.tree.map(
      lambda x: x.reshape(2, 4, *x.shape[1:]), (log_probs_GT, answers)
  )
  np.testing.assert_allclose(
      objective(*stacked), objective(log_probs_GT, answers), rtol=1e-12
  )
  log_probs, answers = stacked
  again = objective.answers(
      answers.mask, answers.advantages, old_log_probs=answers.old_log_probs,
      reference_log_probs=answers.reference_log_probs,
  )
  np.testing.assert_allclose(again.weights, answers.weights, rtol=1e-12)


@every_objective
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_masked_tokens_are_not_read(x64, name, dtype):
  """Overflow, infinities and NaN outside the mask change nothing."""
  objective = OBJECTIVES[name]
  log_probs_GT, answers = jax.tree.map(
      lambda x: x.astype(dtype) if x.dtype != bool else x, batch(objective)
  )
  wanted = jax.value_and_grad(objective)(log_probs_GT, answers)
  for mine, others in ((2000.0, -2000.0), (-jnp.inf, -jnp.inf), (0.0, jnp.nan)):
    def spoiled(x, bad, mask=answers.mask):
      return None if x is None else jnp.where(mask, x, bad)

    changed = dataclasses.replace(
        answers,
        old_log_probs=spoiled(answers.old_log_probs, others),
        reference_log_probs=spoiled(answers.reference_log_probs, others),
    )
    if objective.ratio != "sequence":
      of_GT = jnp.broadcast_to(answers.advantages[:, None], (8, 6))
      changed = dataclasses.replace(changed, advantages=spoiled(of_GT, others))
    got = jax.value_and_grad(objective)(spoiled(log_probs_GT, mine), changed)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@every_objective
def test_nothing_to_train_is_zero_and_finite(name):
  objective = OBJECTIVES[name]
  log_probs_GT, answers = batch(objective)
  for tokens in (6, 0):
    part = jax.tree.map(
        lambda x, tokens=tokens: x[:, :tokens] if x.ndim > 1 else x,
        (log_probs_GT, answers),
    )
    nothing = objective.answers(
        jnp.zeros((8, tokens), bool), answers.advantages,
        old_log_probs=part[1].old_log_probs,
        reference_log_probs=part[1].reference_log_probs,
    )
    value, gradient_GT = jax.value_and_grad(objective)(part[0], nothing)
    assert value == 0 and gradient_GT.shape == (8, tokens)
    np.testing.assert_array_equal(gradient_GT, 0)


@every_objective
def test_every_constant_changes_the_value(x64, name):
  objective = OBJECTIVES[name]
  log_probs_GT, answers = batch(objective, branches=16)
  # Ratios beyond every bound, of whole answers too.
  spread_GT = log_probs_GT + jnp.linspace(-2, 2, 16)[::-1, None]
  value = objective(spread_GT, answers)
  others = dict(none="token", token="sequence", sequence="token")
  changes = [dict(reduction="constant", max_tokens=5)]
  if objective.ratio != "none":
    changes += [
        dict(clip_low=0.4), dict(clip_high=0.5), dict(dual_clip=1.05),
        dict(ratio=others[objective.ratio]),
    ]
  if objective.kl_coefficient:
    changes += [
        dict(kl_coefficient=0.3), dict(kl_estimator="k1"),
        dict(kl_estimator="k2"),
    ]
  if objective.max_tokens:
    changes += [dict(max_tokens=10)]
  for change in changes:
    other = dataclasses.replace(objective, **change)
    weights_GT = reductions.token_weights(
        answers.mask, other.reduction, max_tokens=other.max_tokens
    )
    changed = other(
        spread_GT, dataclasses.replace(answers, weights=weights_GT)
    )
    assert not np.isclose(changed, value, rtol=1e-6), change


@every_objective
def test_answers_are_constants(x64, name):
  """On policy: the loss's own log-probs may be handed in as the old ones."""
  objective = OBJECTIVES[name]
  log_probs_GT, answers = batch(objective)

  def own(log_probs_GT):
    tied = dataclasses.replace(
        answers, old_log_probs=log_probs_GT, reference_log_probs=log_probs_GT,
        advantages=answers.advantages + jnp.sum(log_probs_GT)
        - jax.lax.stop_gradient(jnp.sum(log_probs_GT)),
    )
    return objective(log_probs_GT, tied)

  gradient_GT = jax.grad(own)(log_probs_GT)
  right_GT = -answers.weights * answers.advantages[:, None]
  np.testing.assert_allclose(gradient_GT, right_GT, rtol=1e-12)


def test_overflow_where_it_is_clipped_is_not_nan():
  objective = objectives.dapo()
  far_GT = jnp.array([[300.0, -300.0], [-300.0, 0.0], [500.0, 500.0]])
  answers = objective.answers(
      jnp.ones((3, 2), bool), jnp.array([1.0, -1.0, 0.0]),
      old_log_probs=jnp.zeros((3, 2)),
  )
  value, gradient_GT = jax.value_and_grad(objective)(far_GT, answers)
  np.testing.assert_allclose(value, (-1.28 - 0 + 0.8 + 1) / 6, rtol=1e-6)
  np.testing.assert_allclose(gradient_GT, [[0, 0], [0, 1 / 6], [0, 0]])


def test_tokens_may_have_advantages_of_their_own(x64):
  objective = objectives.ppo()
  _, answers = batch(objective)
  log_probs_GT = answers.old_log_probs
  wide_GT = jnp.broadcast_to(answers.advantages[:, None], (8, 6))
  wide = dataclasses.replace(answers, advantages=wide_GT)
  assert objective(log_probs_GT, wide) == objective(log_probs_GT, answers)
  one = dataclasses.replace(answers, advantages=wide_GT.at[5, 3].add(1.0))
  moved_GT = jax.grad(objective)(log_probs_GT, one) != jax.grad(objective)(
      log_probs_GT, answers
  )
  assert np.argwhere(moved_GT).tolist() == [[5, 3]]


def test_a_linear_loss_carries_the_gradient_of_another(x64):
  objective = OBJECTIVES["grpo"]
  log_probs_GT, answers = batch(objective)
  wanted_GT = jax.grad(objective)(log_probs_GT, answers)
  np.testing.assert_array_equal(
      jax.grad(objectives.linear)(log_probs_GT, wanted_GT), wanted_GT
  )


def test_objectives_with_the_same_constants_are_one():
  assert objectives.grpo() == objectives.grpo()
  assert hash(objectives.grpo()) == hash(objectives.grpo())
  assert objectives.grpo() != objectives.grpo(clip=0.1)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(ratio="branch"), "ratio 'branch'.*none, token, sequence"),
        (dict(reduction="mean"), "reduction 'mean'.*token_mean, sequence_mean"),
        (dict(reduction="constant"), "max_tokens=None.*'constant'"),
        (dict(max_tokens=4), "max_tokens=4 with reduction='sequence_mean'"),
        (dict(reduction="constant", max_tokens=0), "at least 1, not 0"),
        (dict(clip_low=1.0), r"clip_low must lie in \[0, 1\), not 1.0"),
        (dict(clip_high=-0.1), "clip_high must be ≥ 0, not -0.1"),
        (dict(dual_clip=1.0), "dual_clip must be > 1, or None, not 1.0"),
        (dict(kl_coefficient=-1), "kl_coefficient must be ≥ 0, not -1"),
        (dict(kl_estimator="k0"), "kl_estimator 'k0'.*k1, k2, k3"),
    ],
)
def test_bad_constants_are_errors(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(objectives.grpo(), **change)


def test_bad_answers_are_errors():
  mask_GT, advantages_G, some_GT = (
      jnp.ones((2, 3), bool), jnp.ones(2), jnp.zeros((2, 3))
  )
  grpo = objectives.grpo()
  of = dict(old_log_probs=some_GT, reference_log_probs=some_GT)
  with pytest.raises(ValueError, match="'token'.*0.04 needs old_log_probs"):
    grpo.answers(mask_GT, advantages_G, reference_log_probs=some_GT)
  with pytest.raises(ValueError, match="needs reference_log_probs"):
    grpo.answers(mask_GT, advantages_G, old_log_probs=some_GT)
  with pytest.raises(ValueError, match="has no use for reference_log_probs"):
    objectives.dapo().answers(mask_GT, advantages_G, **of)
  with pytest.raises(ValueError, match="has no use for old_log_probs"):
    objectives.reinforce().answers(mask_GT, advantages_G, old_log_probs=some_GT)
  with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
    grpo.answers(mask_GT, jnp.ones(3), **of)
  with pytest.raises(ValueError, match="mask of float32"):
    grpo.answers(some_GT, advantages_G, **of)
  with pytest.raises(ValueError, match=r"old_log_probs has shape \(2, 4\)"):
    grpo.answers(
        mask_GT, advantages_G, **of | dict(old_log_probs=jnp.zeros((2, 4)))
    )
  with pytest.raises(ValueError, match="'sequence' takes one advantage"):
    objectives.gspo().answers(mask_GT, some_GT, old_log_probs=some_GT)
  with pytest.raises(ValueError, match="clip must be > 0"):
    surrogates.value_loss(some_GT, some_GT, some_GT, mask_GT, clip=0.0)
