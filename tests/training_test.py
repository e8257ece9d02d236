# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop: updates, phases, resumption, and what it refuses."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay import tasks
from branch_replay.config import Adapter
from branch_replay.devices import sharding
from branch_replay.models import adapters
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.tasks import task as task_lib
from branch_replay.training import actor_critic
from branch_replay.training import algorithms
from branch_replay.training import checkpoints as checkpoints_lib
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training import phases
from branch_replay.training import step as step_lib
from experiments import staleness
from tests import tiny

GRPO = algorithms.PolicyGradient(objectives.grpo(kl_coefficient=0.0))
ROLLOUTS = experience.Rollouts(4, 5)
ADAM = optax.adam(3e-3)


def example(number: int, prompt: int = 13) -> tasks.Example:
  """Prompts of one length; the right answer is any that begins with 1 or 2."""
  ids = np.random.default_rng(number).integers(3, tiny.BASE.vocab_size, prompt)
  return tasks.Example(
      f"row-{number}", ids.astype(np.int32), np.array([1, 0], np.int32), "1",
      {},
  )


def task_of(score=None, rows: int = 6) -> tasks.Task:
  def by_length(_, ids):
    return len(ids) / 4

  examples = [example(number) for number in range(rows)]
  return task_lib.Task(
      "toy", tiny.BASE.vocab_size, (0, 5, 6, 7, 8, 9, 10, 11),
      score or by_length, {"train": examples, "validation": examples[:2]},
  )


def learner(model, algorithm=GRPO, mode="exact", **options):
  return learner_lib.Learner(model, algorithm, ADAM, mode, **options)


def reinforce(model, algorithm=GRPO, mode="exact", task=None, **changes):
  options = {
      name: changes.pop(name) for name in ("schedule",) if name in changes
  }
  settings = dict(
      name="rl", task=task or task_of(),
      learner=learner(model, algorithm, mode, **options), rollouts=ROLLOUTS,
      steps=3, prompts=2, epochs=1, updates=1, capture_every=1,
      most_prompts=None, seed=0, learning_rate=lambda _: 3e-3,
  )
  return phases.Reinforce(**settings | changes)


def run_of(model, *, steps=3, algorithm=GRPO, **changes) -> loop.TrainingRun:
  task = task_of()
  return loop.TrainingRun(
      model, (
          phases.Supervised(
              "warmup", task, learner(model, algorithms.MaximumLikelihood()), 2,
              2, 5, 0, lambda _: 3e-3,
          ),
          reinforce(model, algorithm, steps=steps, task=task, **changes),
      ),
      loop.HeldOutEvaluation(task, ROLLOUTS, "validation", 2, 2), 0, 1,
  )


def recorded(model, params, count: int, **options):
  """Batches of two experiences, all sampled by the same parameters."""
  task = task_of()
  found = [
      experience.collect(
          model, params, task, row, ROLLOUTS, key=jax.random.key(number),
          version=0, **options,
      )
      for number, row in zip(
          range(2 * count), itertools.cycle(task.split("train"))
      )
  ]
  bare = [dataclasses.replace(one, state=None) for one in found]
  return list(zip(bare[::2], bare[1::2], strict=True))


def replayed(model, params, batches, mode, algorithm=GRPO):
  """Parameters after one update a batch."""
  mine = learner(model, algorithm, mode)
  train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
  for number, batch in enumerate(batches):
    known = mine.know(params, batch, version=0, reference=params)
    train_state = mine.update(
        train_state, batch, known, version=number, key=jax.random.key(number)
    ).train_state
  return train_state.params


@pytest.fixture(scope="module")
def small():
  return tiny.model(tiny.BASE)


@pytest.mark.exhaustive
def test_exact_and_full_are_one_after_twenty_updates(x64):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  batches = recorded(model, params, 20)
  exact, full = (
      replayed(model, params, batches, mode) for mode in ("exact", "full")
  )
  assert tiny.worst(exact, full) <= 1e-9
  assert tiny.worst(exact, params) > 1e-3
  stop = replayed(model, params, batches, "stop")
  assert tiny.worst(stop, full) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("algorithm", [
    algorithms.ProximalPolicy(objectives.ppo()),
    algorithms.Preference(preference.Dpo()),
], ids=["ppo", "dpo"])
def test_ppo_and_dpo_are_what_they_are_on_whole_sequences(x64, algorithm):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  params = actor_critic.add_head(params, model.config)
  batches = recorded(model, params, 2)
  exact, full = (
      replayed(model, params, batches, mode, algorithm)
      for mode in ("exact", "full")
  )
  assert tiny.worst(exact, full) <= 1e-9
  assert tiny.worst(exact, params) > 1e-3


