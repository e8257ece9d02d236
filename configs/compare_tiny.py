# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same comparison on a small random model, in seconds.

Claim: the same equalities as `compare_smollm2`, on a model too small for the
times to mean anything.

  python -m experiments.compare_backward --config=configs/compare_tiny.py

Cost: half a minute, most of it compilation.
"""

import ml_collections

from configs import compare_smollm2


def get_config() -> ml_collections.ConfigDict:
  config = compare_smollm2.get_config()
  config.update({
      "model": "tiny",
      "prompt_tokens": 100,
      "branches": 5,
      "tail_tokens": 12,
      "chunk_size": 48,
      "branches_at_once": 2,
      "repeats": 2,
  })
  return config
