# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writers: Weights & Biases, the terminal, and the files beside them."""

import json
import sys
import time
import types

import pytest

from branch_replay.training import metrics
from branch_replay.training import terminal
from branch_replay.training import writers

ROW = {
    "step": 1, "phase": "rl", "example": "row-1", "prompt": "What is it?",
    "prompt_length": 3, "left_out": 0,
    "answers": [
        {"text": "a bird", "reward": 1.0, "length": 3, "finished": True},
        {"text": "a\nfish", "reward": 0.0, "length": 2, "finished": False},
    ],
}


class Recorder:
  """A writer that keeps what it is told."""

  def __init__(self, place):
    self.place, self.told = place, []

  def write(self, *args):
    self.told.append(args)

  def completions(self, *args):
    self.told.append(args)

  def close(self):
    self.told.append("closed")


def test_other_writers_are_told_what_the_files_are(tmp_path):
  made = []

  def make(place):
    made.append(Recorder(place))
    return made[-1]

  with pytest.raises(RuntimeError, match="interrupted"):
    with metrics.Log(tmp_path, steps=9, writers=(make, make)) as log:
      log.completions(1, [ROW])
      log.write(1, "rl", {"loss": 0.5})
      raise RuntimeError("interrupted")
  assert metrics.read(tmp_path, metrics.COMPLETIONS) == [ROW]
  for one in made:
    assert one.place == writers.Place(tmp_path, -1, 9)
    assert one.told == [(1, [ROW]), (1, "rl", {"loss": 0.5}), "closed"]


def test_answers_of_steps_that_run_again_are_dropped(tmp_path):
  with metrics.Log(tmp_path) as log:
    for step in range(5):
      log.completions(step, [ROW | {"step": step}] * 2)
  with metrics.Log(tmp_path, start=2):
    pass
  rows = metrics.read(tmp_path, metrics.COMPLETIONS)
  assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2]
  (tmp_path / metrics.COMPLETIONS).write_text('{"answers": []}\n')
  with pytest.raises(ValueError, match="Line 1 of .*completions.jsonl is dam"):
    metrics.Log(tmp_path)


# Weights & Biases.


@pytest.fixture
def wandb(monkeypatch):
  """A module in place of the real one, which writes down what it is told."""
  fake = types.ModuleType("wandb")
  fake.told = []

  class Run:

    def log(self, values, *, step, commit):
      fake.told.append((step, values, commit))

    def finish(self):
      fake.told.append("finished")

  def init(**settings):
    fake.told.append(settings)
    return Run()

  fake.init = init
  fake.Table = lambda columns, data: {"columns": columns, "data": data}
  monkeypatch.setitem(sys.modules, "wandb", fake)
  return fake


def test_weights_and_biases_gets_numbers_and_answers(tmp_path, wandb):
  make = writers.weights_and_biases(
      project="birds", name="first", config={"seed": 3}
  )
  assert not wandb.told  # nothing before the run
  with metrics.Log(tmp_path, writers=(make,)) as log:
    log.completions(1, [ROW])
    log.write(1, "rl", {"loss": 0.5})
  began, answers, numbers, end = wandb.told
  assert began.pop("id") == json.loads(
      (tmp_path / "wandb_run.json").read_text()
  )["id"]
  assert began == {
      "resume": "allow", "dir": str(tmp_path), "project": "birds",
      "name": "first", "config": {"seed": 3},
  }
  assert answers == (1, {"completions": {
      "columns": [
          "example", "prompt", "answer", "reward", "length", "finished",
      ],
      "data": [
          ["row-1", "What is it?", "a bird", 1.0, 3, True],
          ["row-1", "What is it?", "a\nfish", 0.0, 2, False],
      ],
  }}, False)  # the numbers of the same step follow
  assert numbers == (1, {"phase": "rl", "loss": 0.5}, True)
  assert end == "finished"


def test_a_run_that_goes_on_is_the_same_there_and_sends_nothing_twice(
    tmp_path, wandb
):
  make = writers.weights_and_biases()
  with metrics.Log(tmp_path, writers=(make,)) as log:
    for step in range(4):
      log.write(step, "rl", {"loss": float(step)})
  wandb.told.clear()
  with metrics.Log(tmp_path, start=1, writers=(make,)) as log:
    for step in (2, 3, 4):
      log.completions(step, [ROW])
      log.write(step, "rl", {"loss": float(step)})
  again, *sent, _ = wandb.told
  assert [one[0] for one in sent] == [4, 4]
  # One that begins again is another run.
  with metrics.Log(tmp_path, writers=(make,)) as log:
    log.write(0, "rl", {"loss": 0.0})
  anew = wandb.told[-3]
  assert anew["id"] != again["id"]
  assert wandb.told[-2][0] == 0


