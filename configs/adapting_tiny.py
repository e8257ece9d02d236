# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same experiment on a model that has learnt nothing, to see that it runs.

  python -m experiments.adapting --config=configs/adapting_tiny.py

Cost: a minute, most of it compilation.
"""

import ml_collections

from configs import adapting


def get_config() -> ml_collections.ConfigDict:
  config = adapting.get_config()
  config.base = "train_smoke"
  config.shared = (
      ("phases", ("reinforce",)),
      ("reinforce.steps", 2),
  )
  config.every, config.freeze_after, config.probes = 1, 1, 1
  return config
