# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses how many tokens to draft in each batch bucket, by measured speed.

An *arm* is a draft length in a bucket; 0 drafts nothing and is always a choice.
The reward of an arm is the median, over the last rollouts that used it, of
tokens emitted per second of wall time. Every arm is tried first; then the best
one of each bucket is taken, and with probability ε something else. An arm that
is not clearly faster than 0 counts as slower: otherwise the luckiest
measurement would win where drafts do not pay. A drafter also costs time in
buckets that do not draft, because it observes every round. So whole rollouts
with and without drafts are compared too, and the drafter is left out if they
are not clearly faster with it.

All functions are pure: the same measurements give the same decisions.

  tuner, lengths, decisions = choose(tuner, loop.buckets(branches))
  rollout = sample(..., drafter=drafter, draft_length=lengths)
  tuner = observe(tuner, rollout.work)

Source: choosing per bucket follows TLT, https://arxiv.org/abs/2511.16665.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import statistics
from typing import NamedTuple

import numpy as np

from branch_replay.rollout.result import Work

Arm = tuple[int, int]  # bucket, draft length


class Decision(NamedTuple):
  """One choice, for a log.

  Attributes:
    step: number of earlier calls of `choose`.
    bucket: batch size.
    draft_length: the choice.
    reason: "untried" if there is no measurement yet, "best", "off" if drafts do
      not pay for the rollout as a whole, or "explore".
    rates: median tokens per second by draft length, as known at that time.
  """

  step: int
  bucket: int
  draft_length: int
  reason: str
  rates: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Tuner:
  """Settings and measurements.

  Attributes:
    draft_lengths: draft lengths to choose from.
    window: number of latest measurements of an arm that count.
    epsilon: ε, probability of exploring.
    margin: share of its rate by which an arm has to beat draft length 0.
    tries: how often an arm without a measurement is asked for. A bucket may not
      be reached, and rounds that compile are not measured.
    seed: seed of the random choices.
    step: calls of `choose` so far.
    rates: tokens per second by arm, the oldest first.
    wholes: tokens per second of whole rollouts, by the arms of all buckets.
    asked: how often each arm was chosen because it was untried.
  """

  draft_lengths: tuple[int, ...] = (0, 1, 2, 4)
  window: int = 8
  epsilon: float = 0.1
  margin: float = 0.05
  tries: int = 3
  seed: int = 0
  step: int = 0
  rates: Mapping[Arm, tuple[float, ...]] = dataclasses.field(
      default_factory=dict
  )
  wholes: Mapping[tuple[Arm, ...], tuple[float, ...]] = dataclasses.field(
      default_factory=dict
  )
  asked: Mapping[Arm, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    lengths = self.draft_lengths
    if 0 not in lengths or min(lengths) < 0 or len(set(lengths)) < len(lengths):
      raise ValueError(
          f"draft_lengths={lengths}: name each length once, 0 among them, so "
          "that a drafter that does not pay can be left out."
      )
    if self.window < 1 or self.tries < 1:
      raise ValueError(
          f"window={self.window} and tries={self.tries} must be at least 1."
      )
    if self.margin < 0:
      raise ValueError(f"margin must not be negative, as {self.margin} is.")
    if not 0 <= self.epsilon <= 1:
      raise ValueError(f"epsilon must lie in [0, 1], not {self.epsilon}.")


def choose(
    tuner: Tuner, buckets: Sequence[int]
) -> tuple[Tuner, dict[int, int], list[Decision]]:
  """Chooses a draft length for every bucket.

  Args:
    tuner: settings and measurements.
    buckets: batch sizes, as `loop.buckets` gives them.

  Returns:
    The next tuner, the draft lengths by bucket, and the reasons.
  """
  untried = {
      bucket: length for bucket in buckets
      if (length := _untried(tuner, bucket)) is not None
  }
  best = {bucket: _best(tuner, bucket) for bucket in buckets}
  if untried:
    lengths, reason = best | untried, "best"
  else:
    lengths, reason = _settled(tuner, best)
  decisions = [
      Decision(
          tuner.step, bucket, length,
          "untried" if bucket in untried else reason, _medians(tuner, bucket),
      )
      for bucket, length in lengths.items()
  ]
  asked = dict(tuner.asked)
  for arm in untried.items():
    asked[arm] = asked.get(arm, 0) + 1
  tuner = dataclasses.replace(tuner, step=tuner.step + 1, asked=asked)
  return tuner, lengths, decisions


def observe(tuner: Tuner, work: Work) -> Tuner:
  """The tuner with the measurements of a rollout; compilations do not count.

  Raises:
    ValueError: the rollout used a draft length that is not in the tuner's.
  """
  rates, wholes, arms = dict(tuner.rates), dict(tuner.wholes), []
  for place, seconds in enumerate(work.seconds):
    arm = int(work.buckets[place]), int(work.draft_lengths[place])
    arms.append(arm)
    if arm[1] not in tuner.draft_lengths:
      raise ValueError(
          f"A rollout with draft length {arm[1]} says nothing about "
          f"draft_lengths={tuner.draft_lengths}."
      )
    if work.rounds[place] and not work.compiled[place]:
      _note(rates, arm, work.tokens[place] / seconds, tuner.window)
  if np.any(work.rounds) and not np.any(work.compiled):
    rate = np.sum(work.tokens) / np.sum(work.seconds)
    _note(wholes, tuple(arms), rate, tuner.window)
  return dataclasses.replace(tuner, rates=rates, wholes=wholes)


def _note(rates: dict, key, rate, window: int) -> None:
  rates[key] = (*rates.get(key, ()), float(rate))[-window:]


def _medians(tuner: Tuner, bucket: int) -> dict[int, float]:
  return {
      length: statistics.median(tuner.rates[bucket, length])
      for length in tuner.draft_lengths
      if (bucket, length) in tuner.rates
  }


def _untried(tuner: Tuner, bucket: int) -> int | None:
  for length in tuner.draft_lengths:
    arm = bucket, length
    if arm not in tuner.rates and tuner.asked.get(arm, 0) < tuner.tries:
      return length
  return None


def _best(tuner: Tuner, bucket: int) -> int:
  """The fastest draft length of a bucket that clearly beats 0, or else 0."""
  rates = _medians(tuner, bucket)
  if 0 not in rates:
    return 0
  best = max(rates, key=rates.get)
  return best if rates[best] > (1 + tuner.margin) * rates[0] else 0


def _settled(tuner: Tuner, best: dict[int, int]) -> tuple[dict[int, int], str]:
  """Draft lengths when every arm has been tried, and the reason."""
  none = dict.fromkeys(best, 0)
  usual, reason, other = best, "best", none
  if best != none:
    drafting, plain = _whole(tuner, best), _whole(tuner, none)
    if plain is None:
      return none, "untried"
    if drafting is not None and drafting <= (1 + tuner.margin) * plain:
      usual, reason, other = none, "off", best
  rng = np.random.default_rng((tuner.seed, tuner.step))
  if rng.random() >= tuner.epsilon:
    return usual, reason
  if other != usual and rng.random() < 0.5:
    return other, "explore"  # so that both rates stay current
  drawn = rng.choice(tuner.draft_lengths, len(best)).tolist()
  return dict(zip(best, drawn, strict=True)), "explore"


def _whole(tuner: Tuner, lengths: dict[int, int]) -> float | None:
  """Median tokens per second of whole rollouts; None before the first."""
  rates = tuner.wholes.get(tuple(lengths.items()))
  return statistics.median(rates) if rates else None
