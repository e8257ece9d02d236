# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings for a run that goes on without learning anything."""

from typing import NamedTuple


class Streaks(NamedTuple):
  """How many steps in a row, up to the last, had nothing to learn from.

  Attributes:
    dead: steps in a row in which no group had answers that differ in reward.
    truncated: steps in a row in which no answer stopped.
    share: share of answers that were truncated, summed over the `dead` steps.
  """

  dead: int = 0
  truncated: int = 0
  share: float = 0.0


def observe(
    streaks: Streaks, scalars: dict[str, float], *, after: int,
    compares: bool = True,
) -> tuple[Streaks, list[str]]:
  """Updates the streaks after a step, and says what to warn of.

  A warning comes after `after` steps in a row, and again each time that number
  has doubled.

  Args:
    streaks: the streaks before the step.
    scalars: the step's scalars, as they are logged. A step without sampling
      changes nothing.
    after: number of steps in a row; 0 for no warnings.
    compares: whether the algorithm learns only from differences within a group.

  Returns:
    The streaks after the step, and the warnings as text.
  """
  if "dead_groups" not in scalars or not after:
    return streaks, []
  truncated = scalars["truncated"]
  streaks = Streaks(
      streaks.dead + 1 if scalars["dead_groups"] == 1 and compares else 0,
      streaks.truncated + 1 if truncated == 1 else 0,
      streaks.share + truncated if scalars["dead_groups"] == 1 else 0.0,
  )
  found = []
  if _due(streaks.dead, after):
    found.append(
        f"{streaks.dead} steps in a row without anything to learn from: in no "
        "group did answers differ in reward; "
        f"{streaks.share / streaks.dead:.0%} of the answers were truncated. "
        "Raise max_tokens if that is many; else take easier prompts, a reward "
        "with partial credit, or more branches."
    )
  if _due(streaks.truncated, after):
    found.append(
        f"In {streaks.truncated} steps in a row no answer stopped before "
        "max_tokens. Raise max_tokens, check the task's stop_ids, or say with "
        "`truncated` what such answers are worth."
    )
  return streaks, found


def _due(steps: int, after: int) -> bool:
  if not steps or steps % after:
    return False
  times = steps // after
  return times & (times - 1) == 0