@pytest.mark.parametrize("hold", ["state", "activations"])
def test_what_is_held_changes_nothing_and_the_first_ratio_is_one(x64, hold):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))

  def first_step(hold):
    rollouts = dataclasses.replace(ROLLOUTS, hold=hold)
    train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
    return reinforce(model, rollouts=rollouts).step(
        train_state, None, 0, jax.random.key(7)
    )

  held, anew = first_step(hold), first_step("nothing")
  assert held.scalars["mismatch_max"] <= 1e-10
  np.testing.assert_allclose(held.scalars["ratio_max"], 1, atol=1e-10)
  assert held.scalars["clipped_low"] == held.scalars["clipped_high"] == 0
  assert held.scalars["grad_norm"] > 0
  assert held.position == 2
  assert tiny.worst(held.train_state.params, anew.train_state.params) <= 1e-9


@pytest.mark.exhaustive
def test_in_float32_the_sampler_agrees_with_the_trainer(small):
  model, params = small
  train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
  outcome = reinforce(model).step(train_state, None, 0, jax.random.key(7))
  scalars = outcome.scalars
  assert scalars["mismatch_max"] <= 1e-4
  assert abs(scalars["ratio_max"] - 1) <= 1e-5


@pytest.mark.exhaustive
def test_updates_of_one_batch_move_the_ratio_and_capture_anew(small):
  model, params = small

  def outcome(**changes):
    train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
    return reinforce(model, epochs=2, updates=2, **changes).step(
        train_state, None, 0, jax.random.key(7)
    )

  fresh, stale = outcome(), outcome(capture_every=4)
  assert fresh.train_state.step == 4
  assert abs(fresh.scalars["ratio_max"] - 1) > 1e-3
  # Replaying the first capture under later parameters is another gradient.
  assert tiny.worst(stale.train_state.params, fresh.train_state.params) > 1e-4
  once = outcome(capture_every=1)
  chex.assert_trees_all_equal(once.train_state.params, fresh.train_state.params)


def test_groups_without_a_preference_are_drawn_again(small):
  model, params = small
  order = task_of().examples("train", seed=0)
  first = [next(order).id for _ in range(6)]

  def outcome(dead, most):
    def score(row, ids):
      return 0.0 if row.id in dead else len(ids) / 4

    train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
    return reinforce(model, task=task_of(score), most_prompts=most).step(
        train_state, None, 0, jax.random.key(7)
    )

  as_they_come = outcome(first[:2], None)
  assert as_they_come.scalars["prompts_drawn"] == as_they_come.position == 2
  assert as_they_come.scalars["grad_norm"] == 0
  replaced = outcome(first[:2], 6)  # by the third and the fourth at least
  assert 4 <= replaced.scalars["prompts_drawn"] == replaced.position <= 6
  assert replaced.scalars["grad_norm"] > 0
  no_more = outcome(first, 3)
  assert no_more.scalars["prompts_drawn"] == no_more.position == 3
  assert no_more.scalars["dead_groups"] == 1
  assert no_more.scalars["grad_norm"] == 0


def test_drift_grows_from_nothing(x64):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  phase = reinforce(model, algorithms.PolicyGradient(objectives.reinforce()))
  rows = staleness.of_batch(phase, params, 0, (0, 1, 3))
  assert [row["updates"] for row in rows] == [0, 1, 3]
  assert rows[0]["log_prob_drift_max"] <= 1e-10
  assert rows[0]["gradient_relative_error"] <= 1e-9
  assert 1e-6 < rows[1]["log_prob_drift_mean"] < rows[2]["log_prob_drift_mean"]
  assert rows[2]["gradient_cosine"] < 1 - 1e-6


def test_pairs_are_best_against_worst():
  rows, real = algorithms.pairs(np.array([0.0, 1.0, 0.5, 0.5, 1.0, 0.0]))
  assert rows.tolist() == [1, 5, 4, 0, 2, 3]
  assert real.tolist() == [True, True, True, True, False, False]


