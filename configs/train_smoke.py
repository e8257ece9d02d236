# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop in seconds, to see that it runs; nothing is learnt.

  python -m experiments.train --config=configs/train_smoke.py

Cost: half a minute.
"""

import ml_collections

from configs import train_tiny


def get_config() -> ml_collections.ConfigDict:
  config = train_tiny.get_config()
  config.phases = ("short", "reinforce")
  config.short.steps = 2
  config.short.prompts = 2
  config.short.optimizer.warmup = 1
  config.short.task.prompt_tokens = 48
  config.task.prompt_tokens = 64
  config.task.train = 16
  config.task.validation = 4
  config.task.test = 4
  config.reinforce.steps = 2
  config.reinforce.prompts = 2
  config.reinforce.optimizer.warmup = 1
  config.reinforce.speculation.drafter = "learned"
  config.reinforce.speculation.draft_lengths = (0, 1)
  config.reinforce.speculation.studies.updates = 1
  config.reinforce.speculation.studies.width = 8
  config.evaluation.prompts = 2
  config.evaluation.every = 2
  config.checkpoint_every = 1
  return config
