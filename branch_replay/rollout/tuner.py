# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft, for every batch bucket, from measured speed.

An arm is a draft length; 0, which drafts nothing, is always one. Its reward in
a bucket is the median, over the last rollouts that ran it there, of tokens
emitted per second of wall time. The best arm is taken, and with probability ε
any other one; an arm that is not clearly faster than 0 counts as slower, or the
luckiest measurement would win where drafts do not pay. Pure functions of a
frozen state: the same measurements give the same decisions.

  tuner, lengths, decisions = choose(tuner, loop.buckets(branches))
  rollout = sample(..., drafter=drafter, draft_length=lengths)
  tuner = observe(tuner, rollout.work)

Source: the rule is that of TLT, https://arxiv.org/abs/2511.16665.
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
    step: how many times `choose` had been called.
    bucket: rows that are run at a time.
    draft_length: the choice.
    reason: "untried" arms come first, then "explore" or "best".
    rates: by draft length, median tokens per second as known then.
  """

  step: int
  bucket: int
  draft_length: int
  reason: str
  rates: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Tuner:
  """Settings and memory.

  Attributes:
    draft_lengths: the arms.
    window: measurements of an arm that count, the last ones.
    epsilon: ε.
    margin: by what share of its rate an arm has to beat 0.
    seed: of the choices that are random.
    step: calls of `choose` so far.
    rates: tokens per second, by arm, oldest first.
  """

  draft_lengths: tuple[int, ...] = (0, 1, 2, 4)
  window: int = 8
  epsilon: float = 0.1
  margin: float = 0.05
  seed: int = 0
  step: int = 0
  rates: Mapping[Arm, tuple[float, ...]] = dataclasses.field(
      default_factory=dict
  )

  def __post_init__(self):
    lengths = self.draft_lengths
    if 0 not in lengths or min(lengths) < 0 or len(set(lengths)) < len(lengths):
      raise ValueError(
          f"draft_lengths={lengths}: name each length once, 0 among them, so "
          "that a drafter that does not pay can be left out."
      )
    if self.window < 1:
      raise ValueError(f"window must be at least 1, not {self.window}.")
    if self.margin < 0:
      raise ValueError(f"margin must not be negative, as {self.margin} is.")
    if not 0 <= self.epsilon <= 1:
      raise ValueError(f"epsilon must lie in [0, 1], not {self.epsilon}.")


def choose(
    tuner: Tuner, buckets: Sequence[int]
) -> tuple[Tuner, dict[int, int], list[Decision]]:
  """A draft length for every bucket.

  Args:
    tuner: the state.
    buckets: batch sizes, as `loop.buckets` gives them.

  Returns:
    The next state, the draft lengths by bucket, and why.
  """
  decisions = [_decide(tuner, bucket) for bucket in buckets]
  lengths = {one.bucket: one.draft_length for one in decisions}
  return dataclasses.replace(tuner, step=tuner.step + 1), lengths, decisions


def observe(tuner: Tuner, work: Work) -> Tuner:
  """The state with what a rollout measured, where nothing was compiled.

  Raises:
    ValueError: the rollout ran a draft length that is not an arm.
  """
  rates = dict(tuner.rates)
  for place, seconds in enumerate(work.seconds):
    arm = int(work.buckets[place]), int(work.draft_lengths[place])
    if arm[1] not in tuner.draft_lengths:
      raise ValueError(
          f"A rollout with draft length {arm[1]} says nothing about "
          f"draft_lengths={tuner.draft_lengths}."
      )
    if work.rounds[place] and not work.compiled[place]:
      rate = float(work.tokens[place] / seconds)
      rates[arm] = (*rates.get(arm, ()), rate)[-tuner.window :]
  return dataclasses.replace(tuner, rates=rates)


def _decide(tuner: Tuner, bucket: int) -> Decision:
  rates = {
      length: statistics.median(tuner.rates[bucket, length])
      for length in tuner.draft_lengths
      if (bucket, length) in tuner.rates
  }
  untried = [one for one in tuner.draft_lengths if one not in rates]
  if untried:
    return Decision(tuner.step, bucket, untried[0], "untried", rates)
  best = max(tuner.draft_lengths, key=rates.get)
  if rates[best] <= (1 + tuner.margin) * rates[0]:
    best = 0
  others = [one for one in tuner.draft_lengths if one != best]
  rng = np.random.default_rng((tuner.seed, tuner.step, bucket))
  if others and rng.random() < tuner.epsilon:
    other = others[int(rng.integers(len(others)))]
    return Decision(tuner.step, bucket, other, "explore", rates)
  return Decision(tuner.step, bucket, best, "best", rates)