@pytest.mark.exhaustive
def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path, small):
  model, params = small
  run = run_of(model)  # whose learners compile once
  straight = loop.train(run, params, tmp_path / "straight")
  # Stopped in the middle of a phase, and between the two.
  for at in (0, 1, 2, 4):
    folder = tmp_path / f"stopped{at}"
    with pytest.raises(RuntimeError, match="killed"):
      loop.train(killed_after(run, at), params, folder)
    resumed = loop.train(run, params, folder)
    chex.assert_trees_all_equal(resumed, straight)
    rows, wanted = metrics.read(folder), metrics.read(tmp_path / "straight")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for row, other in zip(rows, wanted, strict=True):
      assert untimed(row) == untimed(other)


@pytest.mark.exhaustive
def test_the_reference_policy_survives_a_restart(tmp_path, small):
  """Of each phase its own, also where a phase that is over is resumed."""
  model, params = small
  algorithm = algorithms.PolicyGradient(objectives.grpo(kl_coefficient=0.5))
  task = task_of()
  run = dataclasses.replace(
      run_of(model),
      phases=(
          reinforce(model, algorithm, task=task, steps=3, name="first"),
          reinforce(model, algorithm, task=task, steps=2, name="second"),
      ),
      checkpoint_every=2,
  )
  straight = loop.train(run, params, tmp_path / "straight")
  with pytest.raises(RuntimeError, match="killed"):
    loop.train(killed_after(run, 3), params, tmp_path / "stopped")
  resumed = loop.train(run, params, tmp_path / "stopped")
  chex.assert_trees_all_equal(resumed, straight)
  rows, wanted = (
      [row.get("kl_reference") for row in metrics.read(tmp_path / name)]
      for name in ("stopped", "straight")
  )
  assert rows == wanted and rows[3] > 0


@pytest.mark.exhaustive
def test_a_value_head_appears_with_the_phase_that_reads_it(tmp_path, small):
  model, params = small
  run = run_of(model, algorithm=algorithms.ProximalPolicy(objectives.ppo()))
  straight = loop.train(run, params, tmp_path / "straight")
  assert actor_critic.PATH not in straight
  for at in (2, 4):
    with pytest.raises(RuntimeError, match="killed"):
      loop.train(killed_after(run, at), params, tmp_path / f"stopped{at}")
    resumed = loop.train(run, params, tmp_path / f"stopped{at}")
    chex.assert_trees_all_equal(resumed, straight)
  assert metrics.read(tmp_path / "straight")[-1]["value_error"] >= 0


def killed_after(run: loop.TrainingRun, steps: int) -> loop.TrainingRun:
  """The run, that raises in place of the step after so many."""
  left = [steps]

  def mortal(phase):
    def step(self, *args):
      if not left[0]:
        raise RuntimeError("killed")
      left[0] -= 1
      return type(phase).step(self, *args)

    kind = type("Mortal", (type(phase),), {"step": step})
    fields = dataclasses.fields(phase)
    return kind(**{field.name: getattr(phase, field.name) for field in fields})

  return dataclasses.replace(run, phases=tuple(map(mortal, run.phases)))


def untimed(row: dict) -> dict:
  return {
      name: x for name, x in row.items()
      if not name.startswith("time/") and name != "tokens_per_second"
  }


def test_a_half_written_checkpoint_is_not_the_latest(tmp_path, small):
  model, params = small
  train_state = step_lib.create(params, ADAM)
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(train_state, checkpoints_lib.Progress(3, 6, 0))
  # What a save that was killed leaves behind.
  (tmp_path / "steps" / "4.orbax-checkpoint-tmp").mkdir()
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.progress() == checkpoints_lib.Progress(3, 6, 0)
    found = checkpoints.restore(checkpoints_lib.shapes(train_state))
  chex.assert_trees_all_equal(found, train_state)


def test_saved_on_eight_devices_restored_on_one(tmp_path, small):
  model, params = small
  layout = sharding.sharded(params, 8)
  wide = step_lib.create(params, ADAM, layout=layout)
  narrow = step_lib.create(params, ADAM)
  where = step_lib.shardings(params, ADAM, trainable="all", layout=layout)
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(wide, checkpoints_lib.Progress(1, 2, 0))
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    here = checkpoints.restore(checkpoints_lib.shapes(narrow))
    again = checkpoints.restore(checkpoints_lib.shapes(narrow, where))
  chex.assert_trees_all_equal(jax.device_get(here), jax.device_get(narrow))
  chex.assert_trees_all_equal(jax.device_get(again), jax.device_get(wide))
  assert len(jax.tree.leaves(here.params)[0].devices()) == 1
  assert len(jax.tree.leaves(again.params)[0].devices()) == 8


