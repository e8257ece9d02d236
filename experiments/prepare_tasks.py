# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the rows of a task once; training then only reads them.

  python -m experiments.prepare_tasks --config.task=retrieval
  python -m experiments.prepare_tasks --config.task=arithmetic \
    --config.arithmetic.max_digits=3 --config.data_dir=data
"""

import pathlib

import ml_collections

from branch_replay import tasks
from branch_replay.weights import load
from experiments import cli


def text_of(model: str) -> tasks.Characters | tasks.Chat:
  """The encoder of prompts for a model; for "", one id per character."""
  if not model:
    return tasks.Characters()
  return tasks.Chat(load.load(model))


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> tasks.Task:
  """Prepares what is not there yet and shows a row of it."""
  del workdir  # rows go to the data directory, where all experiments look
  settings = config[config.task] if config.task in tasks.RECIPES else {}
  recipe = tasks.recipe(config.task, **settings)
  text = text_of(config.model)
  task = tasks.prepare(recipe, text=text, data_dir=config.data_dir or None)
  example = task.split("train")[0]
  counts = ", ".join(f"{len(rows)} {name}" for name, rows in task.rows.items())
  print(f"{task.name}: {counts} rows")
  size = len(example.prompt_ids)
  answer = "no answer to learn from"
  if example.answer is not None:
    answer = f"answer {example.answer!r}"
  print(f"{example.id}: {size} ids, {answer}")
  print(text.decode(example.prompt_ids.tolist()))
  return task


if __name__ == "__main__":
  cli.main(run, "configs/prepare_tasks.py")
