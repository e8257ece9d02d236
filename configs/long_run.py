# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A prefix as long as it gets on eight virtual devices, end to end.

Claim: the schedule that is compiled for accelerators runs: half a million
positions with `stop`, a quarter of a million with `exact`, forward and
backward, in memory that grows by the state and its accumulator alone. Not run
in full yet: no result is committed.

  python -m experiments.long_run
  python -m experiments.long_run --config.prefix=524288 --config.mode=stop

Cost: tens of minutes on two cores; it shows progress by the chunk, and an
interrupt stops between two.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "model": {
          "vocab_size": 256,
          "width": 64,
          "num_layers": 2,
          "num_heads": 1,
          "num_kv_heads": 1,
          "head_dim": 64,
          "ffn_width": 192,
          "max_positions": 1 << 22,
      },
      "prefix": 262144,
      "branches": 8,
      "tail_tokens": 64,
      "mode": "exact",
      "chunk_size": 8192,
      "accumulator_dtype": "float32",
      "devices": 8,
      "seed": 0,
  })
