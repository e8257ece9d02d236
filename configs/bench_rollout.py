# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a real model, timed: what do compaction and drafts save?

Questions: on SmolLM2-135M-Instruct at temperature 1, a group of 8 answers to
one prompt of real text, how many tokens per second are sampled without
compaction, with it, and with 1, 2 or 4 tokens drafted by n-grams, drafting and
noise included; and does any token change? Not run in full yet: no answer is
committed.

  python -m experiments.bench_rollout --config=configs/bench_rollout.py

Cost: some twenty minutes and 4 GB of memory on two cores that do nothing else.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "model": "smollm2",
      "prompt_tokens": 1024,
      "branches": 8,
      "tail_tokens": 128,
      "temperature": 1.0,
      # Pairs (compact, draft length); the first is what others are compared to.
      "variants": (
          (False, 0), (True, 0), (True, 1), (True, 2), (True, 4),
      ),
      "longest": 4,  # tokens that an n-gram matches
      "rollouts": 2,  # groups that every variant samples
      "document": "",  # a text file; empty: the Python language reference
      "repeats": 3,
      "seed": 0,
  })
