# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a model on a task: mean reward, pass@k, lengths, and its answers.

Writes results.json and answers.jsonl, one answer a line. A run that was
interrupted goes on by the same command.

  python -m experiments.evaluate --config.model=runs/train
  python -m experiments.evaluate --config.model=smollm2 \
    --config.task.name=file --config.task.train=prompts.jsonl \
    --config.task.reward=reward.py:score
"""

import json
import pathlib

import jax
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay import tasks
from branch_replay.tasks import task as task_lib
from branch_replay.training import build
from branch_replay.training import evaluation
from branch_replay.training import experience
from branch_replay.training import json_lines
from branch_replay.training import loop
from branch_replay.training import phases
from branch_replay.training import run_config
from experiments import cli
from experiments.reporting import record
from experiments.reporting import tables


def load(config):
  """The model that is evaluated, how text becomes its ids, and the task.

  Raises:
    ValueError: no such model, or no task.
  """
  folder = pathlib.Path(config.model)
  if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
    return _of_run(config, folder)
  if not config.task.name:
    raise ValueError(
        "There is no task: name one, as in --config.task.name=file."
    )
  model = br.load(config.model, compute_dtype=config.compute_dtype)
  text = tasks.Chat(model) if model.tokenizer is not None else (
      tasks.Characters()
  )
  return model, text, _task(config.task, text, config.data_dir)


def _of_run(config, folder: pathlib.Path):
  """The latest checkpoint of a training run, and its task unless one is named.
  """
  of_run = ml_collections.ConfigDict(
      json.loads((folder / "config.json").read_text())
  )
  settings = run_config.of_config(of_run)
  prepared = build.build(settings)
  model = prepared.trained(
      loop.restored(prepared.run, prepared.start.params, folder)
  )
  text = tasks.Chat(model) if settings.pretrained else tasks.Characters()
  task = config.task if config.task.name else of_run.task
  return model, text, _task(task, text, config.data_dir or of_run.data_dir)


def _task(of, text, data_dir: str) -> tasks.Task:
  settings = {
      x: tuple(y) if isinstance(y, list) else y for x, y in of.to_dict().items()
  }
  recipe = tasks.recipe(settings.pop("name"), **settings)
  return tasks.prepare(recipe, text=text, data_dir=data_dir or None)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Evaluates, or goes on with it, and returns the results.

  Raises:
    ValueError: settings that cannot be run, before anything is sampled.
  """
  workdir = pathlib.Path(workdir).resolve()
  for k in config.k:
    evaluation.pass_at_k(config.branches, 0, k)  # refused if k is too large
  model, text, task = load(config)
  task_lib.check_scored(task)
  rows = task.split(config.split)
  count = config.prompts or len(rows)
  if not 0 < count <= len(rows):
    raise ValueError(
        f"prompts={config.prompts} of {len(rows)} in {config.split!r}."
    )
  rollouts = experience.Rollouts(
      config.branches, config.max_tokens,
      br.Law(config.temperature, config.top_k or None, config.top_p or None),
      hold="nothing",
  )
  phases.check_room(model.config, task, config.split, rollouts)
  cases = record.resume(workdir, config)
  results = record.begin(config, cases=cases)
  key = phases.evaluation_key(config.seed)
  bar = tqdm.tqdm(range(count), unit="prompt", initial=len(cases), total=count)
  for number in range(len(cases), count):
    one = experience.collect(
        model.model, model.params, task, rows[number], rollouts,
        key=jax.random.fold_in(key, number), version=0,
        schedule=br.Schedule(chunk_size=config.chunk_size),
    )
    case = _case(one, text, task, rows[number])
    record.append(workdir, case)
    cases.append(case)
    bar.update()
    bar.set_postfix(reward=f"{np.mean(_rewards(cases)):.3f}")
  bar.close()
  write_answers(workdir / "answers.jsonl", cases)
  results["estimates"] = estimates(cases, config.k, config.passes)
  del results["cases"]  # they are in answers.jsonl
  return record.finish(workdir, results, table=table)


def _case(one: experience.Experience, text, task, example) -> dict:
  lengths = np.asarray(one.group.tail_lengths)
  answers = [
      [int(x) for x in row[:length] if int(x) not in task.stop_ids]
      for row, length in zip(np.asarray(one.group.tails), lengths, strict=True)
  ]
  return {
      "id": one.id,
      "prompt": text.decode(np.asarray(example.prompt_ids).tolist()),
      "answers": [
          {"text": text.decode(ids), "reward": float(reward),
           "length": int(length), "finished": bool(finished)}
          for ids, reward, length, finished in zip(
              answers, one.rewards, lengths, one.finished, strict=True
          )
      ],
  }


def write_answers(file: pathlib.Path, cases: list[dict]) -> None:
  """Writes one answer a line, with its prompt."""
  lines = [
      json_lines.dumps({"id": case["id"], "prompt": case["prompt"], **answer})
      for case in cases for answer in case["answers"]
  ]
  file.write_text("\n".join(lines) + "\n")


def _rewards(cases) -> np.ndarray:
  return np.array([[x["reward"] for x in case["answers"]] for case in cases])


def estimates(cases: list[dict], ks, passes: float) -> list[dict]:
  """Mean reward, pass@k, lengths and the share cut off, over prompts."""
  rewards_NG = _rewards(cases)
  right_N = (rewards_NG >= passes).sum(1)
  branches = rewards_NG.shape[1]

  def of(name: str) -> np.ndarray:
    return np.array([[x[name] for x in case["answers"]] for case in cases])

  found = {"mean reward": rewards_NG.mean(1)} | {
      f"pass@{k}": [
          evaluation.pass_at_k(branches, int(right), k) for right in right_N
      ] for k in ks
  } | {
      "answer length": of("length").mean(1),
      "cut off": 1.0 - of("finished").mean(1),
  }
  return [
      {"name": name, **evaluation.estimate(values)._asdict()}
      for name, values in found.items()
  ] + [{"name": "median length", "mean": float(np.median(of("length"))),
        "margin": None}]


def table(results: dict) -> str:
  """The estimates, each with its 95 % confidence interval over prompts."""
  def value(one):
    margin = "" if one["margin"] is None else f" ± {one['margin']:.3f}"
    return f"{one['mean']:.3f}{margin}"

  shown = tables.markdown({"": "{name}", "value": value}, results["estimates"])
  passes = results["config"]["passes"]
  return f"{shown}\n\nAn answer is right from a reward of {passes} on (passes)."


if __name__ == "__main__":
  cli.main(run, "configs/evaluate.py")
