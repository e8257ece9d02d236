# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Is stopping at the prefix as wrong for other models, and during training?

Questions: in a byte-level model that is trained from scratch on the documents
of the bias study, how far is the gradient that stops at the prefix from the
exact one, and where in the prefix does the cotangent sit, from initialization
to the end of training?

  python -m experiments.bias_training --config=configs/bias_training.py

Cost: about a quarter of an hour on two cores. `:tiny` takes half a minute.
"""

from configs import variants

_FIELDS = {
    "model": {
        "vocab_size": 256, "width": 256, "num_layers": 4, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 64, "ffn_width": 704,
        "max_positions": 1024,
    },
    "train_seeds": 2,
    "steps": (0, 30, 100, 300, 1000),  # measured; the last ends training
    "tokens": 512,  # of a training sequence
    "batch": 2,
    "learning_rate": 1e-3,  # the peak; a tenth of it at the end
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "held_out": 0.1,  # the end of every document: validation and prompts
    "validation_windows": 16,
    # Groups that are measured: documents · seeds, the same at every step.
    "documents": 5,
    "seeds": 3,
    "prompt_tokens": 512,
    "tail_tokens": 32,
    "branches": 4,
    "advantages": "random",
    "chunks": 16,
    "top": 4,
    "budgets": (),
    "budget_shapes": (),
}
_VARIANTS = {
    "tiny": {
        "model": {
            "width": 32, "num_layers": 2, "head_dim": 8, "ffn_width": 48,
        },
        "train_seeds": 1,
        "steps": (0, 4),
        "tokens": 64,
        "warmup_steps": 2,
        "validation_windows": 2,
        "documents": 1,
        "seeds": 2,
        "prompt_tokens": 256,
        "tail_tokens": 8,
        "branches": 2,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
