# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands around an update: what a run saves, accepts and goes on from."""

import dataclasses
import json
import os
import shutil
import signal
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.training import algorithms
from branch_replay.training import checkpoints as checkpoints_lib
from branch_replay.training import experience
from branch_replay.training import identity
from branch_replay.training import json_lines
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training import optimizers
from branch_replay.training import phases
from branch_replay.training import step as step_lib
from experiments.reporting import record
from tests import tiny
from tests import training_test

CONFIG = dataclasses.replace(tiny.BASE, num_layers=1)
ADAM = optax.adam(3e-3)


def supervised(model, optimizer=ADAM, algorithm=None, **changes):
  settings = dict(
      name="warmup", task=training_test.task_of(),
      learner=learner_lib.Learner(
          model, algorithm or algorithms.MaximumLikelihood(), optimizer
      ),
      steps=4, prompts=2, max_tokens=5, seed=0, learning_rate=lambda _: 3e-3,
  )
  return phases.Supervised(**settings | changes)


def run_of(model, *made, **changes) -> loop.TrainingRun:
  settings = dict(
      model=model, phases=made or (supervised(model),),
      evaluation=loop.HeldOutEvaluation(
          training_test.task_of(), experience.Rollouts(1, 1), "validation", 1, 9
      ),
      seed=0, checkpoint_every=1,
  )
  return loop.TrainingRun(**settings | changes)


def changed(run: loop.TrainingRun, **changes) -> loop.TrainingRun:
  """The run with fields of its only phase changed."""
  (phase,) = run.phases
  return dataclasses.replace(
      run, phases=(dataclasses.replace(phase, **changes),)
  )


@pytest.fixture(scope="module")
def small():
  return tiny.model(CONFIG)


@pytest.fixture(scope="module")
def run(small):
  """Four supervised steps, whose learner compiles once."""
  return run_of(small[0])


@pytest.fixture(scope="module")
def straight(small, run, tmp_path_factory):
  """The parameters that the run ends with."""
  return loop.train(run, small[1], tmp_path_factory.mktemp("straight"))


def killed(run, params, folder, at):
  with pytest.raises(RuntimeError, match="killed"):
    loop.train(training_test.killed_after(run, at), params, folder)


def with_table(params, number):
  """The parameters with one number of the embedding replaced."""
  table = params["embed"]["table"].at[5, 7].set(number)
  return params | {"embed": {"table": table}}


# What is written.


def strict(line: str) -> dict:
  """JSON as the standard has it."""
  def refuse(what):
    raise AssertionError(f"{what} is no JSON")

  return json.loads(line, parse_constant=refuse)


def test_a_log_is_json_whatever_the_numbers_are(tmp_path):
  with metrics.Log(tmp_path) as log:
    log.write(1, "rl", {"loss": float("nan"), "up": float("inf"), "lr": 0.5})
    log.write(2, "rl", {"loss": 1.0})
  lines = (tmp_path / metrics.FILE).read_text().splitlines()
  assert strict(lines[0]) == {
      "step": 1, "phase": "rl", "loss": None, "up": None, "lr": 0.5,
      "not_finite": {"loss": "nan", "up": "inf"},
  }
  assert strict(lines[1]) == {"step": 2, "phase": "rl", "loss": 1.0}
  row, _ = metrics.read(tmp_path)
  assert np.isnan(row["loss"]) and row["up"] == np.inf
  assert set(row) == {"step", "phase", "loss", "up", "lr"}
  with metrics.Log(tmp_path, start=2):  # as a run does that goes on
    pass
  assert (tmp_path / metrics.FILE).read_text().splitlines() == lines


def test_results_are_json_whatever_the_numbers_are(tmp_path):
  record.write_json(
      tmp_path / "a.json", {"runs": [{"loss": 1.0}, {"loss": -np.inf}]}
  )
  assert strict((tmp_path / "a.json").read_text()) == {
      "runs": [{"loss": 1.0}, {"loss": None}],
      "not_finite": {"runs[1].loss": "-inf"},
  }


def test_a_damaged_line_is_named_and_half_a_last_line_is_dropped(tmp_path):
  file = tmp_path / metrics.FILE
  good = '{"step": 1}\n'
  file.write_text(f'{good}{good}{{"step": 2, "lo')
  assert metrics.read(tmp_path) == [{"step": 1}, {"step": 1}]
  for bad in ('{"step": 2, "lo\n', "\0\0\0\n", "7\n", "\n", "{}\n"):
    file.write_text(f"{good}{bad}{good}")
    with pytest.raises(ValueError, match=f"Line 2 of {file} is damaged"):
      metrics.read(tmp_path)


