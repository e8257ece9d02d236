# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How good are a model's answers?

Samples answers to the prompts of a task's split, and reports their mean reward
and pass@k with confidence, their lengths, and the answers themselves.

  python -m experiments.evaluate --config.model=runs/train
  python -m experiments.evaluate --config.model=smollm2 \
    --config.task.name=file --config.task.train=prompts.jsonl \
    --config.task.reward=reward.py:score

Cost: that of sampling. `:tiny` evaluates a model of random parameters on
arithmetic, in seconds.
"""

import ml_collections

from branch_replay.training import run_config
from configs import variants

_FIELDS = {
    # A name, a GGUF file, a Hugging Face directory, or the workdir of a run.
    "model": "smollm2",
    "compute_dtype": "float32",  # or "file": that of the weights
    "task": {"name": ""},  # one of a name, with its settings; "": the run's own
    "data_dir": "",  # of prepared rows; "" for ~/.cache/branch_replay/tasks
    "split": "validation",
    "prompts": 0,  # the first of the split; 0 for all
    "branches": 4,  # answers to every prompt
    "max_tokens": 256,  # the most of an answer
    "temperature": 1.0,  # 0 takes the likeliest token
    "top_k": 0,  # only the likeliest so many ids; 0 for all
    "top_p": 0.0,  # only the likeliest ids of this probability; 0 for all
    "k": (1,),  # of pass@k, each at most `branches`
    "passes": 1.0,  # reward from which on an answer counts as right
    "seed": 0,  # of the sampling noise
    "chunk_size": 1024,  # most positions of a prompt that are run at a time
}
_VARIANTS = {
    "tiny": {
        "model": "tiny",
        "task": {"name": "arithmetic", "train": 4, "validation": 3, "test": 2},
        "max_tokens": 4, "branches": 3, "k": (1, 2),
    },
}


def switch(config, path: str, value: str) -> None:
  """Gives the config the fields of the task that is chosen."""
  if path == "task.name" and value and value != config.task.name:
    with config.unlocked():
      config.task = ml_collections.ConfigDict(run_config.of_task(value))


def meanings(config) -> dict[str, str]:
  """What the task's fields mean; the others have comments above."""
  if not config.task.name:
    return {}
  return run_config.task_meanings(config.task.name)


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict(_FIELDS)
  if variant:
    changes = dict(variants.chosen(_VARIANTS, variant))
    config.update({x: y for x, y in changes.items() if x != "task"})
    config.task = ml_collections.ConfigDict(
        run_config.of_task(**changes["task"])
    )
  return config
