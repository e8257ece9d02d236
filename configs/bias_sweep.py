# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How wrong is the gradient that stops at the prefix, and how to mend it.

Questions: on SmolLM2-135M-Instruct and real documents, how far is the gradient
that stops at the prefix from the exact one, by prefix length, tail length,
group size, matrix and layer; where in the prefix does the cotangent sit; and is
a sampled prefix pass at a third of the cost closer than stopping? The answers
are in docs/bias.md.

  python -m experiments.bias_sweep --config=configs/bias_sweep.py

Cost: hours on two cores; may be interrupted and started again, cases that are
done are not run again. `:tiny` runs one case in a minute.
"""

from configs import variants

_FIELDS = {
    "model": "smollm2",
    "documents": 5,
    # (prompt tokens, tail tokens, branches, advantages, seeds).
    "shapes": (
        (128, 32, 4, "random", 5), (512, 32, 4, "random", 5),
        (1024, 32, 4, "random", 1), (2048, 32, 4, "random", 2),
        (512, 32, 4, "words", 1), (512, 16, 4, "random", 1),
        (512, 128, 4, "random", 1), (512, 32, 2, "random", 1),
        (512, 32, 16, "random", 1),
    ),
    # Shapes with the needle of a retrieval prompt at these places.
    "retrieval": ((1024, 32, 8, 1),),
    "depths": (0.1, 0.5, 0.9),
    "chunks": 16,
    # Every case: importance at a third of the chunks, and so many of the
    # largest. The first seed of these shapes: other budgets too.
    "top": 4,
    "budgets": (2, 8),
    "budget_shapes": ((512, 32, 4, "random"), (2048, 32, 4, "random")),
}
_VARIANTS = {
    "tiny": {
        "documents": 1, "shapes": ((256, 8, 2, "random", 1),), "retrieval": (),
        "budgets": (),
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