def test_lines_are_appended_after_whole_lines(tmp_path):
  file = tmp_path / "cases.jsonl"
  file.write_text('{"case": "é"}\n{"ca')
  json_lines.mend(file)
  record.append(tmp_path, {"case": 2})
  assert json_lines.read(file) == [{"case": "é"}, {"case": 2}]


def test_what_is_not_finite_is_not_saved(tmp_path, small):
  good = step_lib.create(jax.tree.map(jnp.copy, small[1]), ADAM)
  params = with_table(good.params, np.nan)
  (first, *rest) = good.optimizer
  moments = (first._replace(mu=params), *rest)
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    for step in (1, 2):
      checkpoints.save(good, checkpoints_lib.Progress(step, 0, 0))
    for bad, name in (
        (good._replace(params=params), "params.embed.table"),
        (good._replace(optimizer=moments), "optimizer.0.mu.embed.table"),
    ):
      with pytest.raises(ValueError, match=f"step 3 has NaN.*1 arrays, {name}"):
        checkpoints.save(bad, checkpoints_lib.Progress(3, 0, 0))
    with pytest.raises(ValueError, match="the reference of phase 0 has NaN"):
      checkpoints.save_reference(0, params)
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.latest() == 2
    found = checkpoints.restore(checkpoints_lib.shapes(good))
  chex.assert_trees_all_equal(found, good)


def test_a_run_does_not_begin_with_parameters_that_are_not_finite(
    tmp_path, small, run
):
  params = jax.tree.map(lambda x: x.at[...].set(np.inf), small[1])
  with pytest.raises(ValueError, match="before the first step, has NaN or inf"):
    loop.train(run, params, tmp_path)


def test_a_save_that_writes_nothing_is_an_error(tmp_path, small):
  good = step_lib.create(jax.tree.map(jnp.copy, small[1]), ADAM)
  (tmp_path / "steps" / "9").mkdir(parents=True)
  with checkpoints_lib.Checkpoints(tmp_path) as checkpoints:
    with pytest.raises(ValueError, match=r"Nothing was saved of step 5.*\[9\]"):
      checkpoints.save(good, checkpoints_lib.Progress(5, 0, 0))
    with pytest.warns(UserWarning, match="steps/9: it is empty"):
      checkpoints.recover()
    checkpoints.save(good, checkpoints_lib.Progress(5, 0, 0))
  assert checkpoints.latest() == 5


# What is gone on from.


def _empty(step):
  shutil.rmtree(step)
  step.mkdir()


def _half_written(step):
  shutil.rmtree(step / "train_state" / "d")
  (step / "train_state" / "_METADATA").unlink()


def _cut_arrays(step):
  for file in (step / "train_state").rglob("d/*"):
    file.write_bytes(file.read_bytes()[:20])


DAMAGES = {
    "it is empty": _empty,
    "it has no commit_success.txt": (
        lambda step: (step / "commit_success.txt").unlink()
    ),
    "it has no train_state": (
        lambda step: shutil.rmtree(step / "train_state")
    ),
    "it has no train_state/_METADATA": _half_written,
    "progress/metadata is no JSON": (
        lambda step: (step / "progress" / "metadata").write_text('{"ste')
    ),
    "its arrays cannot be read": _cut_arrays,
}


@pytest.mark.exhaustive(but=("commit_success", "is empty"))
@pytest.mark.parametrize("said", DAMAGES)
def test_a_run_goes_on_from_the_newest_step_that_is_complete(
    tmp_path, small, run, straight, said
):
  params = small[1]
  killed(run, params, tmp_path, 3)
  steps = tmp_path / "checkpoints" / "steps"
  DAMAGES[said](steps / "3")
  with pytest.warns(UserWarning, match=f"Ignored .*/steps/3: {said}"):
    resumed = loop.train(run, params, tmp_path)
  chex.assert_trees_all_equal(resumed, straight)
  assert [row["step"] for row in metrics.read(tmp_path)] == [0, 1, 2, 3, 4]
  assert (tmp_path / "checkpoints" / "unfinished" / "3-0").is_dir()
  assert {int(x.name) for x in steps.iterdir()} == {3, 4}
  with warnings.catch_warnings():
    warnings.simplefilter("error")  # all that is left is complete
    chex.assert_trees_all_equal(loop.train(run, params, tmp_path), straight)


def test_classes_have_the_names_that_checkpoints_know_them_by(run):
  """These may not change: a checkpoint with other names is refused."""
  about = identity.of_run(run)
  assert about["evaluation"]["type"] == "Evaluation"
  assert about["phases"][0]["type"] == "Supervised"
  assert about["phases"][0]["learner"]["algorithm"]["type"] == "Supervised"
  assert "learning_rate" not in about["phases"][0]


