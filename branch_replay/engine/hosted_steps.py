# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of the hosted driver, one program each.

A step is compiled once for a spec and the shapes of its run. State, accumulator
and gradients are donated: what is passed in must not be used again. Each step
runs on every device, on its share: the function `here` in it.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.data import token_tree
from branch_replay.devices import host_memory
from branch_replay.engine import balance as balance_lib
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps


class Pushed(NamedTuple):
  """What is stored while a run is on the state, to pop it.

  Attributes:
    saved: what `steps.push` saved of the state before the run.
    kept: the activations it kept, or None.
    of_parent: `state.rest_of` the accumulator as it was before the push, for
      the state that the run was pushed on; None if there was none.
  """

  saved: Any
  kept: Any = None
  of_parent: Any = None


@functools.partial(jax.jit, static_argnums=(0, 1))
def empty(spec, capacity, params):
  """Makes an empty state."""
  def here(_):
    return state_lib.empty(
        spec.config, capacity, devices=spec.layout.devices,
        keep_attention=spec.keeps_attention,
    )

  return spec.layout.over(here, ("params",), spec.state)(params)


@functools.partial(jax.jit, static_argnums=0)
def zero_grads(spec, params):
  """Makes zero gradients."""
  def here(params):
    return spec_lib.zero_grads(spec.trained(params))

  return spec.layout.over(
      here, ("params",), "grads", spec.trained(params)
  )(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def zero_accumulator(spec, capacity, params):
  """Makes an accumulator of zeros."""
  def here(_):
    return state_lib.accumulator(
        spec.config, capacity // spec.layout.devices,
        spec.schedule.accumulator_dtype, spec.layout.devices,
    )

  return spec.layout.over(here, ("params",), "mixer")(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def push(spec, keep, looks, params, state, run):
  """Pushes a run: (state, saved, kept activations, outputs if `looks`)."""
  def here(params, state, run):
    state, saved, (y_RSM, stages) = steps.push(
        spec, params, state, run, keep=keep
    )
    kept = (y_RSM if run.read else None, stages) if keep else None
    out = None
    if looks:
      outer = spec.outer(params)
      out, _ = steps.read(spec, outer, y_RSM, run, outer)
    return state, saved, kept, out

  ins, outs = ("params", spec.state, "all"), (spec.state, "mixer", "all", "all")
  return spec.layout.over(here, ins, outs)(params, state, run)


@functools.partial(jax.jit, static_argnums=0)
def look(spec, params, state, run):
  """Runs leaves forward and returns their outputs."""
  def here(params, state, run):
    outer = spec.outer(params)
    return steps.look(spec, params, outer, state, run, keep=None)[0]

  ins = "params", spec.state, "all"
  return spec.layout.over(here, ins, "all")(params, state, run)


@functools.partial(jax.jit, static_argnums=0)
def restore(spec, state, run, saved):
  """Rebuilds `state.rest_of` the state before the run that was pushed last."""
  def here(state, run, saved):
    return steps.restore(spec, state, run, saved)

  ins = spec.state, "all", "mixer"
  return spec.layout.over(here, ins, "mixer")(state, run, saved)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def count(spec, pushed, params, counts, state, run):
  """Counts the experts that a run chooses.

  With `pushed` the run is on the state, which has its choices; else it is run
  forward on top of the state.
  """
  def here(params, counts, state, run):
    new = balance_lib.zeros(spec.config)
    if pushed:
      new = steps.count_pushed(spec, new, state, run)
    else:
      new = steps.count(spec, params, new, state, run)
    return jax.tree.map(jnp.add, counts, spec.layout.sum(new))

  ins = "params", "all", spec.state, "all"
  return spec.layout.over(here, ins, "all")(params, counts, state, run)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def visit(
    spec, loss, params, grads, accumulator, state, run, index, args, seeds
):
  """Runs leaves forward and backward."""
  def here(params, grads, accumulator, state, run, index, args, seeds):
    pull = None if run.read is None else _pull(loss, index, args)
    return steps.visit(
        spec, params, spec.outer(params), grads, accumulator, state, run, pull,
        seeds=seeds,
    )

  mixer = "mixer" if spec.accumulates else "all"
  ins = "params", "grads", mixer, spec.state, *("all",) * 4
  outs = "grads", mixer, "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, accumulator, state, run, index, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def push_and_visit(spec, loss, params, grads, state, run, index, args, seeds):
  """Pushes a run and pulls back its own outputs; the state is constant."""
  def here(params, grads, state, run, index, args, seeds):
    kept_as = steps.keeps(spec.schedule.activations)
    state, saved, kept = steps.push(spec, params, state, run, keep=kept_as)
    # The run's backward pass reads the new state: the old one would be copied.
    before = state_lib.with_rest(
        spec.config, state, steps.restore(spec, state, run, saved)
    )
    grads, _, out, value = steps.visit(
        spec, params, spec.outer(params), grads, None, before, run,
        _pull(loss, index, args), kept=kept, seeds=seeds,
    )
    return grads, state, saved, out, value

  ins = "params", "grads", spec.state, *("all",) * 4
  outs = "grads", spec.state, "mixer", "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, state, run, index, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def pop(
    spec, loss, params, grads, accumulator, state, run, pushed, index, args,
    draw, seeds,
):
  """Pops a run: pulls back its own outputs and its accumulated cotangent."""
  def here(
      params, grads, accumulator, state, run, pushed, index, args, draw, seeds
  ):
    pull = None if run.read is None else _pull(loss, index, args)
    grads, accumulator, rest, out, value, report = steps.pop(
        spec, params, grads, accumulator, state, run, pushed.saved,
        kept=pushed.kept, pull=pull, draw=draw, seeds=seeds,
    )
    if pushed.of_parent is not None:
      of_rest = state_lib.rest_of(spec.config, accumulator)
      of_rest = jax.tree.map(jnp.add, pushed.of_parent, of_rest)
      accumulator = state_lib.with_rest_of(spec.config, accumulator, of_rest)
    start = spec.layout.here(run.first)
    width = run.tokens_RS.shape[1] // spec.layout.devices
    accumulator = _cleared(spec.config, accumulator, start, width)
    return grads, accumulator, rest, report, out, value

  mixer = Pushed("mixer", "all", "mixer")
  ins = "params", "grads", "mixer", spec.state, "all", mixer, *("all",) * 4
  outs = "grads", "mixer", "mixer", "all", "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, accumulator, state, run, pushed, index, args, draw, seeds
  )


