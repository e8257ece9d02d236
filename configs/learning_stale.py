# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What does a stale capture cost in reward?

The model of configs/train_tiny.py, warmed up on short documents, makes eight
GRPO updates on every batch of answers, and captures the prefixes anew before
each of them, or before every second, fourth or eighth.

  python -m experiments.learning_curves --config=configs/learning_stale.py

Cost: a quarter of an hour on one core; may be interrupted and started
again.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "base": "train_tiny",
      "seeds": (2, 3),  # those of 0 to 3 that the warm-up suffices for
      "shared": (
          ("reinforce.steps", 20),
          ("reinforce.epochs", 8),
          ("reinforce.most_prompts", 0),
          ("evaluation.every", 5),
      ),
      "variants": tuple(
          (f"a capture for {k}", (("reinforce.capture_every", k),))
          for k in (1, 2, 4, 8)
      ),
  })
