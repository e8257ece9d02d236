# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws which runs of a program "sampled" pulls back, in the hosted driver."""

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.engine import estimators
from branch_replay.engine.program import Program
from branch_replay.engine.spec import Spec


class Draws:
  """Decides which runs are pulled back as a program pushes and pops them.

  A run with outputs of its own is pulled back in any case, with all of its
  accumulated cotangent. Every other run is drawn when it is popped, with a
  probability that is fixed before the draw, see `estimators`. The runs of a
  path are popped deepest first, so the cotangent of a run is complete when it
  is drawn, and the expectation is the exact gradient. The budget (how many runs
  to pull back, in expectation) is divided by number of runs between those on
  the state, whose cotangents have a known size, and those not pushed yet.
  """

  def __init__(self, spec: Spec, program: Program, key):
    self._count = sum(run.read is None for run in program.pushed)
    self._uniform_N = estimators.uniforms(key, self._count)
    self._budget = min(spec.sampling.chunks, self._count)
    self._depth = program.depth
    self._path, self._started, self._found = [], 0, {}

  def pushed(self, run):
    """Records that a run was pushed."""
    self._path.append((run, None if run.read else self._started))
    self._started += run.read is None

  def draw(self) -> estimators.Draw | None:
    """Inputs to the draw of the run pushed last; None if it always runs."""
    number = self._path[-1][1]
    if number is None:
      return None
    room = self._depth - len(self._path)
    starts = [int(run.first) for run, _ in self._path]
    waiting = [number is not None for _, number in self._path]
    known, later = sum(waiting), self._count - self._started
    return estimators.Draw(
        np.array(starts + [np.iinfo(np.int32).max] * room, np.int32),
        np.array(waiting + [False] * room), np.int32(len(starts) - 1),
        jnp.asarray(self._budget * known / (known + later)),
        self._uniform_N[number],
    )

  def popped(self, report):
    """Records how the draw of that run went: a scalar `PrefixPass`, or None."""
    number = self._path.pop()[1]
    if number is not None:
      self._found[number] = report
      self._budget = self._budget - report.probability

  def report(self) -> estimators.PrefixPass | None:
    """The report of all draws, in the order in which the runs were pushed."""
    found = [self._found[number] for number in range(self._count)]
    return jax.tree.map(lambda *x: jnp.stack(x), *found) if found else None
