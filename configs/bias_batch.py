# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer sees that adds the gradients of many groups.

Questions: on SmolLM2-135M-Instruct, real documents and fixed parameters, does
the error of each estimator shrink when groups are added up, as that of an
unbiased one should, or does it point the same way in every group; and how far
is Adam's direction from the one that exact gradients give?

  python -m experiments.bias_batch --config=configs/bias_batch.py
  python -m experiments.bias_batch --config.advantages=random

Cost: some twenty-five minutes (estimated) and 10 GB of memory on two cores.
`:tiny` adds two groups in two minutes and 8 GB.
"""

import ml_collections

from configs import variants

_FIELDS = {
    "model": "smollm2",
    "documents": 5,
    "seeds": 5,  # of every document: documents · seeds groups
    "prompt_tokens": 512,
    "tail_tokens": 32,
    "branches": 4,
    # From "words", the share of an answer's words that occur in the document,
    # or "random" rewards.
    "advantages": "words",
    "chunks": 16,
    # Law and expected chunks. Every one holds 1.6 GB: a sum and two moments.
    "estimators": {"importance": 16 / 3, "top": 4.0},
    "counts": (1, 2, 4, 8, 16),  # compared after so many, and after all
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-8,
}
_VARIANTS = {
    "tiny": {
        "documents": 2, "seeds": 1, "prompt_tokens": 256, "tail_tokens": 8,
        "branches": 2, "advantages": "random", "counts": (1,),
    },
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  config = variants.getter(_FIELDS, _VARIANTS)(variant)
  if variant == "tiny":
    del config.estimators["importance"]
  return config
