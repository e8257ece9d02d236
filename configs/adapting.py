# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter that learns along with the policy, against the same one frozen.

The model of configs/train_tiny.py, warmed up on short documents, learns by GRPO
to find a fact in 512 characters, while a drafter of one layer learns from its
rollouts. After ten steps a copy of the drafter is frozen; both then draft three
tokens a round on held-out prompts, every ten steps.

  python -m experiments.adapting --config=configs/adapting.py

Cost: ten minutes on two cores.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "base": "train_tiny",
      "shared": (
          ("reinforce.steps", 150),
          ("reinforce.most_prompts", 0),
          ("reinforce.speculation.drafter", "learned"),
          ("reinforce.speculation.draft_lengths", (0, 2)),
          ("evaluation.every", 50),
      ),
      "seed": 0,
      "every": 10,  # steps from probe to probe
      "freeze_after": 10,
      "draft_length": 3,
      "probes": 64,  # held-out prompts
  })
