# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same benchmark on shapes too small to mean anything, anywhere.

  python -m experiments.bench_accelerator \
    --config=configs/bench_accelerator_tiny.py

Cost: a minute, most of it compilation.
"""

import ml_collections

from configs import bench_accelerator


def get_config() -> ml_collections.ConfigDict:
  config = bench_accelerator.get_config()
  config.model.update({
      "vocab_size": 64,
      "width": 32,
      "num_layers": 1,
      "num_kv_heads": 2,
      "head_dim": 16,
      "ffn_width": 48,
      "compute_dtype": "float32",
  })
  config.update({
      "prefixes": (256, 512),
      "attention": ("loops", "cudnn"),
      "branches": 2,
      "tail_tokens": 8,
      "chunk_size": 128,
      "reference_up_to": 256,
      "repeats": 2,
  })
  return config
