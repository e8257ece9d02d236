# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens to themselves and to a shared prefix.

`op` has the public functions, which are named here too. What they run with:

  file                 used when                                    checked by
  reference            never: plain einsum and autodiff             –
  loops, tiling        anywhere; always with a sliding window, and  reference
                       on the way back with a band
  stretches +
    kernel_splash      "auto" on TPU, heads of a multiple of 32     reference
    kernel_cudnn       "auto" on NVIDIA GPUs, bfloat16              reference
  packed               a drafter's answers, several in one row      reference

`kernels` chooses between them, by `Schedule.attention`.
"""

from branch_replay.ops.attention.op import Band
from branch_replay.ops.attention.op import PrefixLayer
from branch_replay.ops.attention.op import QueryRows
from branch_replay.ops.attention.op import Stripe
from branch_replay.ops.attention.op import Window
from branch_replay.ops.attention.op import backward
from branch_replay.ops.attention.op import backward_rows
from branch_replay.ops.attention.op import decode
from branch_replay.ops.attention.op import forward
from branch_replay.ops.attention.op import merge
from branch_replay.ops.attention.op import replay_attention
from branch_replay.ops.attention.op import row_delta

__all__ = [
    "Band",
    "PrefixLayer",
    "QueryRows",
    "Stripe",
    "Window",
    "backward",
    "backward_rows",
    "decode",
    "forward",
    "merge",
    "replay_attention",
    "row_delta",
]
