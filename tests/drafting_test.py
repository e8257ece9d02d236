# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafting beside training: lessons, buffer, watch, and runs with and without.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout.drafters import Learned
from branch_replay.rollout.drafters import files
from branch_replay.training import experience
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training.drafting import buffer as buffer_lib
from branch_replay.training.drafting import lessons as lessons_lib
from branch_replay.training.drafting import speculator as speculator_lib
from branch_replay.training.drafting import trainer as trainer_lib
from branch_replay.training.drafting import watch as watch_lib
from tests import tiny
from tests import training_test

CONFIG = dataclasses.replace(tiny.BASE, num_layers=1)


def lesson(lengths, step: int = 0) -> lessons_lib.Lesson:
  """Answers whose tokens and hidden states name answer and place."""
  lengths = np.asarray(lengths)
  tokens = 10 * np.arange(1, lengths.size + 1)[:, None] + np.arange(8)[None]
  hidden = np.stack([tokens, -tokens], axis=-1).astype(float)
  return lessons_lib.Lesson(step, tokens, lengths, hidden, None)


# Lessons.


def test_answers_are_packed_longest_first_into_the_fullest_row_with_room():
  packed = lessons_lib.pack(lesson([3, 1, 6, 4, 7, 2]), rows=2, width=8)
  assert packed.tokens_NT.tolist() == [
      [50, 51, 52, 53, 54, 55, 56, 0],
      [30, 31, 32, 33, 34, 35, 60, 61],
  ]
  assert packed.segments_NT.tolist() == [
      [1, 1, 1, 1, 1, 1, 1, 0], [2, 2, 2, 2, 2, 2, 5, 5],
  ]
  np.testing.assert_array_equal(packed.hidden_NTM[..., 0], packed.tokens_NT)


def test_of_two_rows_with_room_the_fuller_one_is_taken():
  packed = lessons_lib.pack(lesson([6, 3, 2]), rows=2, width=8)
  assert packed.segments_NT.tolist() == [
      [1, 1, 1, 1, 1, 1, 3, 3], [2, 2, 2, 0, 0, 0, 0, 0],
  ]


def test_of_an_answer_that_is_longer_than_a_row_the_end_is_left_out():
  packed = lessons_lib.pack(lesson([7]), rows=1, width=4)
  assert packed.tokens_NT.tolist() == [[10, 11, 12, 13]]


@pytest.fixture(scope="module")
def sampled():
  """A decoder, its parameters, and experiences that hold their states."""
  decoder, params = tiny.model(CONFIG)
  task = training_test.task_of()
  rollouts = experience.Rollouts(4, 12)
  return decoder, params, [
      experience.collect(
          decoder, params, task, row, rollouts, key=jax.random.key(number),
          version=0,
      )
      for number, row in enumerate(task.split("train")[:3])
  ]


@pytest.mark.exhaustive
def test_a_lesson_holds_what_the_tokens_were_drawn_from(sampled):
  """Its hidden states, through the head, give the sampler's log-probs."""
  decoder, params, (one, *_) = sampled
  made = lessons_lib.of_answers(
      decoder, params, one.group, one.state, step=3, version=0
  )
  assert made.step == 3 and made.count == int(made.lengths.sum())
  assert [x.shape[0] for x in made.prompt.mixer] == [1, 1]
  logits = made.hidden @ np.asarray(params["head"]["table"]).T
  log_probs = np.take_along_axis(
      np.asarray(jax.nn.log_softmax(logits)), made.tokens[..., None], -1
  )[..., 0]
  mask = np.arange(made.tokens.shape[1])[None] < made.lengths[:, None]
  np.testing.assert_allclose(
      log_probs[mask], one.log_probs[:, : mask.shape[1]][mask], atol=1e-5
  )


# Buffer.


def test_the_buffer_forgets_old_steps_and_of_one_step_short_answers_first():
  buffer = buffer_lib.Buffer(most_tokens=14)
  buffer = buffer_lib.add(buffer, [lesson([5]), lesson([2]), lesson([3])])
  buffer = buffer_lib.add(buffer, [lesson([4], 1), lesson([2], 1)])
  assert [one.count for one in buffer.lessons] == [3, 5, 2, 4]
  # The newest step stays whole, though it alone is more than there is room for.
  buffer = buffer_lib.add(buffer, [lesson([8, 8], 2), lesson([1], 2)])
  assert [one.step for one in buffer.lessons] == [2, 2]


def test_lessons_are_drawn_by_their_tokens_and_the_newest_step_more_often():
  rng = np.random.default_rng(0)
  old, short, long = lesson([4, 4]), lesson([2], 1), lesson([6], 1)
  buffer = buffer_lib.add(
      buffer_lib.Buffer(100, fresh=0.5), [old, short, long]
  )
  counts = np.zeros(3)
  for _ in range(4000):
    drawn = buffer_lib.draw(buffer, rng)
    counts[[drawn is one for one in (old, short, long)]] += 1
  wanted = [8 / 32, 2 / 32 + 2 / 16, 6 / 32 + 6 / 16]
  np.testing.assert_allclose(counts / 4000, wanted, atol=0.03)


