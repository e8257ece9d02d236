# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two million positions with `exact`, of layers that forget.

Claim: where no layer keeps every position, work grows with the prefix and not
with its square: forward and backward over 2 097 152 positions, of gated delta
layers and sliding windows in turns. What is kept is one window and one
recurrent state a chunk.

  python -m experiments.long_run --config=configs/long_run_hybrid.py

Cost: about six minutes of one core and 2 GiB of memory, of which compilation
takes half a minute.
"""

import ml_collections

from configs import long_run


def get_config() -> ml_collections.ConfigDict:
  config = long_run.get_config()
  config.model.update({
      "num_layers": 4,
      "layer_pattern": ("delta", "sliding"),
      "window": 512,
  })
  config.model.delta = ml_collections.ConfigDict({
      "key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32,
  })
  config.prefix = 2097152
  return config