def test_fields_that_earlier_checkpoints_lack_count_only_if_they_are_set(run):
  learner = run.phases[0].learner
  about = identity.describe(learner)
  assert "band" not in about
  assert "keep_attention" not in about["schedule"]
  assert "chunk_size" in about["schedule"]
  changed = dataclasses.replace(
      learner, band=br.Band(window=5),
      schedule=dataclasses.replace(learner.schedule, keep_attention=True),
  )
  found = identity.differences(about, identity.describe(changed))
  assert {path for path, *_ in found} == {"band", "schedule.keep_attention"}


def test_a_checkpoint_without_a_description_is_not_taken_for_checked(
    tmp_path, small, run, straight
):
  killed(run, small[1], tmp_path, 2)
  shutil.rmtree(tmp_path / "checkpoints" / "steps" / "2" / "run")
  with pytest.warns(UserWarning, match="does not say what run it is of"):
    resumed = loop.train(run, small[1], tmp_path)
  chex.assert_trees_all_equal(resumed, straight)


@pytest.fixture(scope="module")
def stopped(small, run, tmp_path_factory):
  """The folder of the run after two of its steps."""
  folder = tmp_path_factory.mktemp("stopped")
  killed(run, small[1], folder, 2)
  return folder


def other_model(**changes):
  def make(run):
    model = br.Decoder(dataclasses.replace(CONFIG, **changes))
    return run_of(model, supervised(model))

  return make


def other_optimizer(optimizer):
  return lambda run: run_of(run.model, supervised(run.model, optimizer))


OTHERS = [
    (other_optimizer(optax.adam(0.9)), "step_size: -0.003 there, -0.9 here"),
    (other_optimizer(optax.adam(3e-3, b2=0.95)), "b2: 0.999 there, 0.95 here"),
    (lambda run: changed(run, prompts=3), r"phases\[0\].prompts: 2 there, 3"),
    (lambda run: changed(run, max_tokens=6), "max_tokens: 5 there, 6 here"),
    (lambda run: changed(run, seed=1), r"phases\[0\].seed: 0 there, 1 here"),
    (lambda run: changed(run, name="x"), "name: 'warmup' there, 'x' here"),
    (lambda run: changed(run, steps=1), "step 2; this run has seed 0 and 1"),
    (
        lambda run: changed(run, task=training_test.task_of(rows=5)),
        "task.rows.train: '6 rows .*' there, '5 rows .*' here",
    ),
    (
        lambda run: changed(run, learner=dataclasses.replace(
            run.phases[0].learner, schedule=br.Schedule(chunk_size=4)
        )),
        "schedule.chunk_size: 1024 there, 4 here",
    ),
    (  # another phase before it
        lambda run: dataclasses.replace(
            run, phases=(*changed(run, name="new").phases, *run.phases)
        ),
        r"phases\[0\].name: 'warmup' there, 'new' here",
    ),
    (other_model(rope_theta=77.0), "model.rope_theta: 10000.0 there, 77.0"),
    (
        other_model(rope_scaling=br.LinearScaling(4.0)),
        "model.rope_scaling: None there, {.*'factor': 4.0} here",
    ),
    (
        other_model(compute_dtype="bfloat16"),
        "model.compute_dtype: 'float32' there, 'bfloat16' here",
    ),
    (
        other_model(param_dtype="bfloat16"),
        "model.param_dtype: 'float32' there, 'bfloat16' here",
    ),
]


@pytest.mark.parametrize("other, message", OTHERS)
def test_a_run_that_has_become_another_is_refused(
    stopped, small, run, other, message
):
  before = sorted(path for path in stopped.rglob("*") if path.is_file())
  with pytest.raises(ValueError, match=message):
    loop.train(other(run), small[1], stopped)
  assert sorted(x for x in stopped.rglob("*") if x.is_file()) == before


def test_what_may_differ_is_said(tmp_path, stopped, small, run):
  shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
  other = other_optimizer(optax.adam(1e-3))(run)
  trained = loop.train(
      other, small[1], tmp_path, may_differ=("phases[0].learner.optimizer",)
  )
  assert trained is not None
  with pytest.raises(ValueError, match="step_size: -0.001 there, -0.003 here"):
    loop.train(run, small[1], tmp_path)


