# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient by every implementation of attention, on one accelerator.

Questions: how much faster is the platform's kernel than plain XLA, at what
share of the chip's rate, how far does a prefix go, and is the gradient as close
to that of whole float32 sequences by the kernel as by the loops? Not run on an
accelerator yet: no answer is committed.

  python -m experiments.bench_accelerator

Cost: at most five minutes: cases that would not end in `total_seconds` are left
out, and say so. On a CPU that leaves the shortest prefixes by the loops.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      # Two layers, that a million positions are a minute's work of a GPU.
      "model": {
          "vocab_size": 4096,
          "width": 512,
          "num_layers": 2,
          "num_heads": 4,
          "num_kv_heads": 2,
          "head_dim": 128,
          "ffn_width": 1536,
          "max_positions": 1 << 21,
          "compute_dtype": "bfloat16",
      },
      "prefixes": (8192, 32768, 131072, 524288, 1048576),
      "modes": ("stop", "exact"),
      "attention": ("loops", "splash", "cudnn"),  # those that run here
      "interpret": False,  # kernels that a CPU could only interpret
      "branches": 4,
      "tail_tokens": 256,
      "chunk_size": 8192,
      # Longest prefix whose gradient is compared, see bench_accelerator.
      "reference_up_to": 8192,
      "repeats": 5,
      "case_seconds": 10.0,  # no further repeat after these
      "total_seconds": 240.0,
      "seed": 0,
  })
