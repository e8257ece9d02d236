# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A quarter of a million positions with `exact`, end to end on one machine.

Claim: forward and backward over 262 144 positions, in memory that grows by the
state and its accumulator alone: 1 KiB a position each. docs/speed.md has the
result.

  python -m experiments.long_run --config=configs/long_run.py
  python -m experiments.long_run --config=configs/long_run.py --devices=8

Cost: about fifteen minutes of one core and 1.5 GiB of memory.

The second command deals the same work to eight virtual devices, which take
turns: the schedule that is compiled for accelerators, and several times slower.
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
      "devices": 1,
      "offload": False,  # state and accumulator in the host's memory
      "seed": 0,
  })
