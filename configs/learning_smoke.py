# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves in seconds, to see that they run; nothing is learnt.

  python -m experiments.learning_curves --config=configs/learning_smoke.py

Cost: half a minute.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "base": "train_smoke",
      "seeds": (0,),
      "shared": (
          ("evaluation.every", 1),
          ("reinforce.speculation.drafter", "none"),
      ),
      "variants": (
          ("exact", (("prefix_gradient", "exact"),)),
          ("stop", (("prefix_gradient", "stop"),)),
      ),
  })
