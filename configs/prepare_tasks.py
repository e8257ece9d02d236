# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Prepare the rows of a task, so that training needs neither text nor network.

  python -m experiments.prepare_tasks --config.task=retrieval
  python -m experiments.prepare_tasks --config.task=retrieval \
    --config.model=smollm2 --config.retrieval.prompt_tokens=2048

Every setting of a task is a flag under its name; they are explained in
`branch_replay/tasks/`. Another setting makes other rows beside the old ones.

Cost: seconds to a minute.
"""

import dataclasses

import ml_collections

from branch_replay import tasks


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "task": "retrieval",  # one of those below
      "model": "",  # whose tokenizer and chat; empty: one id per character
      "data_dir": "",  # empty: ~/.cache/branch_replay/tasks
      **{
          name: {
              field.name: field.default for field in dataclasses.fields(kind)
          }
          for name, kind in tasks.RECIPES.items()
      },
  })
