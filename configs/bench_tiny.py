# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same benchmark on a model and shapes too small to mean anything.

  python -m experiments.bench_step --config=configs/bench_tiny.py

Cost: a minute, most of it compilation.
"""

import ml_collections

from configs import bench_step


def get_config() -> ml_collections.ConfigDict:
  config = bench_step.get_config()
  config.model.update({
      "vocab_size": 64,
      "width": 32,
      "num_layers": 2,
      "num_heads": 4,
      "num_kv_heads": 2,
      "head_dim": 16,
      "ffn_width": 48,
  })
  config.update({
      "grid": (((32, 64), (2,), (8,)),),
      "variants": (
          ("full", "keep"),
          ("exact", "recompute"),
          ("stop", "keep"),
          ("sampled", "keep"),
      ),
      "full_up_to": 32,
      "chunk_size": 16,
      "matrix": 128,
      "repeats": 2,
  })
  return config
