# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same benchmark on a model and sizes too small to mean anything.

  python -m experiments.bench_rollout --config=configs/bench_rollout_tiny.py

Cost: a minute, most of it compilation.
"""

import ml_collections

from configs import bench_rollout


def get_config() -> ml_collections.ConfigDict:
  config = bench_rollout.get_config()
  config.update({
      "model": "tiny",
      "prompt_tokens": 40,
      "branches": 3,
      "tail_tokens": 12,
      "variants": (
          (False, "none", 0), (True, "none", 0), (True, "ngram", 2),
          (True, "learned", "tuned"),
      ),
      "draft_lengths": (0, 1),
      "tuning": 6,
      "studies": {
          "prompts": 1, "text_tokens": 24, "vocabulary": 32, "updates": 2,
          "learning_rate": 1e-3, "rows": 2, "width": 12,
      },
      "rollouts": 1,
      "repeats": 2,
  })
  return config