@pytest.mark.exhaustive
def test_eight_devices_learn_as_one_does(x64):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  rollouts = dataclasses.replace(ROLLOUTS, hold="nothing")
  found = []
  for layout in (br.Schedule().layout, sharding.sharded(params, 8)):
    phase = reinforce(
        model, rollouts=rollouts, schedule=br.Schedule(layout=layout)
    )
    train_state = step_lib.create(
        jax.tree.map(jnp.copy, params), ADAM, layout=layout
    )
    for step in range(2):
      train_state = phase.step(
          train_state, None, 2 * step, jax.random.key(step)
      ).train_state
    found.append(jax.device_get(train_state.params))
  assert tiny.worst(*found) <= 1e-9


@pytest.mark.parametrize("changes, message", [
    ({"rollouts": experience.Rollouts(1, 5)}, "group of one"),
    ({"rollouts": experience.Rollouts(4, 5, br.Law(0.0))}, "temperature"),
    ({"rollouts": experience.Rollouts(4, 5, br.Law(0.7))}, "0.7"),
    ({"rollouts": experience.Rollouts(4, 5, br.Law(top_p=0.9))}, "truncation"),
    ({"prompts": 3, "updates": 2}, "divide"),
    ({"epochs": 0}, "epochs"),
    ({"most_prompts": 1}, "most_prompts"),
    (
        {"rollouts": experience.Rollouts(4, 5, hold="nothing"),
         "capture_every": 2},
        "capture_every",
    ),
    ({"mode": "full", "capture_every": 2}, "capture_every"),
    ({"rollouts": experience.Rollouts(4, 500)}, "max_positions"),
    (
        {"algorithm": algorithms.Preference(preference.Dpo()),
         "schedule": br.Schedule(branches_at_once=3)},
        "pairs",
    ),
    (
        {"rollouts": experience.Rollouts(3, 5),
         "algorithm": algorithms.Preference(preference.Dpo())},
        "even",
    ),
])
def test_what_does_not_go_together_is_refused(small, changes, message):
  with pytest.raises(ValueError, match=message):
    reinforce(small[0], **changes)


def test_a_value_head_is_not_trained_with_adapters(small):
  model, params = adapters.add(
      *small, Adapter(2, 2.0), jax.random.key(0)
  )
  del params
  with pytest.raises(ValueError, match="value head"):
    learner(
        model, algorithms.ProximalPolicy(objectives.ppo()),
        trainable="adapters",
    )


@pytest.mark.exhaustive(but="grpo")
@pytest.mark.parametrize("algorithm", [
    GRPO, algorithms.ProximalPolicy(objectives.ppo()),
], ids=["grpo", "ppo"])
def test_later_updates_compile_nothing(small, algorithm):
  model, params = small
  params = actor_critic.add_head(params, model.config)
  mine, (batch,) = learner(model, algorithm), recorded(model, params, 1)
  known = mine.know(params, batch, version=0)
  train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
  compiled, counts = [], []
  jax.monitoring.register_event_duration_secs_listener(
      lambda name, *_, **__: compiled.append(name)
      if name.endswith("backend_compile_duration") else None
  )
  for number in range(3):
    train_state = mine.update(
        train_state, batch, known, version=number, key=jax.random.key(number)
    ).train_state
    counts.append(len(compiled))
  assert counts[0] and counts[1] == counts[2], counts


def test_a_reward_that_fails_names_the_example(small):
  model, params = small

  def score(*_):
    raise KeyError("no such fact")

  train_state = step_lib.create(jax.tree.map(jnp.copy, params), ADAM)
  with pytest.raises(ValueError, match="row-.*no such fact"):
    reinforce(model, task=task_of(score)).step(
        train_state, None, 0, jax.random.key(7)
    )


def test_a_checkpoint_of_another_run_is_refused(tmp_path, small):
  model, params = small
  run = run_of(model, steps=1)
  loop.train(run, params, tmp_path)
  with pytest.raises(ValueError, match="seed"):
    loop.train(dataclasses.replace(run, seed=1), params, tmp_path)
