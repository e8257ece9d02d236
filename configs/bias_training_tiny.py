# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The training study on a smaller model for a few steps, to see that it runs.

  python -m experiments.bias_training --config=configs/bias_training_tiny.py

Cost: half a minute, most of it compilation.
"""

import ml_collections

from configs import bias_training


def get_config() -> ml_collections.ConfigDict:
  config = bias_training.get_config()
  config.update({
      "train_seeds": 1,
      "steps": (0, 4),
      "tokens": 64,
      "batch": 2,
      "warmup_steps": 2,
      "validation_windows": 2,
      "documents": 1,
      "seeds": 2,
      "prompt_tokens": 256,
      "tail_tokens": 8,
      "branches": 2,
  })
  config.model.update({
      "width": 32, "num_layers": 2, "head_dim": 8, "ffn_width": 48,
  })
  return config
