# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Switches drafts off when they are no longer accepted.

A bad drafter changes no token, so nothing else would reveal it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Watch:
  """Settings and memory of the alarm.

  Attributes:
    floor: a step is bad if its acceptance is below this share of the best one.
    patience: bad steps in a row that raise the alarm.
    rest: steps without drafts after an alarm; then drafts are tried again.
    best: highest share of drafts accepted in a step so far.
    bad: bad steps in a row up to now.
    off_until: first step in which drafts are made again.
  """

  floor: float = 0.5
  patience: int = 3
  rest: int = 20
  best: float = 0.0
  bad: int = 0
  off_until: int = 0

  def __post_init__(self):
    if not 0 <= self.floor <= 1 or min(self.patience, self.rest) < 1:
      raise ValueError(
          f"floor={self.floor} must lie in [0, 1], patience={self.patience} "
          f"and rest={self.rest} be at least 1."
      )

  def is_off(self, step: int) -> bool:
    """Whether nothing is drafted in this step."""
    return step < self.off_until


def observe(
    watch: Watch, step: int, drafted: int, accepted: int
) -> tuple[Watch, bool]:
  """Updates the watch after a step.

  After an alarm the best acceptance is forgotten, so that a policy that has
  become harder to guess is not compared with its past.

  Args:
    watch: the state before.
    step: step of the run.
    drafted: tokens drafted in it; a step without drafts changes nothing.
    accepted: how many of them were accepted.

  Returns:
    The state after, and whether the alarm was raised.
  """
  if not drafted:
    return watch, False
  share = accepted / drafted
  if share > 0 and share >= watch.floor * watch.best:
    best = max(watch.best, share)
    return dataclasses.replace(watch, best=best, bad=0), False
  if watch.bad + 1 < watch.patience:
    return dataclasses.replace(watch, bad=watch.bad + 1), False
  off_until = step + 1 + watch.rest
  return dataclasses.replace(watch, best=0.0, bad=0, off_until=off_until), True
