# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Does it matter to learning how the prefix's gradient is taken?

A small model that was warmed up on short documents (configs/train_tiny.py)
learns to find a fact in 512 characters by GRPO, with the full, the exact, the
sampled and the stopped gradient; five seeds, the same steps and prompts.

  python -m experiments.learning_curves --config=configs/learning_modes.py

Cost: an hour on one core; may be interrupted and started again.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "base": "train_tiny",
      "seeds": (0, 1, 2, 3, 4),
      # Changes of the base config, by path: of all runs, and of a variant.
      "shared": (
          ("reinforce.steps", 120),
          ("reinforce.most_prompts", 0),
          ("evaluation.every", 20),
          ("schedule.chunk_size", 64),
      ),
      "variants": (
          ("exact", (("prefix_gradient", "exact"),)),
          ("full", (("prefix_gradient", "full"),)),
          ("sampled", (
              ("prefix_gradient", "sampled"), ("sampled.chunks", 3.0),
          )),
          ("stop", (("prefix_gradient", "stop"),)),
      ),
  })
