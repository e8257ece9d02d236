# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Time of a training step of a real model, by who drafts for its rollouts.

Ten steps of configs/train_smollm2.py with compaction alone, with drafts by
n-grams, by a learned drafter that is frozen after three steps, and by one that
goes on learning; its training is counted. The first steps compile.

  python -m experiments.learning_curves \
    --config=configs/learning_drafts_smollm2.py

Not run in full yet. Estimated cost: half an hour on two cores.
"""

import ml_collections

from configs import learning_drafts


def get_config() -> ml_collections.ConfigDict:
  config = learning_drafts.get_config()
  config.base, config.seeds = "train_smollm2", (0,)
  config.shared = (
      ("reinforce.steps", 10),
      ("reinforce.prompts", 4),
      ("evaluation.every", 10),
      ("evaluation.prompts", 8),
  )
  *others, (name, settings), last = config.variants
  frozen = (*settings[:-1], ("reinforce.speculation.studies.until", 3))
  config.variants = (*others, (name, frozen), last)
  return config
