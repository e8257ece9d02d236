# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The simulated rollout, against times worked out by hand."""

import json

import numpy as np
import pytest

from configs import simulate_rollouts as simulate_config
from experiments import simulate_rollouts


def bench(tmp_path):
  """Two buckets; a draft of two tokens pays for one row alone."""
  def one(drafter, length, seconds, accepted):
    return {
        "compact": True, "drafter": drafter, "draft_length": length,
        "buckets": [2, 1], "bucket_seconds": seconds,
        "bucket_rounds": [10, 10], "accept_length": accepted,
    }

  file = tmp_path / "bench.json"
  file.write_text(json.dumps({
      "runs": [
          one("none", 0, [2.0, 1.0], 1.0), one("learned", 2, [5.0, 1.0], 2.0),
      ],
      "training": {"seconds_per_update": 0.5},
  }))
  return file


def test_a_worker_goes_on_with_the_rows_that_are_left(tmp_path):
  of = simulate_rollouts.costs(
      json.loads(bench(tmp_path).read_text()), "learned"
  )
  plain = simulate_rollouts.worker([30, 10], of, speculate=False)
  # Ten rounds of two rows at 0.2 s, then twenty of one at 0.1 s.
  assert plain == [(2, 0, pytest.approx(2.0)), (1, 0, pytest.approx(2.0))]
  drafted = simulate_rollouts.worker([30, 10], of, speculate=True)
  # Two rows do better without drafts; alone, two tokens a round for 0.1 s.
  assert drafted == [(2, 0, pytest.approx(2.0)), (1, 2, pytest.approx(1.0))]
  assert simulate_rollouts.worker([5, 5], of, speculate=False) == [
      (2, 0, pytest.approx(1.0))
  ]


def test_waits_and_updates_of_one_step(tmp_path):
  of = simulate_rollouts.costs(
      json.loads(bench(tmp_path).read_text()), "learned"
  )
  config = simulate_config.get_config()
  config.workers, config.branches, config.spread = 2, 1, 0.7
  found = simulate_rollouts.step(np.random.default_rng(0), config, of)
  plain = found["found"]["plain"]
  (one,), (other,) = found["timelines"]["plain"]
  wait = abs(one.seconds - other.seconds)
  assert plain["seconds"] == max(one.seconds, other.seconds)
  assert plain["idle"] == pytest.approx(wait / (2 * plain["seconds"]))
  assert plain["updates_in_idle"] == wait // 0.5


def test_it_says_that_it_is_simulated(tmp_path):
  config = simulate_config.get_config()
  config.bench, config.branches, config.steps = str(bench(tmp_path)), 2, 3
  results = simulate_rollouts.run(config, tmp_path / "run")
  assert results["simulated"] and (tmp_path / "run/timeline.png").exists()
  assert 1 < results["speedup_free_training"] <= 2
  assert (
      results["speedup_counted_training"] < results["speedup_free_training"]
  )
  assert "simulated" in simulate_rollouts.table(results)


def test_results_that_are_missing_or_lack_the_drafter(tmp_path):
  config = simulate_config.get_config()
  config.bench = str(tmp_path / "none.json")
  with pytest.raises(ValueError, match="is not there"):
    simulate_rollouts.run(config, tmp_path)
  config.bench, config.drafter = str(bench(tmp_path)), "ngram"
  with pytest.raises(ValueError, match="'ngram'"):
    simulate_rollouts.run(config, tmp_path)
