# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The training experiment: a run as users make it, and what it refuses."""

import signal
import subprocess
import sys
import time

import chex
import pytest

import branch_replay as br
from branch_replay.rollout.drafters import files as drafter_files
from branch_replay.tasks import reasoning_gym
from branch_replay.training import by_name
from branch_replay.training import checkpoints
from branch_replay.training import metrics
from branch_replay.training import run_config
from configs import reasoning
from configs import train as train_config
from experiments import learning_curves
from experiments import train
from experiments.reporting import record
from tests import tiny_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
  """Rows that are prepared once."""
  return str(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def config(tasks):
  config = train_config.get_config("tiny")
  config.data_dir = tasks
  return config


@pytest.mark.exhaustive
def test_a_run_is_logged_saved_and_exported(tmp_path, config):
  rows = train.run(config, tmp_path / "run")
  assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
  assert [row["phase"] for row in rows[1:]] == ["short"] * 2 + ["reinforce"] * 2
  assert {row["step"] for row in rows if "eval/reward" in row} == {0, 2, 4}
  assert rows[-1]["mismatch_max"] <= 1e-4
  exported = br.load_hf(tmp_path / "run" / "model")
  assert exported.config.width == config.model.width
  assert exported.stop_ids == (2,)
  assert list((tmp_path / "run" / "tensorboard").iterdir())
  assert [row["draft/version"] for row in rows[3:]] == [1, 2]
  drafter = drafter_files.load(
      tmp_path / "run/model/drafter_reinforce", exported.model, exported.params
  )
  assert drafter.vocabulary.size == 64
  # Once more, everything is there: nothing is run, and the result is the same.
  assert train.run(config, tmp_path / "run") == rows
  chex.assert_trees_all_equal(
      br.load_hf(tmp_path / "run" / "model").params, exported.params
  )


@pytest.mark.exhaustive(but="Did you mean")
@pytest.mark.parametrize("change, message", [
    ({"phases": ()}, "phases"),
    ({"phases": ("shrot",)}, "Did you mean 'short'"),
    ({"short.kind": "supervise"}, "Did you mean 'supervised'"),
    ({"short.stepz": 3}, "Unknown field of short: 'stepz'"),
    ({"learning_rate": 3}, "Unknown field of the config"),
    ({"model.widht": 3}, "Did you mean 'width'"),
    ({"schedule.chunk_sise": 1}, "Did you mean 'chunk_size'"),
    ({"short.prompts": 0}, "prompts"),
    ({"short.max_tokens": 2}, "max_tokens=2"),
    ({"reinforce.max_tokens": 10000}, "max_positions"),
    ({"evaluation.max_tokens": 10000}, "max_positions"),
    ({"task.name": "retreival"}, "Did you mean 'retrieval'"),
    ({"task.distractor": 1}, "Did you mean 'distractors'"),
    ({"reinforce.branches": 1}, "group of one"),
    ({"reinforce.algorithm.name": "grop"}, "Did you mean 'grpo'"),
    ({"reinforce.algorithm.settings.klip": 1}, "klip"),
    ({"reinforce.hold": "all"}, "hold"),
    ({"reinforce.truncated": "drop"}, "truncated='drop'"),
    ({"most_skipped": 0}, "most_skipped must be at least 1"),
    ({"reinforce.hold": "nothing"}, "learned drafter reads the states"),
    ({"reinforce.speculation.drafter": "lerned"}, "Did you mean 'learned'"),
    ({"reinforce.speculation.draft_lengths": (1, 2)}, "0 among them"),
    ({"reinforce.speculation.studies.row": 2}, "Did you mean 'rows'"),
    ({"reinforce.optimizer.decay": "cosin"}, "decay"),
    ({"prefix_gradient": "exactly"}, "exactly"),
    ({"evaluation.prompts": 1000}, "prompts=1000"),
    ({"evaluation.split": "tset"}, "Did you mean 'test'"),
])
def test_a_bad_config_is_refused_before_anything_runs(config, change, message):
  with config.unlocked():
    for path, value in change.items():
      at = config
      *parents, name = path.split(".")
      for parent in parents:
        at = at[parent]
      at[name] = value
  with pytest.raises(ValueError, match=message):
    train.build(config)


@pytest.mark.parametrize("file,variant", [
    *((train_config, name)
      for name in ("", "supervised", "pairs", "small", "tiny")),
    *((reasoning, name) for name in ("", "sums", "tiny")),
])
def test_a_config_and_its_settings_say_the_same(file, variant):
  config = file.get_config(variant)
  settings = run_config.of_config(config)
  assert run_config.to_config(settings) == config
  # A field that is not there has its default.
  (*_, last) = config.phases
  with config.unlocked():
    del config[last].optimizer.b1, config.evaluation
  assert run_config.of_config(config).phases[last].optimizer.b1 == 0.9
  # Every field has a meaning.
  config = file.get_config(variant)
  said = run_config.meanings(config)
  missing = [x for x in record.flat(config.to_dict()) if not said.get(x)]
  assert missing == []


@pytest.mark.parametrize("variant", ("", "sums", "tiny"))
def test_tasks_of_reasoning_gym_have_the_rows_that_are_asked_for(variant):
  pytest.importorskip("reasoning_gym", reason="the extra [reasoning]")
  settings = dict(reasoning.get_config(variant).task)
  assert settings.pop("name") == "reasoning_gym"
  recipe = reasoning_gym.ReasoningGym(**settings)
  asked = set()
  for split in ("train", "validation", "test"):
    rows = list(recipe.rows(tiny_tasks.chat(), split))
    assert len(rows) == settings[split]
    asked |= {row.prompt_ids.tobytes() for row in rows}
  assert len(asked) == sum(settings[x] for x in ("train", "validation", "test"))


def test_a_choice_brings_its_own_fields():
  config = train_config.get_config("tiny")
  run_config.switch(config, "task.name", "arithmetic")
  assert config.task.name == "arithmetic" and config.task.operations
  assert "haystack" not in config.task
  for name in by_name.ALGORITHMS:
    run_config.switch(config, "reinforce.algorithm.name", name)
    config.reinforce.algorithm.name = name
    of = run_config.of_config(config).phases["reinforce"].algorithm
    by_name.make(of.name, of.settings, temperature=1.0, max_tokens=5)
  assert dict(config.reinforce.algorithm.settings) == {"beta": 0.1}
  # The same choice again changes nothing that was set.
  config.reinforce.algorithm.settings.beta = 0.5
  run_config.switch(config, "reinforce.algorithm.name", "ipo")
  assert config.reinforce.algorithm.settings.beta == 0.5
  with pytest.raises(ValueError, match="Did you mean 'arithmetic'"):
    run_config.switch(config, "task.name", "arithmetics")


def test_algorithms_have_their_own_defaults():
  """From the papers: Dr. GRPO does not divide by the spread, and its constant
  is the longest answer; RLOO leaves one out; DAPO clips higher above."""
  def made(name, **settings):
    return by_name.make(name, settings, temperature=0.7, max_tokens=9)

  assert made("dr_grpo").advantage == "group_centred"
  assert made("dr_grpo").objective.max_tokens == 9
  assert made("dr_grpo", max_tokens=5).objective.max_tokens == 5
  assert made("reinforce").advantage == "leave_one_out"
  assert made("dapo").objective.clip_high == 0.28
  assert made("grpo", kl_coefficient=0.0).temperature == 0.7
  assert made("ppo", value_clip=None, trace=0.5).trace == 0.5
  with pytest.raises(ValueError, match="klip.*Did you mean 'clip'"):
    made("grpo", klip=1)


def test_a_config_that_has_become_another_is_refused_by_its_fields(
    tmp_path, config
):
  def against(**changes):
    other = learning_curves.changed(config, {
        name.replace("__", "."): value for name, value in changes.items()
    })
    train.check_same(config.to_dict(), other.to_dict(), tmp_path)

  against()
  against(
      reinforce__steps=60, short__steps=3, devices=8, checkpoint_every=7,
      evaluation__every=3, export=False, reinforce__hold="nothing",
      phases=("short", "reinforce", "long"), warn_after=3, most_skipped=1,
  )
  with pytest.raises(ValueError, match=(
      "reinforce.optimizer.learning_rate: 0.002 there, 0.6 here; "
      "reinforce.prompts: 2 there, 3 here. Take another --workdir"
  )):
    against(reinforce__prompts=3, reinforce__optimizer__learning_rate=0.6)
  saved = config.to_dict()
  del saved["prefix_gradient"]
  with pytest.raises(ValueError, match="prefix_gradient: missing there, 'ex"):
    train.check_same(saved, config.to_dict(), tmp_path)


@pytest.mark.exhaustive
def test_another_number_of_devices_goes_on(tmp_path, config):
  config.reinforce.hold = "nothing"
  config.reinforce.speculation.drafter = "none"
  config.reinforce.steps = 1
  rows = train.run(config, tmp_path / "run")
  config.devices = 2
  assert train.run(config, tmp_path / "run") == rows


@pytest.mark.exhaustive
def test_a_terminated_run_saves_and_goes_on(tmp_path, config):
  command = [
      sys.executable, "-m", "experiments.train",
      "--config=configs/train.py:tiny", f"--workdir={tmp_path / 'run'}",
      f"--config.data_dir={config.data_dir}", "--config.reinforce.steps=400",
      "--config.reinforce.speculation.drafter=none",
  ]

  def until(rows: int):
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    while (
        len(metrics.read(tmp_path / "run")) < rows and process.poll() is None
    ):
      time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "goes on from there" in output
    found = metrics.read(tmp_path / "run")
    assert [row["step"] for row in found] == list(range(len(found)))
    assert f"Stopped after step {found[-1]['step']} of 402" in output
    with checkpoints.Checkpoints(tmp_path / "run" / "checkpoints") as saved:
      assert saved.latest() == found[-1]["step"]
    return found

  before = until(4)
  assert until(len(before) + 2)[: len(before)] == before
