# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter that learns along with the policy, against the same one frozen.

The model of configs/train.py:small, warmed up on short documents, learns by
GRPO to find a fact in 512 characters, while a drafter of one layer learns from
its rollouts. After ten steps a copy of the drafter is frozen. Every ten steps
both draft three tokens a round on held-out prompts.

  python -m experiments.adapting --config=configs/adapting.py

Cost: ten minutes on two cores.

`:smollm2` does the same with SmolLM2-135M-Instruct on real documents. It has
not been run in full; estimated cost: forty minutes on two cores.
`:tiny` runs a model that has learnt nothing, in a minute.
"""

from configs import variants

_DRAFTS = (
    ("reinforce.speculation.drafter", "learned"),
    ("reinforce.speculation.draft_lengths", (0, 2)),
)
_FIELDS = {
    "base": "small",  # variant of configs/train.py
    "shared": (
        ("reinforce.steps", 150), ("reinforce.most_prompts", 0),
        ("evaluation.every", 50), *_DRAFTS,
    ),
    "seed": 0,
    "every": 10,  # steps between two comparisons
    "freeze_after": 10,
    "draft_length": 3,
    "probes": 64,  # held-out prompts
}
_VARIANTS = {
    "smollm2": {
        "base": "",
        "shared": (
            ("reinforce.steps", 36), ("reinforce.prompts", 4),
            ("reinforce.speculation.studies.updates", 16),
            ("evaluation.prompts", 8), ("evaluation.every", 36),
            ("checkpoint_every", 12), *_DRAFTS,
        ),
        "every": 4, "freeze_after": 4, "probes": 4,
    },
    "tiny": {
        "base": "tiny",
        "shared": (("phases", ("reinforce",)), ("reinforce.steps", 2)),
        "every": 1, "freeze_after": 1, "probes": 1,
    },
}
get_config = variants.getter(_FIELDS, _VARIANTS)
