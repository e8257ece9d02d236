# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same breakdown of sizes too small to mean anything.

  python -m experiments.time_breakdown --config=configs/time_breakdown_tiny.py

Cost: half a minute, most of it compilation.
"""

import ml_collections

from configs import time_breakdown


def get_config() -> ml_collections.ConfigDict:
  config = time_breakdown.get_config()
  config.update({"model": "tiny", "prefix": 32, "branches": 2, "tail": 8})
  config.repeats = 2
  return config
