# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a real model, timed: what do compaction and drafts save?

Questions: on SmolLM2-135M-Instruct at temperature 1, a group of 8 answers to
one prompt of real text, how many tokens per second are sampled without
compaction, with it, and with tokens drafted by n-grams, by a learned drafter
(trained on answers to other prompts) and by an untrained one, at fixed draft
lengths and at those a tuner chooses, drafting and noise included; and does any
token change?

  python -m experiments.bench_rollout --config=configs/bench_rollout.py

Cost: half an hour and 5 GB of memory on two cores that do nothing else.
`:tiny` takes a minute, most of it compilation.
"""

from configs import variants

_FIELDS = {
    "model": "smollm2",
    "prompt_tokens": 512,
    "branches": 8, "tail_tokens": 160,
    "temperature": 1.0,
    # (compact, drafter, draft length); others are compared to the first.
    "variants": (
        (False, "none", 0), (True, "none", 0), (True, "ngram", 2),
        (True, "ngram", "tuned"), (True, "learned", 1), (True, "learned", 2),
        (True, "learned", 4), (True, "learned", "tuned"),
        (True, "untrained", "tuned"),
    ),
    "draft_lengths": (0, 1, 2, 4),  # that a tuner chooses from
    "epsilon": 0.05,
    "tuning": 14,  # turns that a tuner has before it is timed
    "longest": 4,  # tokens that an n-gram matches
    "studies": {  # of the learned drafter
        "prompts": 6,
        "text_tokens": 81920,  # of the rest of the document
        "vocabulary": 4096,
        "updates": 900,
        "learning_rate": 1e-3,
        "rows": 1,
        "width": 640,
    },
    "rollouts": 1,  # groups that every variant samples
    "document": "",  # a text file; empty: the Python language reference
    "repeats": 5, "seed": 0,
}
_VARIANTS = {
    "tiny": {
        "model": "tiny",
        "prompt_tokens": 40,
        "branches": 3,
        "tail_tokens": 12,
        "variants": (
            (False, "none", 0), (True, "none", 0), (True, "ngram", 2),
            (True, "learned", "tuned"),
        ),
        "draft_lengths": (0, 1),
        "tuning": 6,
        "studies": {
            "prompts": 1, "text_tokens": 24, "vocabulary": 32, "updates": 2,
            "rows": 2, "width": 12,
        },
        "repeats": 2,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
