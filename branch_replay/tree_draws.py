# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs of a tree are pulled back under prefix_gradient="sampled".

A run with loss of its own has to go back anyway, so it always does, and hands
on all that has come in. Of the others each is drawn when it is closed, with a
probability that is settled by then, as chunks of one prefix are (see
`chunk_sampling`). A path is pulled back deepest run first, so what one passes
on is complete before the next is drawn, and the mean is the exact gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import chunk_sampling
from branch_replay import engine
from branch_replay import tree_order


class Turn(NamedTuple):
  """What a run that may not be pulled back is drawn by.

  Attributes:
    starts: i32[D], the first position of every open run; D is the same for the
      whole program, and what is left of it lies past all positions.
    waiting: bool[D], which of them are still to be drawn.
    index: i32[], the run itself, the last one open.
    budget: how many of those that wait shall run, in expectation.
    uniform: f32[], a number in [0, 1).
  """

  starts: np.ndarray
  waiting: np.ndarray
  index: np.ndarray
  budget: jax.Array
  uniform: jax.Array


class Draws:
  """Which runs without loss are pulled back, in the order of a program.

  The budget is shared out by number between what is open, where the sizes of
  cotangents are known, and what has not been run yet.
  """

  def __init__(self, task: engine.Task, program: tree_order.Program, key):
    self._count = sum(not run.read for run in program.inner)
    self._uniform_N = chunk_sampling.uniforms(key, self._count)
    self._budget = min(task.sampling.chunks, self._count)
    self._depth = program.depth
    self._open, self._started, self._found = [], 0, {}

  def opened(self, run):
    self._open.append((run, None if run.read else self._started))
    self._started += not run.read

  def turn(self) -> Turn | None:
    """Of the last run that is open; None if it has loss and always runs."""
    number = self._open[-1][1]
    if number is None:
      return None
    room = self._depth - len(self._open)
    starts = [run.first for run, _ in self._open]
    waiting = [number is not None for _, number in self._open]
    known, later = sum(waiting), self._count - self._started
    return Turn(
        np.array(starts + [np.iinfo(np.int32).max] * room, np.int32),
        np.array(waiting + [False] * room), np.int32(len(starts) - 1),
        jnp.asarray(self._budget * known / (known + later)),
        self._uniform_N[number],
    )

  def closed(self, drawn):
    """Takes what happened to it, a `PrefixPass` of scalars or None."""
    number = self._open.pop()[1]
    if number is not None:
      self._found[number] = drawn
      self._budget = self._budget - drawn.probability

  def report(self) -> chunk_sampling.PrefixPass | None:
    found = [self._found[number] for number in range(self._count)]
    return jax.tree.map(lambda *x: jnp.stack(x), *found) if found else None


def drawn(task, accumulator, turn: Turn) -> chunk_sampling.PrefixPass:
  """Whether a run is pulled back, on every device alike."""
  size_D = chunk_sampling.sizes(
      task.config, accumulator, task.layout.here(turn.starts), turn.index,
      task.layout,
  )
  q_D = chunk_sampling.probabilities(
      task.sampling, size_D, turn.waiting, turn.budget
  )
  q = q_D[turn.index]
  return chunk_sampling.PrefixPass(q, turn.uniform < q, size_D[turn.index])
