# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The same gradient by other systems, side by side on the same two threads.

Question: for one group of 8 answers of 64 tokens, how long do PyTorch and Tunix
on whole sequences, Prefix Grouper, and branch replay take for the same policy
gradient of the same weights, and how much memory? docs/speed.md has the answer.

  make peers
  make peers PEERS="--prefixes=1024,2048 --peers=ours,prefix_grouper"

What is equal: weights, tokens, loss, threads, float32, and the gradients to
rounding (checked in every run). What is not: XLA compiles (ours, Tunix),
PyTorch runs operation by operation; Tunix holds whole score matrices, and runs
its head on the prompt too; the memory of compiled systems includes some 300 MB
of the compiler's, which shows in short prompts.

Cost: about an hour and up to 20 GB of memory on two cores that do nothing else:
OpenMP threads wait for each other at every operation, and lose more than XLA's
by whatever else runs. May be interrupted: prompt lengths that are finished are
kept and not run again. `:tiny` runs ours alone, on a small model, in a minute.
"""

from configs import variants

_FIELDS = {
    "model": variants.MEASURED_MODEL | {
        # Tunix 0.1.7 rotates by this base whatever its config says.
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
    },
    "prefixes": (1024, 2048, 8192, 16384),  # prompt tokens
    "branches": 8, "tail_tokens": 64,
    "peers": (
        "torch_full", "torch_full_batched", "prefix_grouper", "tunix",
        "ours_full", "ours_exact_keep", "ours_exact_recompute", "ours_stop",
    ),
    "peers_python": ".venv-peers/bin/python",
    "ours_full_up_to": 2048,  # prompt tokens
    "threads": 2,
    "memory_gib": 16.0,  # of one worker; idle ones hold their weights too
    "limit_seconds": 600.0,  # of one gradient
    "tolerance": 1e-4,  # between the gradients of the exact systems
    "repeats": 3,
    "once_above_seconds": 100.0,  # first gradient of who is timed only once
    "seed": 0,
}
_VARIANTS = {
    "tiny": {
        "model": variants.TINY_MODEL, "prefixes": (32,), "branches": 2,
        "tail_tokens": 8,
        "peers": ("ours_full", "ours_exact_keep", "ours_stop"), "repeats": 1,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
