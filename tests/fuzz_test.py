# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Some of the random problems; `python -m tests.fuzzing` runs any number."""

import collections

import numpy as np
import pytest

from tests.fuzzing import check
from tests.fuzzing import problems
from tests.fuzzing.wanted import Gradient

# Six lengths of one shape each, but for the tree.
SEEDS = {
    "a recurrence, stop": (6, 0),
    "adapters, sampled": (29, 0),
    "stacked groups on eight devices, exact": (26, 0),
    "a tree with windows, stop": (28, 1),
    "balanced experts, a captured state, exact": (62, 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEEDS)
def test_a_random_problem_has_the_gradient_of_the_dense_reference(name):
  seed, index = SEEDS[name]
  problem = problems.draw(seed)
  error = check.run(problem, index)
  assert error.error <= error.allowed, (
      f"{error}: python -m tests.fuzzing --seeds={seed} --run={index} --verbose"
  )


def test_problems_are_of_every_kind_and_the_same_again():
  drawn = [problems.draw(seed) for seed in range(300)]
  assert drawn == [problems.draw(seed) for seed in range(300)]
  counts = collections.Counter()
  for problem in drawn:
    counts[problem.kind] += 1
    counts.update(problem.config.layer_pattern)
    counts["experts"] += problem.config.experts is not None
    counts["balance"] += bool(problem.balance)
    counts[problem.trainable] += 1
    counts[problem.config.param_dtype] += 1
    for run in problem.runs:
      counts.update((run.driver, run.mode, f"on {run.devices}"))
      counts[str(run.schedule["activations"])] += 1
  for what in (
      "group", "stacked", "blocks", "tree", "full", "sliding", "latent",
      "delta", "experts", "balance", "adapters", "float32", "one pass", "jit",
      "autodiff", "state", "state autodiff", "kept", "host", "offload",
      "extended", "exact", "stop", "sampled", "on 2", "on 3", "on 4", "on 8",
      "keep", "recompute", "recompute_layers", "None",
  ):
    assert counts[what] >= 5, (what, counts[what])


@pytest.mark.parametrize("change", (1e-9, np.nan))
def test_a_gradient_that_is_slightly_off_is_seen(change):
  """Of the smallest parameter; and in the loss, and in the outputs."""
  right = Gradient(2.0, np.ones(3), {"a": np.ones(5), "b": np.full(2, 1e-3)})
  same = check.difference(right, right, 1e-11, whole=False)
  assert same.error <= same.allowed
  for wrong in (
      right._replace(grads=right.grads | {"b": right.grads["b"] + change}),
      right._replace(loss=2.0 + change),
      right._replace(outputs=np.array([1.0, 1.0, 1.0 + change])),
  ):
    error = check.difference(wrong, right, 1e-11, whole=False)
    assert not error.error <= error.allowed