def test_without_the_package_an_error_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(ValueError, match="pip install wandb"):
    writers.weights_and_biases()


def test_the_real_package_writes_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb", reason="wandb is not installed")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  make = writers.weights_and_biases(config={"seed": 3})
  for start, steps in ((-1, (0, 1)), (0, (1, 2))):
    with metrics.Log(tmp_path, start=start, writers=(make,)) as log:
      for step in steps:
        log.completions(step, [ROW])
        log.write(step, "rl", {"loss": 0.5})
  note = json.loads((tmp_path / "wandb_run.json").read_text())
  assert note["step"] == 2
  runs = list((tmp_path / "wandb").glob(f"offline-run-*-{note['id']}"))
  assert runs and all(list(run.glob("*.wandb")) for run in runs)


# The terminal.


@pytest.fixture
def clock(monkeypatch):
  """A clock that stands until it is set."""
  now = [100.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  return now


def lines_of(capsys) -> list[list[str]]:
  found = capsys.readouterr()
  assert not found.out
  return [line.split() for line in found.err.splitlines()]


def test_every_step_is_a_line_with_the_time_that_is_left(
    tmp_path, clock, capsys
):
  one = terminal.Terminal(writers.Place(tmp_path, -1, 12))
  (about,) = lines_of(capsys)
  assert "12 steps, from step 1" in " ".join(about)
  scalars = {
      "reward/mean": 0.25, "answer_length": 4.5, "entropy": 1.25,
      "kl_reference": 0.0312, "loss": -0.00123, "grad_norm": 12.34,
      "tokens_per_second": 1234.5, "time/learn": 3.0,
  }
  for step, seconds in enumerate((60, 2, 3, 100), 1):
    clock[0] += seconds
    one.write(step, "rl", scalars | ({"eval/reward": 0.5} if step == 2 else {}))
  header, *lines = lines_of(capsys)
  assert header == [
      "step", "phase", "reward", "held-out", "length", "entropy", "KL", "loss",
      "grad", "tokens/s", "s", "left",
  ]
  middle = ["4.5", "1.250", "0.031", "-0.00123", "12.3", "1234"]
  assert lines == [
      ["1/12", "rl", "0.250", *middle, "60"],  # it compiled
      ["2/12", "rl", "0.250", "0.500", *middle, "2", "20", "s"],
      ["3/12", "rl", "0.250", *middle, "3", "22", "s"],  # 2.5 · 9
      ["4/12", "rl", "0.250", *middle, "100", "24", "s"],  # 3 · 8
  ]


def test_columns_stand_under_their_titles(tmp_path, clock, capsys):
  one = terminal.Terminal(writers.Place(tmp_path, 5, 100))
  one.write(6, "supervised", {"loss": 1.0, "grad_norm": 2.0})
  one.write(7, "supervised", {"loss": float("nan"), "grad_norm": 1e9})
  one.write(8, "rl", {"reward/mean": 0.5, "loss": 1.0})
  _, *lines = capsys.readouterr().err.splitlines()
  header, first, second, other, third = lines
  assert len(header) == len(first) == len(second) and len(other) == len(third)
  for line, value in ((first, "1"), (second, "nan")):
    end = header.index("loss") + len("loss")
    assert line[:end].endswith(f" {value}")
  assert "reward" not in header and "reward" in other and "grad" not in other
  for step in range(9, 40):
    one.write(step, "rl", {"reward/mean": 0.5, "loss": 1.0})
  said = capsys.readouterr().err.splitlines()
  assert said.count(other) == 1 and len(said) == 32


def test_answers_are_shown_in_a_line_each(tmp_path, clock, capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "40")
  one = terminal.Terminal(writers.Place(tmp_path, -1, 9))
  lines_of(capsys)
  answers = [
      ROW["answers"][0] | {"text": "\x1b[31m" + "word " * 20},
      ROW["answers"][1],
      *ROW["answers"] * 2,
  ]
  one.completions(1, [ROW | {"prompt": "x" * 99 + "\nend", "answers": answers}])
  said = capsys.readouterr().err.splitlines()
  assert said[0] == "Step 1, rl, sampled for row-1:"
  assert said[1] == "   prompt  …" + "x" * 23 + "⏎end"
  assert said[2] == "    1.000  ·[31mword word word word wo…"
  assert said[3] == "    0.000  a⏎fish (cut off)"
  assert said[-1].split()[:3] == ["and", "2", "more"]
  assert len(said) == 7 and all(len(line) <= 40 for line in said)
