# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two groups of the batch study, to see that it runs.

  python -m experiments.bias_batch --config=configs/bias_batch_tiny.py

Cost: two minutes, most of it compilation, and 8 GB of memory.
"""

import ml_collections

from configs import bias_batch


def get_config() -> ml_collections.ConfigDict:
  config = bias_batch.get_config()
  config.update({
      "documents": 2,
      "seeds": 1,
      "prompt_tokens": 256,
      "tail_tokens": 8,
      "branches": 2,
      "advantages": "random",
      "counts": (1,),
  })
  config.estimators = {"top": 4.0}
  return config