def _cleared(config: config_lib.ModelConfig, accumulator, start, width: int):
  """Sets the accumulator to zero at the places of a run that was popped.

  The next run pushed there must start from zero. All `width` places are
  cleared, since the padding of the run has places too.
  """
  def clear(x_LKPD):
    shape = *x_LKPD.shape[:2], width, x_LKPD.shape[3]
    zeros = host_memory.beside(jnp.zeros(shape, x_LKPD.dtype), x_LKPD)
    return lax.dynamic_update_slice_in_dim(x_LKPD, zeros, start, axis=2)

  return state_lib.over_places(config, clear, accumulator)


def _pull(loss, index, args) -> steps.Pull:
  """Makes the `Pull` of a loss that sees 0 for outputs that are not wanted."""
  cotangent = spec_lib.cotangent_of(loss)

  def wanted(tree):
    def of(x):
      there = (index >= 0).reshape(
          *index.shape, *(1,) * (x.ndim - index.ndim)
      )
      return jnp.where(there, x, jnp.zeros((), x.dtype))

    return tree if index.ndim == 1 else jax.tree.map(of, tree)

  def of_wanted(outputs, *args):
    d_outputs, value = cotangent(wanted(outputs), *args)
    return wanted(d_outputs), value

  return steps.Pull(of_wanted, args)


@jax.jit
def take(args, index):
  """Takes the arguments of one run from arrays [N, ...] of a program."""
  return jax.tree.map(lambda x: token_tree.take(x, index), args)


def collect(found, size: int):
  """Puts the outputs of runs, pairs (index, outputs), into arrays [size, ...].
  """
  index, first = found[0]
  flat = jax.tree.map(
      lambda x: jnp.zeros((size, *x.shape[index.ndim :]), x.dtype), first
  )
  for index, out in found:
    flat = _put(flat, index, out)
  return flat


@functools.partial(jax.jit, donate_argnums=0)
def _put(flat, index, out):
  """Writes the outputs of a run at their index in arrays [N, ...]."""
  def put_one(x_N, new):
    at = jnp.where(index < 0, x_N.shape[0], index)
    return x_N.at[at].set(new, mode="drop")

  return jax.tree.map(put_one, flat, out)
