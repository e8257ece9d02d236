# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The long run on a short prefix, to see that it runs.

  python -m experiments.long_run --config=configs/long_run_tiny.py

Cost: seconds.
"""

import ml_collections

from configs import long_run


def get_config() -> ml_collections.ConfigDict:
  config = long_run.get_config()
  config.update({"prefix": 1000, "tail_tokens": 8, "chunk_size": 256})
  return config