def test_an_empty_buffer_and_bad_settings_are_refused():
  with pytest.raises(ValueError, match="empty"):
    buffer_lib.draw(buffer_lib.Buffer(10), np.random.default_rng(0))
  with pytest.raises(ValueError, match="fresh=2"):
    buffer_lib.Buffer(10, fresh=2)
  with pytest.raises(ValueError, match="width=1"):
    trainer_lib.Trainer(tiny.model(CONFIG)[0], optax.sgd(1.0), 1, 1)
  with pytest.raises(ValueError, match="patience=0"):
    watch_lib.Watch(patience=0)


# Watch.


def test_the_alarm_is_raised_once_acceptance_has_collapsed_for_long_enough():
  watch = watch_lib.Watch(floor=0.5, patience=2, rest=3)
  alarms = []
  for step, accepted in enumerate((60, 80, 39, 41, 39, 39)):
    watch, alarm = watch_lib.observe(watch, step, 100, accepted)
    alarms.append(alarm)
  assert alarms == [False] * 5 + [True]
  assert [watch.is_off(step) for step in (6, 8, 9)] == [True, True, False]
  # What was the best before does not count any more.
  watch, alarm = watch_lib.observe(watch, 9, 100, 10)
  assert not alarm and watch.best == 0.1


def test_drafts_that_are_never_accepted_raise_it_and_no_drafts_do_not():
  watch = watch_lib.Watch(patience=2)
  watch, alarm = watch_lib.observe(watch, 0, 100, 0)
  assert not alarm
  assert watch_lib.observe(watch, 1, 0, 0) == (watch, False)
  assert watch_lib.observe(watch, 1, 100, 0)[1]


# Training the drafter.


def test_training_makes_more_of_its_drafts_accepted(sampled):
  decoder, params, batch = sampled
  made = [
      lessons_lib.of_answers(
          decoder, params, one.group, one.state, step=0, version=0
      )
      for one in batch
  ]
  drafter = Learned.create(decoder, params, range(64), jax.random.key(0))
  trainer = trainer_lib.Trainer(decoder, optax.adam(1e-2), 3, 16)
  trained, losses = trainer.create(drafter), []
  for number in range(60):
    trained, loss = trainer.update(
        trained, drafter.vocabulary, params, made[number % 3]
    )
    losses.append(float(loss))
  assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3
  assert int(trained.version) == 60

  def accepted(drafter):
    rollout = br.sample(
        decoder, params, np.asarray(batch[0].group.prompt)[:13],
        key=jax.random.key(0), branches=4, max_tokens=12, compact=False,
        stop_ids=training_test.task_of().stop_ids, drafter=drafter,
        draft_length=2,
    )
    return int(rollout.accepted.sum()) / int(rollout.drafted.sum())

  after = dataclasses.replace(drafter, params=trained.params)
  assert accepted(after) > accepted(drafter) + 0.1


def test_a_drafter_is_read_as_it_was_written(tmp_path):
  decoder, params = tiny.model(CONFIG)
  drafter = Learned.create(decoder, params, range(3, 9), jax.random.key(0))
  files.save(tmp_path, drafter)
  again = files.load(tmp_path, decoder, params)
  jax.tree.map(np.testing.assert_array_equal, again, drafter)


def test_what_is_no_drafter_of_this_model_is_refused(tmp_path):
  decoder, params = tiny.model(CONFIG)
  with pytest.raises(ValueError, match="No drafter in"):
    files.load(tmp_path, decoder, params)
  files.save(
      tmp_path, Learned.create(decoder, params, range(9), jax.random.key(0))
  )
  (tmp_path / "drafter.safetensors").write_bytes(b"cut")
  with pytest.raises(ValueError, match="No drafter in"):
    files.load(tmp_path, decoder, params)
  other, others = tiny.model(br.ModelConfig(64, 16, 1, 1, 1, 8, 8, 64))
  files.save(
      tmp_path, Learned.create(other, others, range(9), jax.random.key(0))
  )
  with pytest.raises(ValueError, match="another geometry: layer"):
    files.load(tmp_path, decoder, params)


# Beside a run.


def speculator(model, kind, **changes):
  studies = None
  if kind == "learned":
    studies = speculator_lib.Studies(
        optax.adam(1e-2), 48, updates=2, rows=2, width=8,
        **changes.pop("studies", {}),
    )
  tuner = tuner_lib.Tuner((0, 2), epsilon=0.5)
  return speculator_lib.Speculator(
      model, kind, studies=studies, tuner=tuner, **changes
  )


