# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay against the full backward pass, on a real model and text.

Claim: on SmolLM2-135M-Instruct, a 1024-token prompt of real text and 8 sampled
answers of 64 tokens, `exact` gives the gradient of the full backward pass to
rounding (relative error below 1e-4) for about a fifth of the work, `stop` gives
a gradient that points elsewhere, for about an eighth, and `banded` is between
them, much nearer to `exact`.

  make compare
  python -m experiments.compare_backward --config=configs/compare_backward.py

Cost: about five minutes and 4 GB of memory on two cores. The committed result
is compare_smollm2.json. `:tiny` shows the same equalities on a small random
model in half a minute.
"""

from configs import variants

_FIELDS = {
    "model": "smollm2",
    "compute_dtype": "float32",
    "prompt_tokens": 1024,
    "branches": 8, "tail_tokens": 64,
    "temperature": 1.0,
    "modes": ("full", "exact", "banded", "stop"),  # and "sampled"
    "sampled_chunks": 4.0,  # of a sampled prefix pass, expected
    "band": {"window": 256, "sinks": 64},
    "chunk_size": 1024,
    "branches_at_once": 0,  # 0: all of a group
    "activations": "auto",
    "memory_budget_gib": 4.0,
    "document": "",  # a text file; empty: the Python language reference
    "devices": 1,
    "repeats": 3, "seed": 0,
}
_VARIANTS = {
    "tiny": {
        "model": "tiny", "prompt_tokens": 100, "branches": 5,
        "tail_tokens": 12, "chunk_size": 48, "branches_at_once": 2,
        "band": {"window": 16, "sinks": 4}, "repeats": 2,
    },
}

get_config = variants.getter(_FIELDS, _VARIANTS)
