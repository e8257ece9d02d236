# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""An alarm for drafts that are no longer accepted.

A drafter that has gone bad changes no token, so nothing else would tell.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Watch:
  """Settings and memory.

  Attributes:
    floor: share of the best acceptance so far below which a step is bad.
    patience: bad steps in a row that raise the alarm.
    rest: steps without drafts after it; then they are tried again.
    best: highest share of drafts accepted in a step.
    bad: bad steps in a row.
    off_until: the step from which drafts are made again.
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
  """The state after a step, and whether it raised the alarm.

  After an alarm the best is forgotten, so that a policy that has become harder
  to guess is not compared with what it was.

  Args:
    watch: the state before.
    step: of the run.
    drafted: tokens that were drafted in it.
    accepted: how many of them were taken; steps without drafts say nothing.
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
