# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a tree, and the loops that drive them.

One state holds the path that is open, one accumulator its cotangent; both are
donated from step to step, so memory is that of the deepest path. Where a layer
has no place for every position (a window, a recurrence) its state is small: the
one before each open run stays on a stack, and so does the cotangent that has
come in so far of what the run continued from.

A step compiles once for the shapes of a run and the capacity of the state; in
which order steps come is data. Under `jit` the loops unroll, and every tree
compiles anew.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import engine
from branch_replay import passes
from branch_replay import pattern
from branch_replay import rows as rows_lib
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay import token_tree
from branch_replay import tree_order
from branch_replay.mixers import sizes
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
  held, now = _empty(task, program.capacity, params)
  before, found = [], []
  for kind, run in program.steps:
    if kind == Kind.CLOSE:
      now = before.pop()
      continue
    if kind == Kind.OPEN:
      before.append(now)
      held, now, *_, out = _open(
          task, run.read, None, params, held, now, run
      )
    else:
      out = _look(task, params, held, now, run)
    if run.read:
      found.append((run.index, out))
  return _collect(found, size)


def gradient(
    task: engine.Task, params, program: tree_order.Program, size: int, loss,
    args,
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

  Returns:
    The loss's sum over runs, the outputs [N, ...], and gradients like
    `task.trained(params)`, at least float32.
  """
  held, now = _empty(task, program.capacity, params)
  grads, total, of_now = _start(task, program.capacity, params)
  nothing, stack, found, values = of_now, [], [], []
  keep = None
  if task.schedule.activations == "keep" and task.layout.devices == 1:
    keep = "stages" if task.accumulates else None
  for kind, run in program.steps:
    mine = _take(args, run.index) if run.read else ()
    out = None
    if kind == Kind.VISIT:
      grads, total, of_now, *out = _visit(
          task, loss, params, grads, total, of_now, held, now, run, mine
      )
    elif kind == Kind.OPEN and run.read and not task.accumulates:
      stack.append((now, of_now, None, None))
      grads, held, now, *out = _open_and_visit(
          task, loss, params, grads, held, now, run, mine
      )
    elif kind == Kind.OPEN:
      earlier = now
      held, now, choices, kept, _ = _open(
          task, False, keep, params, held, now, run
      )
      stack.append((earlier, of_now, choices, kept))
      of_now = nothing
    else:
      now, of_parent, choices, kept = stack.pop()
      if task.accumulates:
        grads, total, of_now, *out = _close(
            task, loss, run.read, params, grads, total, of_now, of_parent,
            held, now, choices, run, kept, mine,
        )
    if out and run.read:
      found.append((run.index, out[0]))
      values.append(out[1])
  return sum(values), _collect(found, size), grads


def _collect(found, size: int):
  """The outputs of runs, each at its place."""
  flat = jax.tree.map(
      lambda x: jnp.zeros((size, *x.shape[2:]), x.dtype), found[0][1]
  )
  for index, out in found:
    flat = _put(flat, index, out)
  return flat


@functools.partial(jax.jit, donate_argnums=0)
def _put(flat, index, out):
  def put(x_N, new):
    at = jnp.where(index < 0, x_N.shape[0], index)
    return x_N.at[at].set(new, mode="drop")

  return jax.tree.map(put, flat, out)


@jax.jit
def _take(args, index):
  return jax.tree.map(lambda x: token_tree.take(x, index), args)


# Each of these runs on every device, on its share: `here`.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(task, capacity, params):
  """A state of no positions, in two parts."""
  def here(_):
    state = state_lib.empty(
        task.config, capacity, devices=task.layout.devices
    )
    return _part(task.config, state.mixer)

  return task.layout.over(here, ("params",), ("mixer", "mixer"))(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(task, capacity, params):
  """Zero gradients and a zero accumulator in two parts, or None."""
  layout = task.layout

  def here(params):
    parts = None, None
    if task.accumulates:
      parts = _part(task.config, state_lib.accumulator(
          task.config, capacity // layout.devices,
          task.schedule.accumulator_dtype, layout.devices,
      ))
    return engine.zero_grads(task.trained(params)), *parts

  mixer = "mixer" if task.accumulates else "all"
  outs = "grads", mixer, mixer
  return layout.over(here, ("params",), outs, task.trained(params))(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _open(task, read, keep, params, held, now, run):
  """Pushes a run.

  Returns:
    The state in two parts, the experts of the run's tokens, what was kept, and
    the run's outputs if they are wanted.
  """
  def here(params, held, now, run):
    _, kept, choices, held, now = _advance(task, params, held, now, run, keep)
    out = None
    if read:
      outer = task.outer(params)
      out, _ = rows_lib.read(task, outer, kept[0], _rows(run), 0, outer)
    return held, now, choices, kept if keep else None, out

  ins = "params", "mixer", "mixer", "all"
  outs = "mixer", "mixer", "mixer", "all", "all"
  return task.layout.over(here, ins, outs)(params, held, now, run)


@functools.partial(jax.jit, static_argnums=0)
def _look(task, params, held, now, run):
  """The outputs of leaves."""
  def here(params, held, now, run):
    outer, rows = task.outer(params), _rows(run)
    context = _context(task, _whole(task.config, held, now), run)
    y_RCM, _ = rows_lib.run(task, params, rows, context, None)
    return rows_lib.read(task, outer, y_RCM, rows, 0, outer)[0]

  ins = "params", "mixer", "mixer", "all"
  return task.layout.over(here, ins, "all")(params, held, now, run)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _visit(task, loss, params, grads, total, of_now, held, now, run, args):
  """Leaves there and back."""
  def here(params, grads, total, of_now, held, now, run, args):
    accumulator = None
    if task.accumulates:
      accumulator = _whole(task.config, total, of_now)
    grads, accumulator, out, value = rows_lib.visit(
        task, params, task.outer(params), grads, accumulator, _rows(run), 0,
        _context(task, _whole(task.config, held, now), run),
        _cotangent(loss, run), args,
    )
    if task.accumulates:
      total, of_now = _part(task.config, accumulator)
    return grads, total, of_now, out, value

  mixer = "mixer" if task.accumulates else "all"
  ins = "params", "grads", mixer, mixer, "mixer", "mixer", "all", "all"
  outs = "grads", mixer, mixer, "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, total, of_now, held, now, run, args
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _open_and_visit(task, loss, params, grads, held, now, run, args):
  """Pushes a run and pulls its own outputs back, but no further."""
  def here(params, grads, held, now, run, args):
    keep = rows_lib.segment_keep(task.schedule.activations)
    context, kept, _, held, new = _advance(task, params, held, now, run, keep)
    # What it continues from is read where it stands now, or it is copied.
    context = context._replace(prefix=state_lib.seen(
        task.config, _whole(task.config, held, now)
    ))
    grads, _, out, value = rows_lib.visit(
        task, params, task.outer(params), grads, None, _rows(run), 0,
        context, _cotangent(loss, run), args, kept,
    )
    return grads, held, new, out, value

  ins = "params", "grads", "mixer", "mixer", "all", "all"
  outs = "grads", "mixer", "mixer", "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, held, now, run, args
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _close(
    task, loss, read, params, grads, total, of_now, of_parent, held, now,
    choices, run, kept, args,
):
  """Pulls back all that has come in of a run, its own outputs' included.

  Args:
    task, loss: static.
    read: whether it has outputs; static.
    params, grads: parameters and their gradients.
    total: the cotangent of every open position, of which the run's are zero
      again after it.
    of_now: the cotangent of the rest of the state after the run.
    of_parent: what has come in so far of the same before it.
    held: the open positions.
    now: the rest of the state before the run.
    choices: the experts of the run's tokens, as `_open` found them.
    run: the run.
    kept: what `_open` kept; None runs it again.
    args: of the loss, at its outputs.

  Returns:
    grads, total, the cotangent of the rest of the state before the run,
    outputs, and the loss.
  """
  def here(
      params, grads, total, of_now, of_parent, held, now, choices, run, kept,
      args,
  ):
    context = _context(task, _whole(task.config, held, now), run)
    if kept is None:
      context = context._replace(choices=choices)
    popped = segment.Popped(_chunk(task, run))
    accumulator = _whole(task.config, total, of_now)
    out = value = None
    if read:
      grads, accumulator, out, value = rows_lib.visit(
          task, params, task.outer(params), grads, accumulator, _rows(run), 0,
          context, _cotangent(loss, run), args, kept, popped,
      )
    else:
      tokens = task.layout.mine(run.tokens, 1)
      grads, accumulator = engine.pull_back(
          task, params, grads, accumulator, tokens, context, popped,
          None if kept is None else kept[1],
      )
    total, of_before = _part(task.config, accumulator)
    of_before = jax.tree.map(jnp.add, of_parent, of_before)
    width = run.tokens.shape[1] // task.layout.devices
    total = jax.tree.map(
        lambda x: _cleared(x, popped.chunk.start, width), total
    )
    return grads, total, of_before, out, value

  ins = ("params", "grads", *("mixer",) * 6, "all", "all", "all")
  outs = "grads", "mixer", "mixer", "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, total, of_now, of_parent, held, now, choices, run, kept,
      args,
  )


def _cleared(x_LKPD, start, width: int):
  """Zeros where the next run's cotangents will be added up."""
  zeros = jnp.zeros((*x_LKPD.shape[:2], width, x_LKPD.shape[3]), x_LKPD.dtype)
  return lax.dynamic_update_slice_in_dim(x_LKPD, zeros, start, axis=2)


def _advance(task, params, held, now, run, keep):
  """Runs a run and pushes it.

  Returns:
    What it continued from, its output with what is kept, the experts of its
    one row as `segment.Context` takes them, and the new state in two parts.
  """
  mixer = _whole(task.config, held, now)
  context = _context(task, mixer, run)
  tokens = task.layout.mine(run.tokens, 1)
  y_RCM, present, stages = segment.forward(
      task.config, params["layers"],
      segment.embed(task.config, params, tokens, task.layout), context,
      layout=task.layout, keep=keep, present=True,
  )
  mixer = state_lib.push_mixer(
      task.config, mixer, present, _chunk(task, run)
  )
  choices = jax.tree.map(lambda x_L1RCk: x_L1RCk[:, :, 0], present.choices)
  return context, (y_RCM, stages), choices, *_part(task.config, mixer)


def _context(task, mixer, run) -> segment.Context:
  """What a run continues from, and where it stands."""
  layout, (rows, tokens) = task.layout, run.tokens.shape
  positions_C = layout.positions(run.first, tokens)
  return segment.Context(
      state_lib.seen(task.config, mixer), layout.here(run.first),
      jnp.broadcast_to(positions_C[None], (rows, positions_C.shape[0])),
      run.lengths,
  )


def _chunk(task, run) -> sizes.Chunk:
  """Where the one row of a run stands on this device."""
  start = task.layout.here(run.first)
  end = task.layout.here(run.first + run.lengths[0])
  return sizes.Chunk(None, start, end - start)


def _rows(run) -> rows_lib.Rows:
  return rows_lib.Rows(run.tokens, run.targets, run.lengths)


def _cotangent(loss, run):
  """`loss`, of the outputs that are wanted alone; see `rows.visit`."""
  def wanted(tree):
    def of(x):
      there = (run.index >= 0).reshape(
          *run.index.shape, *(1,) * (x.ndim - 2)
      )
      return jnp.where(there, x, jnp.zeros((), x.dtype))

    return jax.tree.map(of, tree)

  def cotangent(outputs, *args):
    if loss is None:
      return wanted(args[0]), jnp.zeros(())
    d_outputs, value = passes.cotangent_of(loss)(wanted(outputs), *args)
    return wanted(d_outputs), value

  return cotangent


def _part(config, mixer):
  """(what has a place for every position, the rest) of a state or the like."""
  def half(positional):
    return pattern.over(
        config,
        lambda kind, stack: stack
        if config_lib.has_places(kind) == positional else (),
        mixer,
    )

  return half(True), half(False)


def _whole(config, held, rest):
  """Undoes `_part`."""
  return pattern.over(
      config,
      lambda kind, *halves: halves[0 if config_lib.has_places(kind) else 1],
      held, rest,
  )
