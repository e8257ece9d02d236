# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole steps of training against the same steps replayed by hand.

Keys, tokens, rewards, which prompts are kept, advantages, epochs and updates:
nothing is taken over from the package but the model.
"""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay import tasks
from branch_replay.rl import objectives
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training import optimizers
from branch_replay.training import phases
from branch_replay.training import step as step_lib
from tests import by_hand
from tests import tiny

MOST = 5  # T, the most tokens of an answer
BRANCHES = 4
STOPS = tuple(range(0, 64, 5))
RATES = [2e-3, 1e-3, 3e-3, 2.5e-3, 5e-4, 1.5e-3, 1e-3, 2e-3]
CLIP = 0.3  # the greatest norm of a gradient
TOLERANCE = 1e-9  # of the distance that a parameter is moved
# What keys are folded with.
SAMPLING, CHUNKS, EVALUATION = 2**31, 2**31 + 1, 2**31 + 2


def rows_of() -> list[tasks.Example]:
  random = np.random.default_rng(2)
  return [
      tasks.Example(
          f"row-{n}", random.integers(0, 64, 11 + n % 3).astype(np.int32),
          np.array([3, 9, 4][: 1 + n % 3] + [5], np.int32), "", {},
      )
      for n in range(5)
  ]


ROWS = rows_of()
DEAD = "row-3"  # whatever is answered


def score(example, ids) -> float:
  """Multiples of 1/4, whose sums are exact in any dtype."""
  if example.id == DEAD or len(ids) == MOST:  # cut off
    return 0.0
  return 0.25 + (sum(ids) % 7) / 4


TASK = task_lib.Task("toy", 64, STOPS, score, {
    "train": ROWS, "validation": ROWS[1:4],
})


def order(position: int):
  """The examples from a position on: every epoch is an order of its own."""
  while True:
    epoch, at = divmod(position, len(ROWS))
    words = np.random.Philox(np.random.SeedSequence([SEED, epoch]))
    yield ROWS[np.argsort(words.random_raw(len(ROWS)), kind="stable")[at]]
    position += 1


SEED = 4


def answers_of(model, params, example, key):
  """Sampled and scored by hand; an answer that does not stop earns 0."""
  tails, log_probs = by_hand.sample(
      model, params, example.prompt_ids, key, branches=BRANCHES, most=MOST,
      stop_ids=STOPS,
  )
  rewards = [
      score(example, tail[:-1]) if tail[-1] in STOPS else 0.0
      for tail in tails
  ]
  one = by_hand.Answers(example.prompt_ids, tails, np.array(rewards))
  padded = [row + [0.0] * (MOST - len(row)) for row in log_probs]
  return one, np.array(padded)


def optimizer():
  return optimizers.adamw(
      lambda update: jnp.asarray(RATES)[update], b1=0.9, b2=0.99,
      weight_decay=0.0, clip_norm=CLIP,
  )


def start(params):
  return (
      step_lib.create(jax.tree.map(jnp.copy, params), optimizer()),
      by_hand.AdamW(params, RATES, clip=CLIP),
  )


def test_two_steps_of_reinforcement_are_those_replayed_by_hand(
    x64, monkeypatch
):
  model, params, reference = by_hand.model_in_float64()
  loss = dataclasses.replace(
      objectives.grpo(kl_coefficient=0.2), clip_low=0.1, clip_high=0.15,
      dual_clip=1.5,
  )
  phase = phases.Reinforce(
      "rl", TASK,
      learner_lib.Learner(
          model, algorithms.PolicyGradient(loss, "group_centred"), optimizer()
      ),
      experience.Rollouts(BRANCHES, MOST), steps=2, prompts=2, epochs=2,
      updates=2, capture_every=1, most_prompts=3, seed=SEED,
      learning_rate=lambda update: jnp.asarray(RATES)[update],
  )
  seen, collect = [], experience.collect

  def spy(*args, **options):
    seen.append(collect(*args, **options))
    return seen[-1]

  monkeypatch.setattr(experience, "collect", spy)
  keys, plain = [], learner_lib.Learner.update

  def keyed(self, *args, key, **options):
    keys.append(jax.random.key_data(key).tolist())
    return plain(self, *args, key=key, **options)

  monkeypatch.setattr(learner_lib.Learner, "update", keyed)
  train_state, hand = start(params)
  position = 0
  for step in range(2):
    key, begun = jax.random.key(10 + step), hand.count
    outcome = phase.step(train_state, reference, position, key)
    train_state = outcome.train_state

    drawn, batch, old = [], [], []
    for number, example in enumerate(order(position)):
      one, log_probs = answers_of(
          model, hand.tree, example,
          jax.random.fold_in(jax.random.fold_in(key, SAMPLING), number),
      )
      drawn.append((one, log_probs))
      may_skip = 3 - len(drawn) >= 2 - len(batch)
      if np.ptp(one.rewards) > 0 or not may_skip:
        batch.append(one)
        old.append(log_probs)
      if len(batch) == 2:
        break
    position += len(drawn)
    assert outcome.position == position
    for one, (wanted, log_probs) in zip(seen, drawn, strict=True):
      tails = [
          row[:length].tolist() for row, length in
          zip(one.group.tails, one.group.tail_lengths, strict=True)
      ]
      assert tails == wanted.tails
      np.testing.assert_array_equal(one.rewards, wanted.rewards)
      np.testing.assert_allclose(
          one.log_probs[:, :MOST], log_probs, atol=1e-12
      )
    of_updates = jax.random.fold_in(key, CHUNKS)
    assert keys[4 * step :] == [
        jax.random.key_data(jax.random.fold_in(of_updates, update)).tolist()
        for update in range(4)
    ]
    seen.clear()

    fixed, _ = by_hand.read(model, reference, batch, width=MOST)
    losses, norms = [], []
    for update in range(4):
      at = update % 2
      mine, mask = batch[at : at + 1], by_hand.mask_of(batch, MOST)[at]
      advantages = by_hand.group_centred(mine[0].rewards[None])[0]

      def whole(
          params, mine=mine, mask=mask, advantages=advantages, old=old[at],
          fixed=fixed[at],
      ):
        log_probs = by_hand.read(model, params, mine, width=MOST)[0][0]
        ratio = jnp.exp(jnp.where(mask, log_probs - old, 0))
        loss = by_hand.surrogate(
            ratio, advantages[:, None], low=0.1, high=0.15, dual=1.5
        )
        loss += 0.2 * by_hand.k3(log_probs, fixed)
        return by_hand.sequence_mean(loss, mask)

      value, grads = jax.value_and_grad(whole)(hand.tree)
      losses.append(float(value))
      norms.append(hand.update(grads))
    assert train_state.step == hand.count == 4 * step + 4
    by_hand.assert_moved_alike(train_state.params, hand, params, TOLERANCE)

    rewards = np.stack([one.rewards for one, _ in drawn])
    lengths = np.array([[len(t) for t in one.tails] for one, _ in drawn])
    stopped = [[t[-1] in STOPS for t in one.tails] for one, _ in drawn]
    for name, wanted in {
        "reward/mean": rewards.mean(),
        "reward/spread": rewards.std(1).mean(),
        "dead_groups": np.mean(np.ptp(rewards, axis=1) == 0),
        "answer_length": lengths.mean(), "answer_length_max": lengths.max(),
        "truncated": 1 - np.mean(stopped),
        "entropy": -sum(x.sum() for _, x in drawn) / lengths.sum(),
        "prompts_drawn": len(drawn), "tokens_sampled": lengths.sum(),
        "tokens_learnt": 2 * sum(len(t) for one in batch for t in one.tails),
        "loss": losses[0], "grad_norm": np.mean(norms),
        "learning_rate": RATES[begun],
    }.items():
      np.testing.assert_allclose(
          outcome.scalars[name], wanted, rtol=1e-6, err_msg=name
      )
  assert position > 4, "a dead group was drawn again"


@pytest.mark.exhaustive
def test_two_supervised_steps_are_those_replayed_by_hand(x64):
  model, params, _ = by_hand.model_in_float64()
  phase = phases.Supervised(
      "warmup", TASK,
      learner_lib.Learner(model, algorithms.MaximumLikelihood(), optimizer()),
      steps=2, prompts=3, max_tokens=6, seed=SEED,
      learning_rate=lambda update: jnp.asarray(RATES)[update],
  )
  train_state, hand = start(params)
  position = 0
  for step in range(2):
    outcome = phase.step(train_state, None, position, jax.random.key(step))
    train_state = outcome.train_state
    examples = order(position)
    batch = [
        by_hand.Answers(
            row.prompt_ids, [row.answer_ids.tolist()], np.ones(1)
        ) for row, _ in zip(examples, range(3), strict=False)
    ]
    position += 3

    def whole(params, batch=batch):
      log_probs, _ = by_hand.read(model, params, batch, width=6)
      return by_hand.token_mean(-log_probs, by_hand.mask_of(batch, 6))

    value, grads = jax.value_and_grad(whole)(hand.tree)
    norm = hand.update(grads)
    assert outcome.position == position
    for name, wanted in {
        "loss": value, "answer_loss": value, "grad_norm": norm,
        "learning_rate": RATES[step],
        "tokens_learnt": sum(len(one.tails[0]) for one in batch),
    }.items():
      np.testing.assert_allclose(
          outcome.scalars[name], wanted, rtol=1e-6, err_msg=name
      )
  by_hand.assert_moved_alike(train_state.params, hand, params, TOLERANCE)


def test_an_evaluation_is_the_mean_reward_of_answers_sampled_by_hand(x64):
  model, params, _ = by_hand.model_in_float64()
  found = phases.evaluate(
      model, params, TASK, experience.Rollouts(BRANCHES, MOST),
      split="validation", prompts=2, seed=9,
  )
  key = jax.random.fold_in(jax.random.key(9), EVALUATION)
  rewards = [
      answers_of(
          model, params, ROWS[1 + number], jax.random.fold_in(key, number)
      )[0].rewards for number in range(2)
  ]
  np.testing.assert_allclose(found, np.mean(rewards), rtol=1e-6)
  assert np.ptp(rewards) > 0


def test_the_width_of_a_batch_holds_its_longest_answer():
  """The bucket of 9 tokens is 16; no more than there is room for."""
  model, *_ = by_hand.model_in_float64()
  batch = [
      experience.given(model, dataclasses.replace(
          row, answer_ids=np.arange(1, 1 + length, dtype=np.int32)
      ), width=24)
      for row, length in zip(ROWS, (3, 9, 5), strict=False)
  ]
  assert experience.width(batch) == 16
  assert experience.width(batch[:1]) == 8
  trimmed = experience.trim(batch[1], 16)
  assert trimmed.group.tails.tolist() == [[*range(1, 10), *[0] * 7]]
  assert trimmed.log_probs.shape == (1, 16)
  narrow = experience.given(model, ROWS[0], width=3)
  assert experience.width([narrow]) == 3


def test_rows_behind_the_last_checkpoint_are_dropped(tmp_path):
  """A run that was killed has logged what it will do again."""
  with metrics.Log(tmp_path) as log:
    for step in range(5):
      log.write(step, "rl", {"loss": 1.0 * step})
  with metrics.Log(tmp_path, start=2) as log:
    assert [row["step"] for row in metrics.read(tmp_path)] == [0, 1, 2]
    log.write(3, "rl", {"loss": -3.0})
  rows = metrics.read(tmp_path)
  assert [row["loss"] for row in rows] == [0.0, 1.0, 2.0, -3.0]


def test_examples_come_in_an_order_of_their_own_every_epoch():
  """And go on from any position as if they had not been stopped."""
  wanted = [row.id for row, _ in zip(order(0), range(17), strict=False)]
  for first in (0, 1, 4, 5, 12):
    found = TASK.examples("train", seed=SEED, start=first)
    assert [next(found).id for _ in range(17 - first)] == wanted[first:]
  epochs = [wanted[:5], wanted[5:10], wanted[10:15]]
  assert all(sorted(epoch) == sorted(wanted[:5]) for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_run_has_the_keys_and_places_of_its_steps(
    tmp_path, monkeypatch, stopped
):
  """What every step of a run is given, by a phase that only writes it down."""
  model, params = tiny.model(tiny.BASE)
  calls = []

  def step(self, train_state, reference, position, key):
    calls.append((self.name, position, jax.random.key_data(key).tolist()))
    if len(calls) == stopped:
      signal.raise_signal(signal.SIGTERM)
    train_state = train_state._replace(step=train_state.step + 1)
    return phases.StepOutcome(
        train_state, position + self.prompts, {"loss": 0.0}
    )

  monkeypatch.setattr(phases.Supervised, "step", step)
  monkeypatch.setattr(phases, "evaluate", lambda *_, **__: 0.5)
  learner = learner_lib.Learner(
      model, algorithms.MaximumLikelihood(), optimizer()
  )
  run = loop.TrainingRun(
      model, tuple(
          phases.Supervised(
              name, TASK, learner, steps=2, prompts=prompts, max_tokens=6,
              seed=SEED, learning_rate=lambda _: 1e-3,
          ) for name, prompts in (("first", 2), ("second", 3))
      ),
      loop.HeldOutEvaluation(
          TASK, experience.Rollouts(2, 3), "validation", 2, every=3
      ),
      seed=6, checkpoint_every=9,
  )
  loop.train(run, params, tmp_path)
  if stopped:
    assert len(calls) == stopped
    loop.train(run, params, tmp_path)
  wanted = [("first", 0), ("first", 2), ("second", 0), ("second", 3)]
  assert calls == [
      (name, position, jax.random.key_data(
          jax.random.fold_in(jax.random.key(6), number)
      ).tolist())
      for number, (name, position) in enumerate(wanted)
  ]
  rows = metrics.read(tmp_path)
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  evaluated = [row["step"] for row in rows if "eval/reward" in row]
  assert evaluated == [0, 2, 3, 4], "ends of phases, and every third step"
