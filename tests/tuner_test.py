# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The tuner on synthetic timings, and on a rollout's."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

import branch_replay as br
from branch_replay.rollout import loop
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout.drafters import NGram
from branch_replay.rollout.result import Work
from branch_replay.rollout.tuner import Tuner
from tests import tiny

BUCKETS = 8, 2
RATES = {
    (8, 0): 100.0, (8, 1): 90.0, (8, 4): 40.0,
    (2, 0): 30.0, (2, 1): 45.0, (2, 4): 60.0,
}


def work(lengths, rates=RATES, rounds=10, compiled=False):
  """What a rollout of these draft lengths would measure."""
  seconds = np.array([2.0, 3.0])
  rate = np.array([rates[b, lengths[b]] for b in BUCKETS])
  return Work(
      np.array(BUCKETS), np.array([lengths[b] for b in BUCKETS]),
      np.full(2, rounds), rate * seconds, seconds, np.full(2, compiled),
  )


def play(tuner, steps, rates=RATES):
  """All decisions of some steps, and the last state; first runs compile."""
  ran = set(tuner.rates)
  log = []
  for _ in range(steps):
    tuner, lengths, decisions = tuner_lib.choose(tuner, BUCKETS)
    log += decisions
    new = any((one.bucket, one.draft_length) not in ran for one in decisions)
    ran.update((one.bucket, one.draft_length) for one in decisions)
    tuner = tuner_lib.observe(tuner, work(lengths, rates, compiled=new))
  return tuner, log


def test_every_arm_is_tried_then_the_fastest_of_each_bucket_is_taken():
  tuner, log = play(Tuner((0, 1, 4), epsilon=0.0), 9)
  for bucket, best in ((8, 0), (2, 4)):
    mine = [one for one in log if one.bucket == bucket]
    # Twice each, since a first run compiles and does not count.
    assert [one.draft_length for one in mine] == [0, 0, 1, 1, 4, 4] + 3 * [best]
    assert [one.reason for one in mine] == 6 * ["untried"] + 3 * ["best"]
    assert [one.step for one in mine] == list(range(9))
    assert mine[-1].rates == {k: RATES[bucket, k] for k in (0, 1, 4)}
  assert tuner.step == 9


def test_what_is_hardly_faster_than_no_drafts_is_left_out():
  """Of equal arms the luckiest would else be taken, and tried for nothing."""
  for rate, taken in ((104.0, 0), (106.0, 4)):
    _, log = play(
        Tuner((0, 1, 4), epsilon=0.0, margin=0.05), 9, RATES | {(8, 4): rate}
    )
    assert [one.draft_length for one in log if one.bucket == 8][-1] == taken
  with pytest.raises(ValueError, match="margin must not be negative"):
    Tuner(margin=-0.1)


def test_a_run_that_compiles_is_no_measurement():
  tuner = tuner_lib.observe(Tuner(), work({8: 0, 2: 0}, compiled=True))
  assert not tuner.rates
  tuner = tuner_lib.observe(tuner, work({8: 0, 2: 1}))
  assert tuner.rates == {(8, 0): (100.0,), (2, 1): (45.0,)}


def test_a_bucket_without_rounds_is_no_measurement():
  tuner = Tuner()
  for _ in range(3):
    tuner = tuner_lib.observe(tuner, work({8: 0, 2: 0}, rounds=0))
  assert not tuner.rates


def test_the_median_of_the_window_counts():
  """One slow run changes nothing; a lasting change does within a window."""
  tuner, _ = play(Tuner((0, 1, 4), window=5, epsilon=0.0), 20)
  slow = RATES | {(8, 0): 1.0}
  tuner, _ = play(tuner, 1, slow)
  tuner, log = play(tuner, 1)
  assert log[0].draft_length == 0 and log[0].rates[0] == 100.0
  tuner, log = play(tuner, 4, slow)
  assert [one.draft_length for one in log if one.bucket == 8] == [0, 0, 1, 1]
  assert max(len(rates) for rates in tuner.rates.values()) == 5


def test_other_arms_are_explored_as_often_as_asked():
  """Of whole rollouts, half of the time without any drafts."""
  tuner, _ = play(Tuner((0, 1, 4), epsilon=0.2), 6)
  tuner, log = play(tuner, 1000)
  explored = [one for one in log if one.reason == "explore"]
  assert 320 < len(explored) < 480  # two of every such rollout
  taken = collections.Counter(
      (one.bucket, one.draft_length) for one in explored
  )
  assert set(taken) == set(RATES) and min(taken.values()) > 20
  assert min(taken[8, 0], taken[2, 0]) > 80


