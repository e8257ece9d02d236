# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How wrong is `banded`, by width of the band and length of the prefix?

On SmolLM2-135M-Instruct and real documents, and on prompts in which the answer
needs two places of the prefix, one of which refers to the other. The result is
band_sweep.json, the answer is in docs/bias.md.

  python -m experiments.band_sweep --config=configs/band_sweep.py

Cost: half an hour on one core; may be interrupted and started again, cases that
are done are not run again. `:long` has prompts of 2048 to 8192 tokens; hours,
and not run yet. `:tiny` runs two cases in three minutes, mostly compilation.
"""

from configs import variants

_FIELDS = {
    "model": "smollm2",
    "documents": 5,
    "chunk_size": 512,
    # (kind, prompt tokens, tail tokens, branches, groups).
    "shapes": (
        ("random", 512, 32, 4, 3), ("two hops", 512, 32, 4, 3),
        ("random", 1024, 32, 4, 3), ("two hops", 1024, 32, 4, 3),
    ),
    # (window, sinks).
    "bands": ((0, 0), (64, 64), (256, 64), (512, 64)),
}
_VARIANTS = {
    "long": {
        "shapes": (
            ("random", 2048, 32, 4, 5), ("two hops", 2048, 32, 4, 5),
            ("random", 4096, 32, 4, 3), ("two hops", 4096, 32, 4, 2),
            ("random", 8192, 32, 4, 2),
        ),
    },
    "tiny": {
        "shapes": (("random", 256, 8, 2, 1), ("two hops", 256, 8, 4, 1)),
        "bands": ((0, 0), (64, 16)), "chunk_size": 64,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
