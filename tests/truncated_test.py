# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers that were cut off: what they are worth, and what is warned of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.tasks import task as task_lib
from branch_replay.training import alarms
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import loop
from branch_replay.training import phases
from tests import tiny
from tests import training_test

CONFIG = dataclasses.replace(tiny.BASE, num_layers=1)


@pytest.fixture(scope="module")
def small():
  return tiny.model(CONFIG)


def asked(score, stop_ids=(1,)) -> task_lib.Task:
  """Prompts without known answers."""
  rows = [
      task_lib.Example(f"row-{i}", np.array([5, 6, 7 + i], np.int32))
      for i in range(4)
  ]
  return task_lib.Task(
      "asked", CONFIG.vocab_size, stop_ids, score,
      {"train": rows, "validation": rows},
  )


@pytest.mark.parametrize("truncated, cut_off", [
    ("score", 0.75), ("zero", 0.0), ("leave_out", 0.0),
])
def test_the_setting_says_what_an_answer_that_is_cut_off_earns(
    small, truncated, cut_off
):
  """Half of all ids stop an answer: of three tokens some are cut off."""
  seen = []

  def score(_, ids):
    seen.append(len(ids))
    return len(ids) / 4

  task = asked(score, tuple(range(32)))
  rollouts = experience.Rollouts(4, 3, truncated=truncated, hold="nothing")
  finished, rewards, lengths = [], [], []
  for number in range(3):
    one = experience.collect(
        *small, task, task.split("train")[number], rollouts,
        key=jax.random.key(number), version=0,
    )
    finished += one.finished.tolist()
    rewards += one.rewards.tolist()
    lengths += np.asarray(one.group.tail_lengths).tolist()
    expected = one.finished if truncated == "leave_out" else np.ones(4, bool)
    np.testing.assert_array_equal(one.counted, expected)
    left = np.where(one.counted, one.group.tail_lengths, 0)
    np.testing.assert_array_equal(
        experience.learnt(one).group.tail_lengths, left
    )
  assert any(finished) and not all(finished)
  for end, reward, length in zip(finished, rewards, lengths, strict=True):
    assert reward == ((length - 1) / 4 if end else cut_off)
  assert len(seen) == (12 if truncated == "score" else sum(finished))


def batch_of(lengths_NG, counts_NG, rewards_NG, width=6):
  """Experiences of answers with these lengths; those that do not count out."""
  rng = np.random.default_rng(0)
  made = []
  for lengths, counts, rewards in zip(
      lengths_NG, counts_NG, rewards_NG, strict=True
  ):
    group = br.Group.create(
        [5, 6, 7], [rng.integers(0, 64, n) for n in lengths], config=CONFIG
    )
    one = experience.Experience(
        "row", group, np.zeros(group.tails.shape, np.float32),
        np.array(rewards, np.float32), np.array(counts), None,
        np.array(counts),
    )
    made.append(experience.trim(experience.learnt(one), width))
  return made


REINFORCE = algorithms.PolicyGradient(
    dataclasses.replace(objectives.reinforce(), reduction="token_mean")
)


def test_what_is_left_out_has_no_weight_and_is_no_ones_baseline():
  """One answer of 2 tokens that counts, and one of 6 that does not."""
  batch = batch_of([[2, 6]], [[True, False]], [[1, 0]])
  (_, (answers,)) = REINFORCE.prepare(batch, algorithms.Known())
  assert jnp.sum(answers.weights * jnp.ones((1, 2, 6))) == 1.0  # not 0.25
  np.testing.assert_array_equal(
      answers.weights, [[[0.5] * 2 + [0] * 4, [0] * 6]]
  )
  assert not answers.advantages.any()  # of a group of one
  # Of the rewards 1, 0 and 0.5 the last is not compared with.
  batch = batch_of(
      [[2, 3, 6]], [[True, True, False]], [[1, 0, 0.5]]
  )
  for advantage, expected in (
      ("group_centred", [0.5, -0.5, 0]), ("leave_one_out", [1, -1, 0]),
      ("group_relative", [0.5**0.5, -(0.5**0.5), 0]),
  ):
    algorithm = dataclasses.replace(REINFORCE, advantage=advantage)
    (_, (answers,)) = algorithm.prepare(batch, algorithms.Known())
    np.testing.assert_allclose(answers.advantages, [expected], atol=1e-5)


def test_pairs_are_made_of_what_counts():
  rewards = np.array([0.5, 1.0, 0.0, 0.25, 2.0, -1.0])
  counts = np.array([True, True, True, True, False, False])
  rows, real = algorithms.pairs(rewards, counts)
  assert rows[:4].tolist() == [1, 2, 0, 3] and real.tolist() == [True] * 4 + (
      [False] * 2
  )
  assert sorted(rows) == list(range(6))
  # Of three the one in the middle has no partner.
  three = np.array([True, True, False, True])
  rows, real = algorithms.pairs(rewards[:4], three)
  assert rows[:2].tolist() == [1, 3] and real.tolist() == [True, True] + (
      [False] * 2
  )


