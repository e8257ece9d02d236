# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Do PPO and DPO learn on branch replay as they do on whole sequences?

The model of configs/train_tiny.py, warmed up on short documents, learns to find
a fact in 512 characters by PPO with a value head, and by DPO on pairs of its
own answers, each with the exact gradient of branch replay and on full
sequences.

  python -m experiments.learning_curves --config=configs/learning_algorithms.py

Cost: half an hour on one core; may be interrupted and started again.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  ppo = (
      ("reinforce.algorithm.name", "ppo"),
      ("reinforce.algorithm.settings", {"value_clip": None}),
  )
  dpo = (
      ("reinforce.algorithm.name", "dpo"),
      ("reinforce.algorithm.settings", {"beta": 0.1}),
  )
  return ml_collections.ConfigDict({
      "base": "train_tiny",
      "seeds": (2, 3),  # those of 0 to 3 that the warm-up suffices for
      "shared": (
          ("reinforce.steps", 100),
          ("reinforce.most_prompts", 0),
          ("evaluation.every", 20),
      ),
      "variants": (
          ("PPO, exact", (*ppo, ("prefix_gradient", "exact"))),
          ("PPO, full", (*ppo, ("prefix_gradient", "full"))),
          ("DPO, exact", (*dpo, ("prefix_gradient", "exact"))),
          ("DPO, full", (*dpo, ("prefix_gradient", "full"))),
      ),
  })
