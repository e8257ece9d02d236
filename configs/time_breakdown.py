# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes, and whether less compute is less.

One group of SmolLM2-135M: eight answers of 64 tokens to a prompt of 2048 random
tokens; capture, rollout, replay, prefix pass and optimizer, each alone.

  python -m experiments.time_breakdown --config=configs/time_breakdown.py

Cost: twelve minutes on two cores that do nothing else. `:tiny` takes half a
minute, most of it compilation.
"""

from configs import variants

_FIELDS = {
    "model": "smollm2", "prefix": 2048, "branches": 8, "tail": 64,
    "chunk_size": 1024, "repeats": 3, "seed": 0,
}
_VARIANTS = {
    "tiny": {
        "model": "tiny", "prefix": 32, "branches": 2, "tail": 8, "repeats": 2,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