@pytest.mark.parametrize("algorithm", [
    REINFORCE, algorithms.ProximalPolicy(objectives.ppo()),
    algorithms.Preference(preference.Dpo()),
], ids=["reinforce", "ppo", "dpo"])
def test_the_others_learn_as_if_it_had_never_been_sampled(algorithm):
  """Weights and advantages of the answers that count; 0 for the others."""
  whole = batch_of([[2, 3]], [[True, True]], [[1, 0]])
  more = batch_of(
      [[2, 3, 6, 5]], [[True, True, False, False]], [[1, 0, 0, 0]]
  )

  def weights(batch):
    outputs = references = None
    zeros = [jnp.zeros(one.group.tails.shape) for one in batch]
    if algorithm.needs_reference:
      references = zeros
    if algorithm.needs_outputs:
      outputs = [algorithms.actor_critic.Outputs(x, x + 0.5) for x in zeros]
    _, args = algorithm.prepare(batch, algorithms.Known(references, outputs))
    if isinstance(algorithm, algorithms.Preference):
      return (args[0].weights,)
    return args[0].weights, args[0].advantages

  for few, many in zip(weights(whole), weights(more), strict=True):
    np.testing.assert_allclose(many[:, :2], few, atol=1e-6)
    assert not many[:, 2:].any() and few.any()


def test_nothing_is_learnt_where_nothing_counts(small):
  """Gradients are there and 0, and so is the loss."""
  batch = batch_of([[6, 6]], [[False, False]], [[0, 0]])
  mine = training_test.learner(small[0], REINFORCE)
  batch, args = REINFORCE.prepare(batch, algorithms.Known())
  loss, outputs, grads = mine.batch_gradient(
      small[1], batch, args, version=0, key=jax.random.key(0)
  )
  assert loss == 0
  assert jax.tree.structure(grads) == jax.tree.structure(small[1])
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
  report = REINFORCE.report(outputs, algorithms.log_probs(batch), args)
  assert all(np.isfinite(value) for value in report.values())


@pytest.mark.parametrize("score, message", [
    (lambda *_: 1e39, "not finite"),  # of float32, that is learnt from
    (lambda *_: float("nan"), "is nan"),
])
def test_a_reward_that_is_no_finite_number_is_refused(small, score, message):
  task = asked(score)
  with pytest.raises(ValueError, match=message):
    experience.collect(
        *small, task, task.split("train")[0], experience.Rollouts(4, 3),
        key=jax.random.key(0), version=0,
    )


def test_settings_that_mean_nothing_are_refused():
  with pytest.raises(ValueError, match="truncated='drop'.*score, zero, leave"):
    experience.Rollouts(4, 5, truncated="drop")
  with pytest.raises(ValueError, match="held-out answers"):
    loop.HeldOutEvaluation(
        asked(lambda *_: 0), experience.Rollouts(1, 1, truncated="leave_out"),
        "validation", 1, 1,
    )


def test_a_supervised_phase_needs_answers_and_names_the_row(small):
  task = asked(lambda *_: 0)
  with pytest.raises(ValueError, match="'row-0' has no answer_ids"):
    phases.Supervised(
        "warmup", task, training_test.learner(
            small[0], algorithms.MaximumLikelihood()
        ), 1, 1, 5, 0, lambda _: 1.0,
    )
  with pytest.raises(ValueError, match="'row-2' has no answer_ids"):
    experience.given(small[0], task.split("train")[2], width=5)


def steps_of(rows, **options):
  """Steps whose observation gave a warning, and all warnings."""
  streaks, found, at = alarms.Streaks(), [], []
  for step, (dead, truncated) in enumerate(rows, 1):
    streaks, said = alarms.observe(
        streaks, {"dead_groups": dead, "truncated": truncated}, **options
    )
    found += said
    at += [step] * len(said)
  return at, found


def test_steps_without_anything_to_learn_from_are_warned_of():
  """After three in a row, and whenever that has doubled."""
  at, found = steps_of([(1, 0.5)] * 13, after=3)
  assert at == [3, 6, 12]
  assert found[0].startswith("3 steps in a row") and "50%" in found[0]
  assert steps_of([(1, 0), (1, 0), (0.9, 0)] * 4, after=3) == ([], [])
  assert steps_of([(1, 0)] * 9, after=0) == ([], [])
  assert steps_of([(1, 0)] * 9, after=3, compares=False) == ([], [])
  at, found = steps_of([(0, 1)] * 4 + [(0, 0.9)] + [(0, 1)] * 3, after=3)
  assert at == [3, 8] and "no answer stopped" in found[0]
  streaks = alarms.Streaks(2, 2, 1.0)
  assert alarms.observe(streaks, {"loss": 1.0}, after=3) == (streaks, [])


def test_a_run_that_learns_nothing_says_so(tmp_path, small, monkeypatch):
  monkeypatch.setattr(loop, "_evaluate", lambda *_: 0.0)

  class Idle(phases.Reinforce):

    def step(self, train_state, reference, position, key):
      scalars = {"dead_groups": 1.0, "truncated": 0.25}
      return phases.StepOutcome(train_state, position + 1, scalars)

  model, params = small
  phase = training_test.reinforce(model)
  fields = {x.name: getattr(phase, x.name) for x in dataclasses.fields(phase)}
  run = loop.TrainingRun(
      model, (Idle(**fields),), loop.HeldOutEvaluation(
          phase.task, experience.Rollouts(2, 3), "validation", 1, 9
      ), 0, 9, warn_after=3,
  )
  with pytest.warns(UserWarning, match="Step 3, 'rl': 3 steps in a .*25%"):
    loop.train(run, params, tmp_path)
