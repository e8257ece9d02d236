# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks with verifiable rewards, prepared once and read offline.

  recipe = tasks.recipe("retrieval", prompt_tokens=512, distractors=0)
  task = tasks.prepare(recipe)  # or tasks.load(recipe), if it was prepared
  for example in task.examples("train", seed=0, start=position):
    ...
    rewards = [task.reward(example, tail) for tail in rollout.tails()]

One's own rows and reward need no class:

  task = tasks.from_files("prompts.jsonl", reward="reward.py:score")
"""

import dataclasses

from branch_replay.tasks import arithmetic
from branch_replay.tasks import files
from branch_replay.tasks import reasoning_gym
from branch_replay.tasks import retrieval
from branch_replay.tasks import task as _task
from branch_replay.tasks.builder import DEFAULT_DATA_DIR
from branch_replay.tasks.builder import Recipe
from branch_replay.tasks.builder import load
from branch_replay.tasks.builder import prepare
from branch_replay.tasks.files import from_files
from branch_replay.tasks.task import Example
from branch_replay.tasks.task import Examples
from branch_replay.tasks.task import Scored
from branch_replay.tasks.task import Scorer
from branch_replay.tasks.task import Task
from branch_replay.tasks.task import check
from branch_replay.tasks.text import Characters
from branch_replay.tasks.text import Chat

RECIPES = {
    kind.name: kind
    for kind in (
        arithmetic.Arithmetic,
        files.Files,
        reasoning_gym.ReasoningGym,
        retrieval.Retrieval,
    )
}

__all__ = [
    "DEFAULT_DATA_DIR",
    "RECIPES",
    "Characters",
    "Chat",
    "Example",
    "Examples",
    "Recipe",
    "Scored",
    "Scorer",
    "Task",
    "check",
    "from_files",
    "load",
    "prepare",
    "recipe",
]


def recipe(name: str, **settings) -> Recipe | files.Files:
  """Makes the recipe of a task by the task's name.

  Args:
    name: "retrieval", "arithmetic", "reasoning_gym" or "file".
    **settings: attributes of the recipe's class; the others have their
      defaults.

  Returns:
    A recipe for `prepare` and `load`.

  Raises:
    ValueError: no such task or setting, or a setting out of range.
  """
  if name not in RECIPES:
    raise _task.unknown("task", name, RECIPES)
  kind = RECIPES[name]
  fields = [field.name for field in dataclasses.fields(kind)]
  for setting in settings:
    if setting not in fields:
      raise _task.unknown(f"setting of task {name!r}", setting, fields)
  return kind(**settings)
