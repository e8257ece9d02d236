# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient over a very long prefix, end to end on one machine.

Claim: forward and backward over 262 144 positions with `exact`, in memory that
grows by the state and its accumulator alone: 1 KiB a position each.
docs/speed.md has the results.

  python -m experiments.long_run --config=configs/long_run.py
  python -m experiments.long_run --config=configs/long_run.py --devices=8

Cost: about fifteen minutes of one core and 1.5 GiB of memory. The second
command deals the same work to eight virtual devices, which take turns: the
schedule that is compiled for accelerators, and several times slower.

`:stop`, 524 288 positions with `stop` and without an accumulator. The same
  cost.
`:hybrid`, 2 097 152 positions with `exact`, of gated delta layers and sliding
  windows in turns. Where no layer keeps every position, work grows with the
  prefix and not with its square; one window and one recurrent state a chunk are
  kept. Six minutes and 2 GiB.
`:hybrid_stop`, the same with `stop`. A minute and 1.5 GiB.
`:tiny`, seconds.
"""

from configs import variants

_FIELDS = {
    "model": {
        "vocab_size": 256, "width": 64, "num_layers": 2, "num_heads": 1,
        "num_kv_heads": 1, "head_dim": 64, "ffn_width": 192,
        "max_positions": 1 << 22,
    },
    "prefix": 262144,
    "branches": 8, "tail_tokens": 64,
    "mode": "exact",
    "chunk_size": 8192,
    "accumulator_dtype": "float32",
    "devices": 1,
    "offload": False,  # state and accumulator in the host's memory
    "seed": 0,
}
_HYBRID = {
    "model": {
        "num_layers": 4,
        "layer_pattern": ("delta", "sliding"),
        "window": 512,
        "delta": {
            "key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 32,
        },
    },
    "prefix": 2097152,
}
_VARIANTS = {
    "stop": {"prefix": 524288, "mode": "stop"}, "hybrid": _HYBRID,
    "hybrid_stop": _HYBRID | {"mode": "stop"},
    "tiny": {"prefix": 1000, "tail_tokens": 8, "chunk_size": 256},
}
get_config = variants.getter(_FIELDS, _VARIANTS)
