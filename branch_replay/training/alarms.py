# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run that goes on and learns nothing."""

from typing import NamedTuple


class Streaks(NamedTuple):
  """Steps in a row, up to the last one.

  Attributes:
    dead: in which no group had answers that differ in reward.
    truncated: in which no answer stopped.
    share: of the answers of the dead ones, how many were truncated; a sum over
      steps.
  """

  dead: int = 0
  truncated: int = 0
  share: float = 0.0


def observe(
    streaks: Streaks, scalars: dict[str, float], *, after: int,
    compares: bool = True,
) -> tuple[Streaks, list[str]]:
  """The streaks after a step, and what there is to warn of.

  A warning comes after `after` steps in a row, and again whenever that number
  has doubled.

  Args:
    streaks: before.
    scalars: of the step, as they are logged; those of a step without sampling
      say nothing.
    after: steps in a row; 0 for no warnings.
    compares: whether the algorithm learns from differences within a group
      alone.
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