def test_a_run_is_extended_as_if_it_had_been_longer(
    tmp_path, stopped, small, run, straight
):
  """And other things may change that nothing learnt depends on."""
  folder = tmp_path / "short"
  loop.train(changed(run, steps=2), small[1], folder)
  longer = dataclasses.replace(
      run, checkpoint_every=3, warn_after=7, most_skipped=9,
      evaluation=dataclasses.replace(run.evaluation, every=3),
  )
  chex.assert_trees_all_equal(
      loop.train(longer, small[1], folder), straight
  )
  added = dataclasses.replace(
      run, phases=(*run.phases, dataclasses.replace(
          run.phases[0], name="more", steps=1
      ))
  )
  assert loop.train(added, small[1], folder) is not None
  with pytest.raises(ValueError, match=r"phases\[0\].steps: 4 there, 3 here"):
    loop.train(
        dataclasses.replace(added, phases=(
            dataclasses.replace(added.phases[0], steps=3),
            dataclasses.replace(added.phases[1], steps=3),
        )),
        small[1], folder,
    )


def test_a_rate_that_falls_until_the_end_is_not_extended(tmp_path, small, run):
  def falling(steps):
    rate = optimizers.learning_rates(1e-3, updates=steps, decay="linear")
    model = run.model
    return run_of(
        model, supervised(model, optimizers.adamw(rate), steps=steps)
    )

  loop.train(falling(1), small[1], tmp_path)
  with pytest.raises(ValueError, match="rate ends constant can be made"):
    loop.train(falling(3), small[1], tmp_path)


@pytest.mark.exhaustive(but="float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_terminated_ends_as_one_that_is_not(
    tmp_path, small, run, dtype
):
  """In every dtype of the parameters."""
  params = jax.tree.map(lambda x: x.astype(dtype), small[1])
  run = dataclasses.replace(changed(run, steps=6), checkpoint_every=9)
  if dtype != "float32":
    model = br.Decoder(dataclasses.replace(
        CONFIG, param_dtype=dtype, compute_dtype=dtype
    ))
    run = run_of(model, supervised(model, steps=6), checkpoint_every=9)
  straight = loop.train(run, params, tmp_path / "straight")

  class Terminated(phases.Supervised):

    def step(self, train_state, *rest):
      if int(train_state.step) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
      return super().step(train_state, *rest)

  (phase,) = run.phases
  fields = {x.name: getattr(phase, x.name) for x in dataclasses.fields(phase)}
  mortal = dataclasses.replace(run, phases=(Terminated(**fields),))
  assert loop.train(mortal, params, tmp_path / "stopped") is None
  assert metrics.read(tmp_path / "stopped")[-1]["step"] == 3
  resumed = loop.train(run, params, tmp_path / "stopped")
  chex.assert_trees_all_equal(resumed, straight)


# What is not finite.


class Poisoned(algorithms.MaximumLikelihood):
  """Whose loss is infinite."""

  @staticmethod
  def loss(log_probs_GT, weights_GT):
    return jnp.inf * jnp.sum(weights_GT * log_probs_GT)


def test_a_run_stops_after_updates_that_are_not_finite(tmp_path, small, run):
  model, params = small
  poisoned = run_of(
      model, supervised(model, algorithm=Poisoned()), most_skipped=3,
      checkpoint_every=2,
  )
  with pytest.raises(ValueError, match=(
      "3 updates in a row.*step 3, phase 'warmup'.*examples row-., row-.. "
  )):
    loop.train(poisoned, params, tmp_path)
  for line in (tmp_path / metrics.FILE).read_text().splitlines():
    strict(line)
  rows = metrics.read(tmp_path)
  assert [row.get("skipped_updates") for row in rows] == [None, 1, 1, 1]
  with checkpoints_lib.Checkpoints(tmp_path / "checkpoints") as checkpoints:
    assert checkpoints.latest() == 3
    found = checkpoints.restore(
        checkpoints_lib.shapes(step_lib.create(params, ADAM))
    )
  chex.assert_trees_all_equal(found.params, params)
  # The next batch may be better: one good update, and the count begins anew.
  assert loop.train(
      dataclasses.replace(run, most_skipped=1), params, tmp_path,
      may_differ=("phases[0].learner.algorithm",),
  ) is not None
  assert metrics.read(tmp_path)[-1]["skipped_updates"] == 0


def test_nothing_is_sampled_from_what_is_not_finite(small):
  model, params = small
  broken = with_table(params, np.nan)
  with pytest.raises(ValueError, match=(
      r"log-probs of sampled tokens are not finite.*NaN or infinity in "
      r"params\['embed'\]\['table'\]"
  )):
    br.sample(
        model, broken, [3, 5, 5], key=jax.random.key(0), branches=1,
        max_tokens=1,
    )