def run_of(model, kind=None, steps=4, **changes) -> loop.TrainingRun:
  """A run of reinforcement alone."""
  made = None if kind is None else speculator(model, kind, **changes)
  whole = training_test.run_of(model, steps=steps, speculator=made)
  return dataclasses.replace(whole, phases=whole.phases[1:])


@functools.cache
def small():
  return tiny.model(CONFIG)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ("ngram", "learned"))
def test_a_run_with_drafts_has_the_rewards_of_one_without(kind, tmp_path, x64):
  model, params = tiny.model(tiny.in_float64(CONFIG))
  trained = [
      loop.train(run_of(model, kind), params, tmp_path / str(kind))
      for kind in (None, kind)
  ]
  plain, drafted = (metrics.read(tmp_path / str(k)) for k in (None, kind))
  assert len(plain) == len(drafted) == 5
  for name in ("reward/mean", "answer_length", "eval/reward"):
    assert [row.get(name) for row in plain] == [
        row.get(name) for row in drafted
    ], name
  assert tiny.worst(*trained) <= 1e-9
  assert any(row.get("draft/length", 0) > 0 for row in drafted)
  assert all(row["draft/accept_length"] >= 1 for row in drafted[1:])
  if kind == "learned":
    assert [row["draft/version"] for row in drafted[1:]] == [2, 4, 6, 8]
  lines = (tmp_path / kind / "drafter/rl" / speculator_lib.DECISIONS)
  decisions = [json.loads(line) for line in lines.read_text().splitlines()]
  assert {one["draft_length"] for one in decisions} == {0, 2}


@pytest.mark.exhaustive
def test_a_run_that_goes_on_has_its_drafter_again(tmp_path):
  model, params = small()
  before, after = (run_of(model, "learned", steps=n) for n in (2, 3))
  loop.train(before, params, tmp_path)
  saved = before.phases[0].speculator.drafter
  rows = []
  study = speculator_lib.Speculator.study

  class Seen(speculator_lib.Speculator):

    def study(self, *args, **options):
      rows.append(jax.tree.map(jnp.copy, self.drafter))
      return study(self, *args, **options)

  after.phases[0].speculator.__class__ = Seen
  loop.train(after, params, tmp_path)
  assert len(rows) == 1  # of step 3 alone
  jax.tree.map(np.testing.assert_array_equal, rows[0], saved)
  assert metrics.read(tmp_path)[-1]["draft/version"] == 6


def test_a_saved_drafter_that_cannot_be_read_is_moved_aside(tmp_path):
  model, params = small()
  one = speculator(model, "learned")
  folder = tmp_path / "versions"
  (folder / "5").mkdir(parents=True)
  (tmp_path / speculator_lib.DECISIONS).write_text('{"draft_length": 2}\n{"dr')
  with pytest.warns(UserWarning, match="versions/5: it is empty"):
    with one.at(tmp_path, params):
      assert one.drafter is None
  assert not (folder / "5").exists()
  text = (tmp_path / speculator_lib.DECISIONS).read_text()
  assert text == '{"draft_length": 2}\n'


@pytest.mark.exhaustive
def test_a_frozen_drafter_stays_as_it_is(tmp_path):
  model, params = small()
  run = run_of(model, "learned", steps=3, studies={"until": 1})
  loop.train(run, params, tmp_path)
  rows = metrics.read(tmp_path)[1:]
  assert [row["draft/version"] for row in rows] == [2, 2, 2]


@pytest.mark.exhaustive
def test_after_an_alarm_nothing_is_drafted(tmp_path):
  """An impossible threshold: every step is bad."""
  model, params = small()
  watch = watch_lib.Watch(1.0, patience=1, rest=9, best=1.1)
  run = run_of(model, "ngram", steps=3, watch=watch)
  loop.train(run, params, tmp_path)
  rows = metrics.read(tmp_path)[1:]
  alarms = [row["draft/alarm"] for row in rows]
  assert sum(alarms) == 1
  at = alarms.index(1)
  assert rows[at]["draft/length"] > 0
  assert all(row["draft/length"] == 0 for row in rows[at + 1 :])


def test_what_does_not_go_together_is_refused():
  model, _ = small()
  with pytest.raises(ValueError, match="'eagle'.*ngram, learned"):
    speculator(model, "eagle")
  with pytest.raises(ValueError, match="studies belong"):
    speculator_lib.Speculator(model, "learned")
  with pytest.raises(ValueError, match="vocabulary=65 ids of 64"):
    speculator_lib.Speculator(
        model, "learned",
        studies=speculator_lib.Studies(optax.sgd(1.0), vocabulary=65),
    )
  with pytest.raises(ValueError, match="hold='state'"):
    training_test.reinforce(
        model, speculator=speculator(model, "learned"),
        rollouts=experience.Rollouts(4, 5, hold="nothing"),
    )
