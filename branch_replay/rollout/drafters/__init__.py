# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafters for speculative sampling.

  drafter.py       the interface
  ngram.py         copies what followed the same tokens before
  model.py         another decoder
  learned.py       one trained layer on the model's hidden states
  learned_loss.py  its loss
  vocabulary.py    the ids it drafts
  files.py         saves and loads it
"""

from branch_replay.rollout.drafters.drafter import Drafter
from branch_replay.rollout.drafters.learned import Learned
from branch_replay.rollout.drafters.model import Model
from branch_replay.rollout.drafters.ngram import NGram

__all__ = ["Drafter", "Learned", "Model", "NGram"]
