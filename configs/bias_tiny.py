# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One case of the bias study, to see that it runs.

  python -m experiments.bias_sweep --config=configs/bias_tiny.py

Cost: about a minute, most of it compilation.
"""

import ml_collections

from configs import bias_sweep


def get_config() -> ml_collections.ConfigDict:
  config = bias_sweep.get_config()
  config.update({
      "documents": 1,
      "shapes": ((256, 8, 2, "random", 1),),
      "retrieval": (),
      "budgets": (),
  })
  return config
