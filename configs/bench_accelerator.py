# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient by every implementation of attention, on one accelerator.

Questions: how much faster is the platform's kernel than plain XLA, at what
share of the chip's rate, how far does a prefix go, and is the gradient as close
to that of whole float32 sequences by the kernel as by the loops? No result is
committed.

  python -m experiments.bench_accelerator

Cost: at most five minutes: cases that would not end in `total_seconds` are left
out, and say so. On a CPU that leaves the shortest prefixes by the loops.
`:tiny` runs anywhere in a minute.
"""

from configs import variants

_FIELDS = {
    # Two layers: a million positions take a GPU about a minute.
    "model": {
        "vocab_size": 4096, "width": 512, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 128, "ffn_width": 1536,
        "max_positions": 1 << 21, "compute_dtype": "bfloat16",
    },
    "prefixes": (8192, 32768, 131072, 524288, 1048576),
    "modes": ("stop", "exact"),
    "attention": ("loops", "splash", "cudnn"),  # those that run here
    "interpret": False,  # kernels that a CPU could only interpret
    "branches": 4, "tail_tokens": 256,
    "chunk_size": 8192,
    "reference_up_to": 8192,  # longest prefix whose gradient is compared
    "repeats": 5,
    "case_seconds": 10.0,  # no further repeat after these
    "total_seconds": 240.0,
    "seed": 0,
}
_VARIANTS = {
    "tiny": {
        "model": variants.TINY_MODEL | {
            "num_layers": 1, "compute_dtype": "float32",
        },
        "prefixes": (256, 512),
        "attention": ("loops", "cudnn"),
        "branches": 2,
        "tail_tokens": 8,
        "chunk_size": 128,
        "reference_up_to": 256,
        "repeats": 2,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
