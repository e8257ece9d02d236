# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Does the reward curve change when rollouts are drafted for? What of the time?

The model of configs/train_tiny.py, warmed up on short documents, learns to find
a fact in 512 characters by GRPO; its rollouts run with compaction alone, with
drafts by n-grams, by a learned drafter that is frozen after ten steps, and by
one that goes on learning. The tuner picks every draft length.

  python -m experiments.learning_curves --config=configs/learning_drafts.py

Cost: a quarter of an hour on one core; may be interrupted and started
again.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  learned = (("reinforce.speculation.drafter", "learned"),)
  return ml_collections.ConfigDict({
      "base": "train_tiny",
      "seeds": (2, 3),  # those of 0 to 3 that the warm-up suffices for
      "shared": (
          ("reinforce.steps", 100),
          ("reinforce.most_prompts", 0),
          ("evaluation.every", 20),
      ),
      "variants": (
          ("compaction alone", ()),
          ("n-grams", (("reinforce.speculation.drafter", "ngram"),)),
          ("learned, frozen", (
              *learned, ("reinforce.speculation.studies.until", 10),
          )),
          ("learned, adapting", learned),
      ),
  })
