# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A SIMULATION: eight workers sample, and those that wait train the drafter.

Costs are those that experiments/bench_rollout.py measured on one machine;
lengths of answers are an assumption.

  python -m experiments.simulate_rollouts --config=configs/simulate_rollouts.py

Cost: seconds.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "bench": "experiments/results/bench_rollout.json",
      "drafter": "learned",
      "workers": 8,
      "branches": 8,  # rows of a worker
      "median_tokens": 250.0,  # of an answer; log-normal
      "spread": 0.8,  # standard deviation of its logarithm
      "most_tokens": 2048,
      "updates": 16,  # of the drafter a step, where they are counted
      "steps": 200,
      "seed": 0,
  })
