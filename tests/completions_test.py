# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled answers that a run writes: what is in them, and when."""

import dataclasses

import numpy as np
import pytest

from branch_replay.data import group as group_lib
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.training import algorithms
from branch_replay.training import completions
from branch_replay.training import experience
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training import terminal
from branch_replay.training import writers
from tests import tiny
from tests import training_test

LETTERS = "_ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def decode(ids):
  assert all(type(id_) is int for id_ in ids)
  return "".join(LETTERS[id_ % len(LETTERS)] for id_ in ids)


def sampled(prompt=(3, 1, 2), counts=None) -> experience.Experience:
  """Two answers: 2 tokens with the stop id 0, and 3 that were cut off."""
  room = group_lib.bucket(len(prompt)) + 1
  group = group_lib.Group(
      np.array([*prompt, *[0] * (room - len(prompt))]), np.int32(len(prompt)),
      np.array([[4, 0, 0, 0], [5, 6, 7, 0]]), np.array([2, 3]),
  )
  return experience.Experience(
      "row-7", group, np.zeros((2, 4), np.float32),
      np.array([1.0, 0.5], np.float32), np.array([True, False]), counts=counts,
  )


def rows_of(one, **changes):
  settings = dict(
      algorithm=algorithms.PolicyGradient(objectives.grpo(), "group_centred"),
      prompts=2, decode=decode,
  )
  return completions.rows(5, "rl", [one], **settings | changes)


def test_a_row_is_a_prompt_with_its_answers():
  assert rows_of(sampled()) == [{
      "step": 5, "phase": "rl", "example": "row-7", "prompt": "CAB",
      "prompt_length": 3, "left_out": 0,
      "answers": [
          {
              "text": "D", "reward": 1.0, "length": 2, "finished": True,
              "advantage": 0.25,
          },
          {
              "text": "EFG", "reward": 0.5, "length": 3, "finished": False,
              "advantage": -0.25,
          },
      ],
  }]


def test_without_a_function_ids_are_written():
  (row,) = rows_of(sampled(), decode=None)
  assert row["prompt"] == "3 1 2"
  assert [one["text"] for one in row["answers"]] == ["4", "5 6 7"]


def test_the_middle_of_a_long_prompt_is_left_out():
  most = completions.MOST_PROMPT
  prompt = [1] * (most // 2) + [2] * 10 + [3] * (most // 2)
  (row,) = rows_of(sampled(prompt))
  assert (row["prompt_length"], row["left_out"]) == (most + 10, 10)
  half = most // 2
  assert row["prompt"] == "A" * half + " […10 tokens left out…] " + "C" * half
  assert rows_of(sampled(prompt[10:]))[0]["left_out"] == 0


def test_advantages_are_those_that_are_learnt_from():
  """Nothing is compared with an answer that is left out of learning."""
  left = sampled(counts=np.array([True, False]))
  (row,) = rows_of(left)
  assert [one["advantage"] for one in row["answers"]] == [0.0, 0.0]
  assert [one["length"] for one in row["answers"]] == [2, 3]
  for algorithm in (
      algorithms.ProximalPolicy(objectives.ppo()),
      algorithms.Preference(preference.Dpo()),
  ):
    (row,) = rows_of(sampled(), algorithm=algorithm)
    assert "advantage" not in row["answers"][0]


def test_at_most_so_many_prompts_are_described():
  found = completions.rows(
      1, "rl", [sampled()] * 3, prompts=2, decode=decode,
      algorithm=algorithms.PolicyGradient(objectives.grpo()),
  )
  assert len(found) == 2


@pytest.fixture(scope="module")
def small():
  return tiny.model(dataclasses.replace(tiny.BASE, num_layers=1))


@pytest.mark.exhaustive
def test_a_run_writes_answers_and_goes_on_as_if_not_stopped(
    tmp_path, small, capsys
):
  model, params = small
  run = dataclasses.replace(
      training_test.run_of(model, steps=4), decode=decode, completions_every=4,
      completion_prompts=1, writers=(writers.TensorBoard, terminal.Terminal),
  )
  loop.train(run, params, tmp_path / "straight")
  rows = metrics.read(tmp_path / "straight", metrics.COMPLETIONS)
  # Two supervised steps sample nothing; the third is the phase's first.
  assert [row["step"] for row in rows] == [3, 4]
  task = run.phases[1].task
  order = task.examples("train", seed=0)
  examples = [next(order) for _ in range(4)]
  for row, example in zip(rows, examples[::2], strict=True):
    assert row["phase"] == "rl" and row["example"] == example.id
    assert row["prompt"] == decode(example.prompt_ids.tolist())
    assert len(row["answers"]) == 4
    for answer in row["answers"]:  # the reward is the number of tokens / 4
      assert answer["reward"] == len(answer["text"]) / 4
      assert answer["length"] == len(answer["text"]) + answer["finished"]
  text = rows[0]["answers"][0]["text"]
  (events,) = (tmp_path / "straight" / "tensorboard").iterdir()
  assert f"\n    {text}".encode() in events.read_bytes()
  said = capsys.readouterr().err
  assert f"Step 3, rl, sampled for {examples[0].id}:" in said
  # Killed after step 5; the last checkpoint is of step 3.
  with pytest.raises(RuntimeError, match="killed"):
    loop.train(
        dataclasses.replace(
            training_test.killed_after(run, 5), checkpoint_every=3
        ),
        params, tmp_path / "stopped",
    )
  whole = metrics.read(tmp_path / "stopped", metrics.COMPLETIONS)
  assert [row["step"] for row in whole] == [3, 4]
  with (tmp_path / "stopped" / metrics.COMPLETIONS).open("a") as file:
    file.write('{"step": 5, "pha')
  loop.train(run, params, tmp_path / "stopped")
  assert metrics.read(tmp_path / "stopped", metrics.COMPLETIONS) == rows
  logged = metrics.read(tmp_path / "stopped")
  assert [row["step"] for row in logged] == [0, 1, 2, 3, 4, 5, 6]
  # Answers of 4 tokens at most: sampled, and then learnt from.
  for row in logged[3:]:
    seconds = row["time/rollout"] + row["time/learn"]
    tokens = row["tokens_sampled"] + row["tokens_learnt"]
    assert row["tokens_learnt"] == row["tokens_sampled"]
    assert 0.5 < row["tokens_per_second"] / (tokens / seconds) <= 1


def test_a_run_may_write_no_answers(tmp_path, small):
  model, params = small
  run = dataclasses.replace(
      training_test.run_of(model, steps=1), completions_every=0
  )
  loop.train(run, params, tmp_path)
  assert not metrics.read(tmp_path, metrics.COMPLETIONS)


@pytest.mark.parametrize("field, value", [
    ("completions_every", -1), ("completion_prompts", 0),
])
def test_settings_that_mean_nothing_are_refused(small, field, value):
  run = training_test.run_of(small[0])
  with pytest.raises(ValueError, match=f"{field} must be at least"):
    dataclasses.replace(run, **{field: value})
