# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluating a model: the estimates, the command, and a checkpoint of a run."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest

import branch_replay as br
from branch_replay import tasks
from branch_replay.training import evaluation
from branch_replay.training import metrics
from branch_replay.training import phases
from branch_replay.weights import load
from configs import evaluate as evaluate_config
from configs import train as train_config
from experiments import evaluate
from experiments import generate
from experiments import train


@pytest.mark.parametrize("answers, right", [(1, 0), (1, 1), (5, 0), (5, 2),
                                            (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(answers, right):
  is_right = [number < right for number in range(answers)]
  for k in range(1, answers + 1):
    choices = list(itertools.combinations(is_right, k))
    share = sum(map(any, choices)) / len(choices)
    assert evaluation.pass_at_k(answers, right, k) == pytest.approx(share)


def test_pass_at_k_refuses_what_it_cannot_know():
  for answers, right, k in ((4, 2, 5), (4, 5, 1), (4, 2, 0), (4, -1, 1)):
    with pytest.raises(ValueError, match=f"pass@{k} of {right}"):
      evaluation.pass_at_k(answers, right, k)


def test_the_margin_by_hand():
  # Mean 2, deviations −2, 0, 2: s = 2, so 1.96 · 2 / √3.
  found = evaluation.estimate([0.0, 2.0, 4.0])
  assert found.mean == 2
  assert found.margin == pytest.approx(1.96 * 2 / math.sqrt(3))
  assert evaluation.estimate([7.0]) == (7.0, None)
  with pytest.raises(ValueError, match="no prompts"):
    evaluation.estimate([])


@pytest.fixture
def config(tmp_path):
  config = evaluate_config.get_config("tiny")
  config.data_dir = str(tmp_path / "tasks")
  return config


def test_the_command_says_what_sampling_gives(tmp_path, config):
  """Against answers that are sampled here, and a reward written here."""
  text = tasks.Characters()
  geometry = dataclasses.replace(load.TINY, vocab_size=text.vocab_size)
  decoder, params = load.random(geometry)
  br.save_hf(tmp_path / "model", geometry, params, stop_ids=text.stop_ids)
  config.model = str(tmp_path / "model")
  evaluate_config.switch(config, "task.name", "file")
  rows = [{"prompt": f"{n} and", "id": f"row{n}"} for n in range(4)]
  (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
  (tmp_path / "reward.py").write_text(
      "def score(answer, row):\n  return answer.count('a') + len(answer) / 8\n"
  )
  config.task.train = config.task.validation = str(tmp_path / "rows.jsonl")
  config.task.reward = f"{tmp_path / 'reward.py'}:score"
  config.passes = 0.5
  results = evaluate.run(config, tmp_path / "run")
  key, rewards, lengths = phases.evaluation_key(0), [], []
  for number, row in enumerate(rows):
    rollout = br.sample(
        decoder, params, text.prompt(row["prompt"]).ids,
        key=jax.random.fold_in(key, number), branches=3, max_tokens=4,
        stop_ids=text.stop_ids,
    )
    said = [
        text.decode([int(x) for x in tail if x not in text.stop_ids])
        for tail in rollout.tails()
    ]
    rewards.append([x.count("a") + len(x) / 8 for x in said])
    lengths.append([len(tail) for tail in rollout.tails()])
  found = {one["name"]: one for one in results["estimates"]}
  assert found["mean reward"]["mean"] == pytest.approx(np.mean(rewards))
  assert found["answer length"]["mean"] == np.mean(lengths)
  right = np.asarray(rewards) >= 0.5
  assert found["pass@1"]["mean"] == pytest.approx(right.mean())
  pairs = itertools.combinations(range(3), 2)
  of_pairs = [right[:, list(pair)].any(1).mean() for pair in pairs]
  assert found["pass@2"]["mean"] == pytest.approx(np.mean(of_pairs))
  lines = (tmp_path / "run/answers.jsonl").read_text().splitlines()
  answers = [json.loads(line) for line in lines]
  assert [x["id"] for x in answers] == [
      row["id"] for row in rows for _ in range(3)
  ]
  assert [x["reward"] for x in answers] == pytest.approx(
      list(np.ravel(rewards))
  )
  assert answers[0]["prompt"].endswith("0 and")


def test_it_goes_on_where_it_was_interrupted(tmp_path, config, monkeypatch):
  whole = evaluate.run(config, tmp_path / "whole")
  collect, calls = evaluate.experience.collect, []

  def interrupted(*args, **options):
    calls.append(args)
    if len(calls) == 3:
      raise KeyboardInterrupt
    return collect(*args, **options)

  monkeypatch.setattr(evaluate.experience, "collect", interrupted)
  with pytest.raises(KeyboardInterrupt):
    evaluate.run(config, tmp_path / "run")
  assert evaluate.run(config, tmp_path / "run")["estimates"] == (
      whole["estimates"]
  )
  assert len(calls) == 4  # two kept, one that was interrupted, one anew


@pytest.mark.parametrize("change, message", [
    ({"k": (4,)}, "pass@4"), ({"split": "tset"}, "Did you mean 'test'"),
    ({"prompts": 9}, "prompts=9 of 3"), ({"max_tokens": 9999}, "max_positions"),
    ({"task": {"name": ""}}, "There is no task"),
])
def test_what_cannot_be_evaluated_is_refused(tmp_path, config, change, message):
  with config.unlocked():
    config.update(change)
    if "task" in change:
      config.task = change["task"]
  with pytest.raises(ValueError, match=message):
    evaluate.run(config, tmp_path / "run")


@pytest.mark.exhaustive
def test_a_run_is_evaluated_as_it_evaluates_itself(tmp_path, config):
  of_run = train_config.get_config("tiny")
  of_run.data_dir = config.data_dir
  of_run.phases = ("reinforce",)
  of_run.reinforce.speculation.drafter = "none"
  train.run(of_run, tmp_path / "run")
  (*_, last) = metrics.read(tmp_path / "run")
  with config.unlocked():
    config.task = {"name": ""}  # the run's own
  config.model, config.prompts = str(tmp_path / "run"), 2
  config.branches, config.max_tokens = 4, 5
  results = evaluate.run(config, tmp_path / "evaluated")
  assert results["estimates"][0]["mean"] == pytest.approx(last["eval/reward"])


def test_answers_to_a_prompt_by_hand(capsys):
  model = br.load("tiny")
  first = generate.generate(model, "hello", branches=2, max_tokens=5)
  said = capsys.readouterr().out
  assert first[0] == first[1]  # greedy
  assert "--- answer 2, " in said and "tokens" in said
  with pytest.raises(ValueError, match="The prompt is empty"):
    generate.generate(model, " ")
  with pytest.raises(ValueError, match="needs a chat template"):
    generate.generate(model, "hello", system="Be brief.")
