# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a tree, which `tree_passes` drives.

A step compiles once for the shapes of a run and the capacity of the state; in
which order steps come is data. Each is told the open positions of the state in
two parts: `held`, of the layers with a place for every position, and `now`, the
rest.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import balance as balance_lib
from branch_replay import chunk_sampling
from branch_replay import engine
from branch_replay import passes
from branch_replay import pattern
from branch_replay import rows as rows_lib
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay import token_tree
from branch_replay import tree_draws
from branch_replay.mixers import kinds
from branch_replay.mixers import sizes


@functools.partial(jax.jit, donate_argnums=0)
def put(flat, index, out):
  """Arrays [N, ...] with those [R, C, ...] of a run at their places."""
  def put_one(x_N, new):
    at = jnp.where(index < 0, x_N.shape[0], index)
    return x_N.at[at].set(new, mode="drop")

  return jax.tree.map(put_one, flat, out)


@jax.jit
def take(args, index):
  """Arrays [R, C, ...] of a run from those [N, ...] of the tree."""
  return jax.tree.map(lambda x: token_tree.take(x, index), args)


# Each of these runs on every device, on its share: `here`.


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(task, capacity, params):
  """A state of no positions, in two parts."""
  def here(_):
    state = state_lib.empty(
        task.config, capacity, devices=task.layout.devices
    )
    return _part(task.config, state.mixer)

  return task.layout.over(here, ("params",), ("mixer", "mixer"))(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(task, capacity, params):
  """Zero gradients, and a zero accumulator in two parts, or None."""
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
def open_run(task, read, keep, params, held, now, run):
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
def look(task, params, held, now, run):
  """The outputs [R, C, ...] of leaves."""
  def here(params, held, now, run):
    outer, rows = task.outer(params), _rows(run)
    context = _context(task, _whole(task.config, held, now), run)
    y_RCM, _ = rows_lib.run(task, params, rows, context, None)
    return rows_lib.read(task, outer, y_RCM, rows, 0, outer)[0]

  ins = "params", "mixer", "mixer", "all"
  return task.layout.over(here, ins, "all")(params, held, now, run)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def count(task, opens, params, counts, held, now, run):
  """Counts how often each expert is chosen, in every sequence of the tree.

  Args:
    task: static.
    opens: whether the run is pushed, too; static.
    params: parameters.
    counts: [L, E] by stack; added to.
    held, now: the state.
    run: the run.

  Returns:
    The counts, and the state in two parts.
  """
  def here(params, counts, held, now, run):
    if opens:
      context, _, choices, held, now = _advance(
          task, params, held, now, run, None
      )
      choices = jax.tree.map(lambda x_L1Ck: x_L1Ck[:, :, None], choices)
    else:
      context = _context(task, _whole(task.config, held, now), run)
      tokens = task.layout.mine(run.tokens, 1)
      _, present, _ = segment.forward(
          task.config, params["layers"],
          segment.embed(task.config, params, tokens, task.layout), context,
          layout=task.layout, keep=None, present=True,
      )
      choices = present.choices
    new = balance_lib.add(
        balance_lib.zeros(task.config), choices, _sequences(run, context)
    )
    counts = jax.tree.map(jnp.add, counts, task.layout.sum(new))
    return counts, held, now

  ins = "params", "all", "mixer", "mixer", "all"
  outs = "all", "mixer", "mixer"
  return task.layout.over(here, ins, outs)(params, counts, held, now, run)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def visit(
    task, loss, params, grads, total, of_now, held, now, run, args, seeds=None
):
  """Leaves there and back."""
  def here(params, grads, total, of_now, held, now, run, args, seeds):
    accumulator = None
    if task.accumulates:
      accumulator = _whole(task.config, total, of_now)
    grads, accumulator, out, value = rows_lib.visit(
        task, params, task.outer(params), grads, accumulator, _rows(run), 0,
        _context(task, _whole(task.config, held, now), run, seeds),
        _cotangent(loss, run), args,
    )
    if task.accumulates:
      total, of_now = _part(task.config, accumulator)
    return grads, total, of_now, out, value

  mixer = "mixer" if task.accumulates else "all"
  ins = "params", "grads", mixer, mixer, "mixer", "mixer", *("all",) * 3
  outs = "grads", mixer, mixer, "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, total, of_now, held, now, run, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def open_and_visit(
    task, loss, params, grads, held, now, run, args, seeds=None
):
  """Pushes a run and pulls its own outputs back, but no further."""
  def here(params, grads, held, now, run, args, seeds):
    keep = rows_lib.segment_keep(task.schedule.activations)
    context, kept, _, held, new = _advance(task, params, held, now, run, keep)
    # What it continues from is read where it stands now, or it is copied.
    context = context._replace(
        prefix=state_lib.seen(task.config, _whole(task.config, held, now)),
        balance=_balance(run, context, seeds),
    )
    grads, _, out, value = rows_lib.visit(
        task, params, task.outer(params), grads, None, _rows(run), 0,
        context, _cotangent(loss, run), args, kept,
    )
    return grads, held, new, out, value

  ins = "params", "grads", "mixer", "mixer", *("all",) * 3
  outs = "grads", "mixer", "mixer", "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, held, now, run, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def close(
    task, loss, read, params, grads, total, of_now, of_parent, held, now,
    choices, run, kept, args, turn=None, seeds=None,
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
    choices: the experts of the run's tokens, as `open_run` found them.
    run: the run.
    kept: what `open_run` kept; None runs it again.
    args: of the loss, at its outputs.
    turn: `tree_draws.Turn` of a run without outputs that may be left out.
    seeds: of the load-balance term, or None.

  Returns:
    grads, total, the cotangent of the rest of the state before the run, a
    `PrefixPass` of it if it had a turn, outputs, and the loss.
  """
  def here(
      params, grads, total, of_now, of_parent, held, now, choices, run, kept,
      args, turn, seeds,
  ):
    chunk = _chunk(task, run)
    accumulator = _whole(task.config, total, of_now)
    out = value = report = None
    scale = 1.0
    if turn is not None:
      report = tree_draws.drawn(task, accumulator, turn)
      scale = chunk_sampling.weight(report.probability, report.drawn)
    popped = segment.Popped(chunk, scale)
    mixer = _whole(task.config, held, now)
    context = _context(task, mixer, run, seeds, scale)
    if kept is None:
      context = context._replace(choices=choices)

    def pull_back(grads, accumulator):
      return engine.pull_back(
          task, params, grads, accumulator, task.layout.mine(run.tokens, 1),
          context, popped, None if kept is None else kept[1],
      )

    if read:
      grads, accumulator, out, value = rows_lib.visit(
          task, params, task.outer(params), grads, accumulator, _rows(run), 0,
          context, _cotangent(loss, run), args, kept, popped,
      )
    elif turn is None:
      grads, accumulator = pull_back(grads, accumulator)
    else:
      grads, accumulator = chunk_sampling.pop_or_skip(
          task.config, report.drawn, pull_back,
          lambda total: state_lib.skip(task.config, total, chunk),
          grads, accumulator,
      )
    total, of_before = _part(task.config, accumulator)
    of_before = jax.tree.map(jnp.add, of_parent, of_before)
    width = run.tokens.shape[1] // task.layout.devices
    total = jax.tree.map(
        lambda x: _cleared(x, chunk.start, width), total
    )
    return grads, total, of_before, report, out, value

  ins = ("params", "grads", *("mixer",) * 6, *("all",) * 5)
  outs = "grads", "mixer", "mixer", "all", "all", "all"
  return task.layout.over(here, ins, outs, grads)(
      params, grads, total, of_now, of_parent, held, now, choices, run, kept,
      args, turn, seeds,
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


def _context(task, mixer, run, seeds=None, scale=1.0) -> segment.Context:
  """What a run continues from, where it stands, and what it is seeded with."""
  layout, (rows, tokens) = task.layout, run.tokens.shape
  positions_C = layout.positions(run.first, tokens)
  context = segment.Context(
      state_lib.seen(task.config, mixer), layout.here(run.first),
      jnp.broadcast_to(positions_C[None], (rows, positions_C.shape[0])),
      run.lengths,
  )
  return context._replace(balance=_balance(run, context, seeds, scale))


def _balance(run, context, seeds, scale=1.0) -> segment.Balance | None:
  if seeds is None:
    return None
  return segment.Balance(seeds, scale * _sequences(run, context))


def _sequences(run, context):
  """How many sequences each of this device's tokens stands in, [R, C]."""
  end_R1 = run.first + run.lengths[:, None]
  return jnp.where(context.positions_GT < end_R1, run.sequences[:, None], 0)


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
        if kinds.of(config, kind).positional == positional else (),
        mixer,
    )

  return half(True), half(False)


def _whole(config, held, rest):
  """Undoes `_part`."""
  return pattern.over(
      config,
      lambda kind, held, rest:
      held if kinds.of(config, kind).positional else rest,
      held, rest,
  )
