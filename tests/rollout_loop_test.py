# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch buckets: rows do not change with them, and few loops are compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.rollout import loop
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from tests import tiny

CONFIG = tiny.in_float64(tiny.BASE)
PROMPT = (7, 2, 60, 33, 2, 9, 14)
BRANCHES, TOKENS = 6, 16
STOPS = tuple(range(12))  # of 64 ids: rows end here and there


def run(prompt=PROMPT, stop_ids=STOPS, **options):
  decoder, params = tiny.model(CONFIG)
  options = dict(branches=BRANCHES, max_tokens=TOKENS) | options
  with jax.enable_x64(True):
    return br.sample(
        decoder, params, prompt, key=jax.random.key(5), stop_ids=stop_ids,
        **options,
    )


rollout = functools.cache(run)


def test_buckets_are_the_group_and_the_powers_of_two_below():
  assert loop.buckets(1) == (1,)
  assert loop.buckets(2) == (2, 1)
  assert loop.buckets(8) == (8, 4, 2, 1)
  assert loop.buckets(12) == (12, 8, 4, 2, 1)


def test_rows_do_not_change_with_compaction():
  compacted, whole = rollout(), rollout(compact=False)
  assert len(set(whole.lengths.tolist())) > 3, "another key"
  np.testing.assert_array_equal(compacted.tokens, whole.tokens)
  np.testing.assert_array_equal(compacted.finish, whole.finish)
  np.testing.assert_allclose(
      compacted.log_probs, whole.log_probs, rtol=0, atol=1e-12
  )
  np.testing.assert_array_equal(compacted.lengths, whole.lengths)
  np.testing.assert_array_equal(compacted.rounds, compacted.lengths)


def test_rows_go_on_in_the_smallest_bucket_that_holds_them():
  """Replayed by hand from the lengths that rows turned out to have."""
  lengths = np.asarray(rollout().lengths)
  rows, tokens, step = [], [], 0
  for smaller in (4, 2, 1, 0):
    first = step
    while np.sum(lengths > step) > smaller:
      step += 1
    rows.append(step - first)
    tokens.append(np.sum(np.clip(lengths, first, step) - first))
  work = rollout().work
  assert work.buckets.tolist() == [6, 4, 2, 1]
  assert work.rounds.tolist() == rows
  assert work.tokens.tolist() == tokens
  assert work.tokens.sum() == lengths.sum()
  assert (work.seconds[work.rounds > 0] > 0).all()
  whole = rollout(compact=False).work
  assert (whole.buckets.tolist(), whole.rounds.tolist()) == (
      [6], [lengths.max()]
  )


def test_a_row_is_the_row_of_a_batch_of_one(x64):
  decoder, params = tiny.model(CONFIG)
  state = br.capture(decoder, params, PROMPT)
  inputs = RolloutInputs(
      params, state, jnp.int32(PROMPT[-1]), jax.random.key(5),
      jnp.asarray(STOPS, jnp.int32), jnp.int32(TOKENS),
  )
  settings = RoundSettings(decoder, br.Law())
  for row in range(BRANCHES):
    answers, rows = loop.start(decoder, inputs, None, BRANCHES, TOKENS)
    rows = loop.select_rows(None, rows, np.asarray([row], np.int32))
    answers, _, count = loop.rounds(
        settings, inputs, None, answers, rows, np.int32(0)
    )
    wanted = rollout()
    np.testing.assert_array_equal(answers.tokens[row], wanted.tokens[row])
    np.testing.assert_allclose(
        answers.log_probs[row], wanted.log_probs[row], rtol=0, atol=1e-12
    )
    assert answers.finish[row] == wanted.finish[row]
    assert count == wanted.lengths[row]
    others = np.arange(BRANCHES) != row
    assert not np.asarray(answers.lengths)[others].any()


def test_one_loop_is_compiled_for_each_bucket_that_is_reached():
  """Not for another prompt, limit, key, or other stop ids."""
  before = loop.rounds._cache_size()
  first = run(branches=3)
  other = run(
      branches=3, prompt=(5, *PROMPT[:-2]), stop_ids=tuple(range(40, 52)),
      max_tokens=10,
  )
  reached = (first.work.rounds > 0) | (other.work.rounds > 0)
  assert loop.rounds._cache_size() - before == np.count_nonzero(reached)


def test_a_group_that_ends_at_once_takes_one_round():
  result = run(stop_ids=tuple(range(64)))
  assert result.lengths.tolist() == [1] * BRANCHES
  assert result.work.rounds.tolist() == [1, 0, 0, 0]
  assert result.finished.all()
