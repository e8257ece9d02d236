# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison of trees, on shapes too small for the times to mean anything.

Claim: the same equalities as `compare_trees`.

  python -m experiments.compare_trees --config=configs/compare_trees_tiny.py

Cost: half a minute, most of it compilation.
"""

import ml_collections

from configs import compare_trees


def get_config() -> ml_collections.ConfigDict:
  config = compare_trees.get_config()
  config.update({
      "trees": ("agent",),
      "width": 32,
      "layers": 1,
      "heads": 2,
      "vocab_size": 64,
      "path_tokens": 160,
      "chunk_size": 64,
      "repeats": 1,
  })
  return config