def test_a_drafter_that_does_not_pay_as_a_whole_is_left_out():
  """It observes in the bucket that does not draft, and costs more there."""
  def measured(lengths):
    mixed = any(lengths.values()) and not lengths[8]
    observing = {(8, 0): 60.0} if mixed else {}
    return work(lengths, RATES | {(8, 1): 50.0} | observing)

  # Whole: 290 tokens in 5 s without drafts, (120 + 180) / 5 s with them.
  for margin, settled in ((0.0, "best"), (0.05, "off")):
    tuner = Tuner((0, 1, 4), epsilon=0.0, margin=margin)
    for _ in range(8):
      tuner, lengths, decisions = tuner_lib.choose(tuner, BUCKETS)
      tuner = tuner_lib.observe(tuner, measured(lengths))
    assert {one.reason for one in decisions} == {settled}
    assert lengths == {8: 0, 2: 0 if settled == "off" else 4}


def test_a_whole_without_drafts_is_measured_before_drafts_are_taken():
  """Its buckets may have been measured in different rollouts only."""
  tuner, none = Tuner((0, 1, 4), epsilon=0.0), dict.fromkeys(BUCKETS, 0)
  log = []
  for turn in range(7):
    tuner, lengths, decisions = tuner_lib.choose(tuner, BUCKETS)
    compiled = np.array([turn < 1, turn < 2])  # bucket 2 once more
    tuner = tuner_lib.observe(
        tuner, dataclasses.replace(work(lengths), compiled=compiled)
    )
    log.append((lengths, {one.reason for one in decisions}))
  assert log[5:] == [(none, {"untried"}), ({8: 0, 2: 4}, {"best"})]
  assert tuple(none.items()) in tuner.wholes


def test_a_bucket_that_is_not_reached_is_given_up():
  """Else its untried arms would keep the drafter running for nothing."""
  def only_eight(lengths):
    found = work(lengths)
    return dataclasses.replace(found, rounds=np.array([10, 0]))

  tuner = Tuner((0, 1, 4), epsilon=0.0, tries=2)
  for _ in range(8):
    tuner, lengths, decisions = tuner_lib.choose(tuner, BUCKETS)
    tuner = tuner_lib.observe(tuner, only_eight(lengths))
  assert lengths == {8: 0, 2: 0}
  assert [one.reason for one in decisions] == ["best", "best"]


def test_the_same_seed_and_measurements_give_the_same_decisions():
  start = Tuner((0, 1, 4), epsilon=0.5)
  assert play(start, 40)[1] == play(start, 40)[1]
  other = Tuner((0, 1, 4), epsilon=0.5, seed=1)
  assert play(start, 40)[1] != play(other, 40)[1]


def test_a_state_is_not_changed_by_what_comes_after():
  tuner, _ = play(Tuner((0, 1, 4)), 8)
  before = dict(tuner.rates), tuner.step
  play(tuner, 5)
  assert (dict(tuner.rates), tuner.step) == before


def test_what_a_rollout_measured_is_what_a_tuner_reads():
  """Three rows of one length: the smaller buckets are not run."""
  decoder, params = tiny.model(tiny.BASE)
  tuner, first = Tuner((0, 2)), set()
  for _ in range(6):
    tuner, lengths, _ = tuner_lib.choose(tuner, loop.buckets(3))
    lengths |= {2: 0, 1: 0}
    rollout = br.sample(
        decoder, params, (1, 2, 3), key=jax.random.key(0), branches=3,
        max_tokens=6, drafter=NGram(), draft_length=lengths,
    )
    if lengths[3] not in first:  # another test may have compiled it
      assert not rollout.work.compiled[1:].any()
    elif lengths[3]:
      assert not rollout.work.compiled.any()
      assert tuner_lib.observe(tuner, rollout.work).rates[3, 2][-1] == (
          18 / rollout.work.seconds[0]
      )
    first.add(lengths[3])
    tuner = tuner_lib.observe(tuner, rollout.work)
  assert set(tuner.rates) == {(3, 0), (3, 2)}


def test_a_loop_that_is_compiled_for_a_mixture_says_so():
  """0 beside other lengths observes, which is another program than 0 alone."""
  decoder, params = tiny.model(tiny.BASE)
  # No other test has such n-grams.
  options = dict(branches=2, max_tokens=5, drafter=NGram(5))
  runs = [
      br.sample(
          decoder, params, (1, 2, 3), key=jax.random.key(0), **options,
          draft_length=lengths,
      ).work.compiled[0]
      for lengths in (0, 0, {2: 0, 1: 1}, {2: 0, 1: 1})
  ]
  assert runs[1:] == [False, True, False]


@pytest.mark.parametrize("options, message", (
    (dict(draft_lengths=(1, 2)), "0 among them"),
    (dict(draft_lengths=(0, 1, 1)), "each length once"),
    (dict(draft_lengths=(0, -1)), "each length once"),
    (dict(window=0), "window=0"),
    (dict(tries=0), "tries=0"),
    (dict(epsilon=1.5), "epsilon.*1.5"),
))
def test_settings_that_make_no_tuner(options, message):
  with pytest.raises(ValueError, match=message):
    Tuner(**options)


def test_measurements_of_another_arm_are_refused():
  with pytest.raises(ValueError, match=r"length 4 .*\(0, 1\)"):
    tuner_lib.observe(Tuner((0, 1)), work({8: 0, 2: 4}))
