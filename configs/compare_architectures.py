# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Every pattern of layers on one tree: full against exact and stop.

Question: on a tree of depth 4, what part of the ratio of tokens is `exact`
faster than whole sequences, and is its gradient theirs, for full attention,
sliding windows, latent attention, the gated delta rule and mixtures of them?

  python -m experiments.compare_trees --config=configs/compare_architectures.py

Cost: twelve minutes and 3 GB of memory on two quiet cores.
"""

import ml_collections

from configs import compare_trees


def get_config() -> ml_collections.ConfigDict:
  config = compare_trees.get_config()
  config.update({
      "architectures": (
          "full", "sliding", "sliding and full", "latent", "delta",
          "delta and full",
      ),
      "trees": ("agent",),
      "layers": 4,
  })
  return config
