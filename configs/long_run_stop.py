# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Half a million positions with `stop`, end to end on one machine.

Claim: as of configs/long_run.py, of 524 288 positions without an accumulator.

  python -m experiments.long_run --config=configs/long_run_stop.py

Cost: about fifteen minutes of one core and 1.5 GiB of memory.
"""

import ml_collections

from configs import long_run


def get_config() -> ml_collections.ConfigDict:
  config = long_run.get_config()
  config.update({"prefix": 524288, "mode": "stop"})
  return config
