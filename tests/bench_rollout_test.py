# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The rollout benchmark writes what it promises, and sees what differs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import branch_replay as br
from branch_replay.rollout import law as law_lib
from configs import bench_rollout as config_file
from experiments import bench_rollout
from tests import tiny


@pytest.mark.exhaustive
def test_a_benchmark_writes_what_it_promises(tmp_path):
  config = config_file.get_config("tiny")
  results = bench_rollout.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  plain, compacted, drafted, tuned = results["runs"]
  for one in results["runs"]:
    assert len(one["seconds"]) == config.repeats
    assert one["tokens"] == sum(one["bucket_tokens"]) == 3 * 12
    assert one["rows_that_differ"] == 0 or one["largest_gap"] < 1e-4
    assert one["tokens_per_second"] * one["seconds_median"] == pytest.approx(36)
  assert plain["speedup"] == 1 and plain["buckets"] == [3]
  assert plain["accept_length"] == 1 and plain["drafted"] == 0
  assert compacted["buckets"] == [3, 2, 1]
  assert drafted["drafted"] > 0
  rounds = drafted["tokens"] / drafted["accept_length"]
  assert drafted["drafted"] == pytest.approx(2 * rounds)
  assert results["noise_seconds"] > 0
  assert set(tuned["bucket_draft_lengths"]) <= {0, 1}
  assert results["training"]["answer_tokens"] == 36
  assert results["training"]["seconds_per_update"] > 0
  assert results["lengths"] == [[12, 12, 12]]


def test_where_two_rollouts_first_differ_the_scores_are_compared():
  decoder, params = tiny.model(tiny.BASE)
  key, prompt = jax.random.key(2), [3, 1, 4]
  plain = br.sample(
      decoder, params, prompt, key=key, branches=2, max_tokens=4
  )
  assert bench_rollout.gaps(key, plain, plain, 3, 64) == []
  other_id = (plain.tokens[1, 2] + 1) % 64
  other = dataclasses.replace(
      plain,
      tokens=plain.tokens.at[1, 2:].set(other_id),
      log_probs=plain.log_probs.at[1, 2].set(-1.5),
  )
  (gap,) = bench_rollout.gaps(key, plain, other, 3, 64)
  noise_V = law_lib.noise(key, 1, 5, 64, jnp.float32)
  mine = plain.log_probs[1, 2] + noise_V[plain.tokens[1, 2]]
  assert gap == pytest.approx(abs(float(mine - (noise_V[other_id] - 1.5))))


@pytest.mark.parametrize("change, message", (
    ({"variants": ((True, "none", 0),)}, "first must be .False, 'none', 0."),
    ({"variants": ((False, "none", 0), (True, "gram", 1))}, "drafter 'gram'"),
    ({"repeats": 0}, "repeats=0"),
    ({"rollouts": 0}, "rollouts=0"),
    ({"tuning": 3}, "it needs 6 rollouts"),
    ({"document": "no/such/file"}, "not a file"),
))
def test_configs_that_cannot_be_run(tmp_path, change, message):
  config = config_file.get_config("tiny")
  config.update(change)
  with pytest.raises(ValueError, match=message):
    bench_rollout.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()
