# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two million positions with `stop`, of layers that forget.

Claim: as of configs/long_run_hybrid.py, without a cotangent of the prefix.

  python -m experiments.long_run --config=configs/long_run_hybrid_stop.py

Cost: a minute of one core and 1.5 GiB of memory.
"""

import ml_collections

from configs import long_run_hybrid


def get_config() -> ml_collections.ConfigDict:
  config = long_run_hybrid.get_config()
  config.mode = "stop"
  return config
