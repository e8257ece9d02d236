# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How stale may a captured prefix be?

The model of configs/train.py:small, warmed up on short documents: after 0, 1,
2, 4 and 8 updates on one captured batch, how far are log-probs, loss and
gradient of the stale replay from those of a fresh capture?

  python -m experiments.staleness --config=configs/staleness.py

Cost: five minutes on one core, most of it the warm-up.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "base": "small",  # variant of configs/train.py
      "shared": (),
      "seed": 2,  # one whose warm-up leaves groups that differ in reward
      "batches": 8,
      "updates": (0, 1, 2, 4, 8),
  })
