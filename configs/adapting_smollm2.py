# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter that learns along with the policy, against the same one frozen.

SmolLM2-135M-Instruct learns to find facts in real documents
(configs/train_smollm2.py, with fewer prompts a step) while a drafter of one
layer learns from its rollouts. After four steps a copy of the drafter is
frozen; both then draft three tokens a round on held-out prompts, every four.

  python -m experiments.adapting --config=configs/adapting_smollm2.py

Not run in full yet. Estimated cost: forty minutes on two cores.
"""

import ml_collections

from configs import adapting


def get_config() -> ml_collections.ConfigDict:
  config = adapting.get_config()
  config.base = "train_smollm2"
  config.shared = (
      ("reinforce.steps", 36),
      ("reinforce.prompts", 4),
      ("reinforce.speculation.drafter", "learned"),
      ("reinforce.speculation.draft_lengths", (0, 2)),
      ("reinforce.speculation.studies.updates", 16),
      ("evaluation.prompts", 8),
      ("evaluation.every", 36),
      ("checkpoint_every", 12),
  )
  config.every = config.freeze_after = config.probes = 4
  return config
