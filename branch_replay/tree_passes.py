# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole passes over a tree: loops on the host over the steps of a program.

One state holds the path that is open, one accumulator its cotangent; both are
donated from step to step, so memory is that of the deepest path. Where a layer
has no place for every position (a window, a recurrence) its state is small: the
one before each open run stays on a stack, and so does the cotangent that has
come in so far of what the run continued from. Under `jit` the loops unroll, and
every tree compiles anew.
"""

import jax
import jax.numpy as jnp

from branch_replay import balance as balance_lib
from branch_replay import engine
from branch_replay import passes
from branch_replay import tree_draws
from branch_replay import tree_order
from branch_replay import tree_steps
from branch_replay.tree_order import Kind


def outputs(
    task: engine.Task, params, program: tree_order.Program, size: int
):
  """The readout of the whole tree, without a backward pass.

  Args:
    task: model, readout and schedule.
    params: parameters.
    program: of the tree.
    size: N, of the tree's tokens.

  Returns:
    The readout's pytree, each leaf [N, ...] and 0 where nothing is wanted.
  """
  found = []

  def step(opens, run, held, now):
    if opens:
      held, now, *_, out = tree_steps.open_run(
          task, run.read, None, params, held, now, run
      )
    else:
      out = tree_steps.look(task, params, held, now, run)
    if run.read:
      found.append((run.index, out))
    return held, now

  _forward(task, params, program, step)
  return _collect(found, size)


def _forward(task: engine.Task, params, program: tree_order.Program, step):
  """Calls (whether it is pushed, run, held, now) -> (held, now) of each run."""
  held, now = tree_steps.empty(task, program.capacity, params)
  before = []
  for kind, run in program.steps:
    if kind == Kind.CLOSE:
      now = before.pop()
      continue
    if kind == Kind.OPEN:
      before.append(now)
    held, now = step(kind == Kind.OPEN, run, held, now)


def gradient(
    task: engine.Task, params, program: tree_order.Program, size: int, loss,
    args, key=None, share=1.0,
):
  """The gradient in one pass: leaves are run once, inner runs there and back.

  Args:
    task: model, readout, mode and schedule.
    params: parameters.
    program: of the tree.
    size: N, of the tree's tokens.
    loss: (outputs, *args) -> scalar of one run, each [R, C, ...]; None if the
      only one of `args` is the cotangent of the outputs.
    args: tuple of pytrees of arrays with leading axis N.
    key: of "sampled".
    share: factor on the load-balance term.

  Returns:
    `Evaluation`, or `Balanced` with a load-balance term: the loss's sum over
    runs, outputs [N, ...], and in "sampled" which runs were drawn; and
    gradients like `task.trained(params)`, at least float32.
  """
  seeds, load = _count(task, params, program, share)
  held, now = tree_steps.empty(task, program.capacity, params)
  grads, total, of_now = tree_steps.start(task, program.capacity, params)
  nothing, stack, found, values = of_now, [], [], []
  keep = None
  if task.schedule.activations == "keep" and task.layout.devices == 1:
    keep = "stages" if task.accumulates else None
  draws = None
  if task.prefix_gradient == "sampled":
    draws = tree_draws.Draws(task, program, key)
  for kind, run in program.steps:
    reads = run.read or kind == Kind.VISIT
    mine = tree_steps.take(args, run.index) if reads else ()
    out = None
    if kind == Kind.VISIT:
      grads, total, of_now, *out = tree_steps.visit(
          task, loss, params, grads, total, of_now, held, now, run, mine, seeds
      )
    elif kind == Kind.OPEN and run.read and not task.accumulates:
      stack.append((now, of_now, None, None))
      grads, held, now, *out = tree_steps.open_and_visit(
          task, loss, params, grads, held, now, run, mine, seeds
      )
    elif kind == Kind.OPEN:
      earlier = now
      held, now, choices, kept, _ = tree_steps.open_run(
          task, False, keep, params, held, now, run
      )
      stack.append((earlier, of_now, choices, kept))
      of_now = nothing
      if draws:
        draws.opened(run)
    else:
      now, of_parent, choices, kept = stack.pop()
      turn = draws.turn() if draws else None
      if task.accumulates:
        grads, total, of_now, drawn, *out = tree_steps.close(
            task, loss, run.read, params, grads, total, of_now, of_parent,
            held, now, choices, run, kept, mine, turn, seeds,
        )
      if draws:
        draws.closed(drawn)
    if out and run.read:
      found.append((run.index, out[0]))
      values.append(out[1])
  report = draws.report() if draws else None
  outputs_N = _collect(found, size)
  return passes.evaluation(sum(values), outputs_N, report, load), grads


def _count(task: engine.Task, params, program: tree_order.Program, share):
  """Seeds and load of the load-balance term, by a pass of their own."""
  if not task.balance:
    return None, None
  counts = balance_lib.zeros(task.config)

  def step(opens, run, held, now):
    nonlocal counts
    counts, held, now = tree_steps.count(
        task, opens, params, counts, held, now, run
    )
    return held, now

  _forward(task, params, program, step)
  return (
      balance_lib.seeds(task.config, share * task.balance, counts),
      balance_lib.load(task.config, counts),
  )


def _collect(found, size: int):
  """The outputs of runs, each at its place."""
  flat = jax.tree.map(
      lambda x: jnp.zeros((size, *x.shape[2:]), x.dtype), found[0][1]
  )
  for index, out in found:
    flat = tree_steps.put(flat, index, out)
  return flat
