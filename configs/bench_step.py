# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient timed over a grid of shapes: does the work follow the formula?

Questions: as the prefix doubles, and as the group grows, does the time of a
gradient grow as its analytic FLOPs do; what share of a large matrix product's
rate is useful work; and what does recomputation cost? docs/speed.md has the
answers.

  make bench
  python -m experiments.bench_step --config=configs/bench_step.py

Cost: a quarter of an hour and 6 GB of memory on two cores that do nothing else;
may be interrupted and started again, cases that are done are not run again.
`:banded` sets `banded` beside `exact` and `stop`, with and without the outputs
of attention kept from the capture; twenty minutes. `:tiny` takes a minute, most
of it compilation.
"""

from configs import variants

_FIELDS = {
    "model": variants.MEASURED_MODEL,
    # Products of prefix lengths P, group sizes G and tail lengths T.
    "grid": (
        ((512, 1024, 2048, 4096, 8192), (8,), (64,)),
        ((2048,), (2, 4, 8, 16), (64,)),
    ),
    # Modes, each with an activation policy.
    "variants": (
        ("full", "keep"), ("exact", "keep"), ("exact", "recompute"),
        ("stop", "keep"),
    ),
    "full_up_to": 1024,  # prefix length; beyond it full is left out
    "chunk_size": 1024,
    # Expected share of the prefix's chunks in a sampled pass; with fewer
    # chunks than `sampled_chunks` there is little to draw from.
    "sampled_share": 0.25,
    "sampled_chunks": 4,
    "matrix": 4096,  # rows and columns of the product that rates refer to
    "repeats": 3, "seed": 0,
}
_VARIANTS = {
    "banded": {
        "model": variants.MEASURED_MODEL | {"max_positions": 131072},
        "grid": (((2048, 4096, 8192, 16384), (8,), (64,)),),
        # The third says that outputs of attention are kept of the prefix.
        "variants": (
            ("exact", "recompute", False), ("exact", "recompute", True),
            ("banded", "recompute", False), ("banded", "recompute", True),
            ("stop", "keep"),
        ),
    },
    "tiny": {
        "model": variants.TINY_MODEL,
        "grid": (((32, 64), (2,), (8,)),),
        "variants": (
            ("full", "keep"), ("exact", "recompute"), ("stop", "keep"),
            ("sampled", "keep"),
        ),
        "full_up_to": 32,
        "chunk_size": 16,
        "matrix": 128,
        "repeats": 2,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
