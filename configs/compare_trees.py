# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of an agent's episodes: full against exact and stop.

Claim: on a tree of 8 leaves and depth 4 that shares 70 % of its tokens, on a
trace of two turns with a tool, and on a group, `exact` gives the gradient of
the full backward pass to rounding (relative error below 1e-5 in float32);
`stop` gives a gradient that points elsewhere. The aim of 0.8 of the ratio of
tokens as a speed-up ("of it" in the table) is missed by exact: 0.73 to 0.79.

  python -m experiments.compare_trees --config=configs/compare_trees.py

Cost: seven minutes and some 3 GB of memory on two quiet cores;
most of it is the full backward pass.

`:architectures` asks the same of one tree and of full attention, sliding
windows, latent attention, the gated delta rule and mixtures of them; its result
is compare_architectures.json. Cost: twelve minutes and 3 GB of memory.
`:tiny` takes half a minute.
"""

from configs import variants

_FIELDS = {
    "architectures": ("full",),
    "trees": ("agent", "tools", "group"),
    "width": 384,
    "layers": 8,
    "heads": 6,
    "vocab_size": 4096,
    "path_tokens": 2048,  # of every sequence
    "modes": ("full", "exact", "stop"),
    "chunk_size": 1024,
    "activations": "auto",
    "memory_budget_gib": 4.0,
    "repeats": 3, "seed": 0,
}
_VARIANTS = {
    "architectures": {
        "architectures": (
            "full", "sliding", "sliding and full", "latent", "delta",
            "delta and full",
        ),
        "trees": ("agent",),
        "layers": 4,
    },
    "tiny": {
        "trees": ("agent",), "width": 32, "layers": 1, "heads": 2,
        "vocab_size": 64, "path_tokens": 160, "chunk_size": 64, "repeats": 1,
    },
}

get_config = variants.getter(_FIELDS, _VARIANTS)
