# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafters for speculative sampling; `drafter.py` is the interface."""

from branch_replay.rollout.drafters.drafter import Drafter
from branch_replay.rollout.drafters.model import Model
from branch_replay.rollout.drafters.ngram import NGram

__all__ = ["Drafter", "Model", "NGram"]
