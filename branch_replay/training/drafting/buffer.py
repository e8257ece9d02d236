# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Which lessons are kept, and which one is drawn next.

A rollout takes as long as its longest answers, so the drafter should know these
best. And it drafts for a policy that moves, so the newest lessons count most.

Source: long answers of the previous step come first as in TLT,
https://arxiv.org/abs/2511.16665.
"""

import dataclasses

import numpy as np

from branch_replay.training.drafting.lessons import Lesson


@dataclasses.dataclass(frozen=True)
class Buffer:
  """Lessons, the oldest first.

  Attributes:
    most_tokens: the most tokens of answers that are kept. The newest step is
      kept whole even if it has more.
    fresh: probability that a lesson is drawn from the newest step alone and not
      from all.
    lessons: the lessons.
  """

  most_tokens: int
  fresh: float = 0.5
  lessons: tuple[Lesson, ...] = ()

  def __post_init__(self):
    if self.most_tokens < 1 or not 0 <= self.fresh <= 1:
      raise ValueError(
          f"most_tokens={self.most_tokens} must be at least 1 and fresh="
          f"{self.fresh} in [0, 1]."
      )


def add(buffer: Buffer, new: list[Lesson]) -> Buffer:
  """Adds the lessons of one more step to a buffer.

  If the buffer then holds more than `most_tokens` tokens, lessons of the oldest
  step are dropped first, and within a step those with the shortest answers.
  """
  kept = sorted(
      (*buffer.lessons, *new), key=lambda one: (one.step, one.lengths.max())
  )
  total = sum(one.count for one in kept)
  while total > buffer.most_tokens and kept[0].step < kept[-1].step:
    total -= kept.pop(0).count
  return dataclasses.replace(buffer, lessons=tuple(kept))


def draw(buffer: Buffer, rng: np.random.Generator) -> Lesson:
  """Draws a lesson, with a probability in proportion to its tokens.

  Raises:
    ValueError: the buffer is empty.
  """
  if not buffer.lessons:
    raise ValueError("The buffer is empty: add lessons first.")
  choice = buffer.lessons
  if rng.random() < buffer.fresh:
    choice = [one for one in choice if one.step == choice[-1].step]
  tokens = np.array([one.count for one in choice], float)
  return choice[rng.choice(len(choice), p=tokens / tokens.sum())]
