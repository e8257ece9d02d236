# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run that goes wrong; truncated_test has the older ones."""

import dataclasses
import math
import warnings

import pytest

from branch_replay.training import alarms
from branch_replay.training import experience
from branch_replay.training import loop
from tests import skipped_updates_test
from tests import tiny

NOT_CLIPPED = {"clipped_low": 0.0, "clipped_high": 0.0, "clipped_dual": 0.0}


def steps_of(rows, **options):
  """Steps whose observation gave a warning, and all warnings."""
  streaks, found, at = alarms.Streaks(), [], []
  for step, scalars in enumerate(rows, 1):
    streaks, said = alarms.observe(streaks, scalars, **{"after": 3} | options)
    found += said
    at += [step] * len(said)
  return at, found


def mismatches(*means):
  return [{"mismatch_mean": mean} for mean in means]


def test_a_mismatch_is_warned_of_when_it_begins_and_while_it_lasts():
  at, found = steps_of(mismatches(*[1e-4] * 3, *[0.02] * 7, 1e-4, 0.02))
  assert at == [4, 6, 9, 12]
  assert "0.02 nats a token" in found[0] and "attention='loops'" in found[0]
  assert steps_of(mismatches(0.02), after=0) == ([], [])


@pytest.mark.parametrize("dtype, fine, bad", [
    ("float64", 0.009, 0.011), ("float32", 0.009, 0.011),
    ("bfloat16", 0.09, 0.11), ("float16", 0.09, 0.11),
])
def test_how_large_a_mismatch_may_be_depends_on_the_dtype(dtype, fine, bad):
  assert steps_of(mismatches(fine), compute_dtype=dtype) == ([], [])
  at, (said,) = steps_of(mismatches(bad), compute_dtype=dtype)
  assert at == [1] and dtype in said
  assert steps_of(mismatches(math.nan), compute_dtype=dtype)[0] == [1]


def test_tokens_that_are_clipped_are_warned_of():
  clipped = {"clipped_low": 0.3, "clipped_high": 0.2, "clipped_dual": 0.1}
  at, found = steps_of([clipped] * 7)
  assert at == [3, 6]
  assert "now 60%" in found[0] and "learning_rate" in found[0]
  assert steps_of([clipped, clipped, NOT_CLIPPED] * 3) == ([], [])
  half = NOT_CLIPPED | {"clipped_low": 0.5}
  assert steps_of([half] * 7) == ([], [])


def test_every_skipped_update_is_warned_of():
  rows = [{"skipped_updates": x} for x in (0.0, 1.0, 2.0, 0.0)]
  at, found = steps_of(rows)
  assert at == [2, 3]
  assert found[1].startswith("2 of its updates") and "clip_norm" in found[1]
  assert steps_of(rows, after=0) == ([], [])


def test_a_policy_far_from_its_reference_is_warned_of():
  at, (said,) = steps_of([{"kl_reference": 0.6}] * 5)
  assert at == [3]
  assert "kl_coefficient" in said and "0.6" in said
  assert steps_of([{"kl_reference": 0.4}] * 5) == ([], [])


@pytest.mark.exhaustive
def test_a_run_warns_of_what_it_meets(tmp_path, monkeypatch):
  """Log-probs of the sampler that are not the trainer's, and a bad update."""
  monkeypatch.setattr(loop, "_evaluate", lambda *_: 0.0)
  model, params = tiny.model(skipped_updates_test.SMALL)
  phase = dataclasses.replace(
      skipped_updates_test.phase(model), steps=2, epochs=1, updates=1,
      capture_every=1,
  )
  run = loop.TrainingRun(
      model, (phase,), loop.HeldOutEvaluation(
          phase.task, experience.Rollouts(2, 3), "train", 1, 9
      ), seed=0, checkpoint_every=9, warn_after=1, completions_every=0,
  )
  phase.learner.algorithm.bad.extend([True, False])
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    loop.train(run, params, tmp_path / "skipped")
  texts = [str(one.message) for one in said]
  assert [x[:18] for x in texts if "skipped" in x] == ["Step 1, 'rl': 1 of"]
  assert not any("Sampler" in x for x in texts)

  collect = experience.collect

  def shifted(*args, **options):
    one = collect(*args, **options)
    return dataclasses.replace(one, log_probs=one.log_probs - 1)

  monkeypatch.setattr(experience, "collect", shifted)
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    loop.train(run, params, tmp_path / "shifted")
  texts = [str(one.message) for one in said if "Sampler" in str(one.message)]
  assert [x[:6] for x in texts] == ["Step 1", "Step 2"]
  assert "differ by 1 nats" in texts[0]
