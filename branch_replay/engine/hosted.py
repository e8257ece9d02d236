# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The hosted driver: a loop in Python over the steps of a program.

It runs trees, which differ from each other, and groups whose prefix takes
minutes or hours: it shows progress, can be interrupted between two steps, and
may keep the state in the host's memory. A step is compiled once for the shapes
of its run, whatever the order of steps. One state holds the path of runs that
are open (pushed and not yet popped), one accumulator its cotangent; both are
donated from step to step, so memory is that of the deepest path. For layers
without a place for every position (a window, a recurrence) the cotangent
accumulated for a run's parent waits on a Python stack while the run is open.
Under `jit` the loop unrolls, and every program compiles anew.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import tqdm

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.data import token_tree
from branch_replay.devices import host_memory
from branch_replay.engine import balance as balance_lib
from branch_replay.engine import estimators
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.engine.program import Kind
from branch_replay.engine.program import Program
from branch_replay.engine.spec import Spec
from branch_replay.mixers import kinds


@dataclasses.dataclass(frozen=True)
class Hosted:
  """Settings of the hosted driver.

  Attributes:
    progress: whether to show a progress bar.
    offload: whether the prefix state and its cotangent stay in the host's
      memory and only one layer at a time is on the device. Every step then
      copies the whole state to the device, and in "exact" the cotangent there
      and back.
  """

  progress: bool = False
  offload: bool = False

  def __post_init__(self):
    checks.flag(self.progress, "Hosted.progress")
    checks.flag(self.offload, "Hosted.offload")

  def check(self, spec: Spec):
    """Raises ValueError if these settings do not fit a spec."""
    if self.offload and not kinds.positional(spec.config):
      raise ValueError(
          "offload=True is for full and latent attention: the state of "
          f"{spec.config.layer_pattern} does not grow with the prefix."
      )
    if self.offload and spec.layout.devices > 1:
      raise ValueError(
          f"offload=True is for one device, not {spec.layout.devices}."
      )


class _Open(NamedTuple):
  """What is stored while a run is open, to pop it.

  Attributes:
    saved: what `steps.push` saved of the state before the run.
    kept: the activations it kept, or None.
    of_parent: `state.rest_of` the cotangent accumulated, before the run was
      opened, for the state it was pushed on; None if there was none.
  """

  saved: Any
  kept: Any = None
  of_parent: Any = None


def outputs(spec: Spec, params, program: Program):
  """Runs a program forward and returns the outputs of the readout.

  Args:
    spec: model, readout and schedule.
    params: parameters.
    program: the program of a tree or a group.

  Returns:
    The readout's pytree, each leaf [N, ...], and 0 where no output is wanted.
    N counts the tokens of a tree, or the branches of a group.
  """
  found = []

  def step(kind, run, places, state):
    looks, saved = run.read is not None, None
    if kind == Kind.OPEN:
      state, saved, _, out = _push(spec, None, looks, params, state, run)
    else:
      out = _look(spec, params, state, run) if looks else None
    if looks:
      found.append((places, out))
    return state, saved

  _forward(spec, params, program, step)
  return _collect(found, program.outputs)


def gradient(
    spec: Spec, params, program: Program, loss, args, *, key=None, share=1.0,
    how: Hosted = Hosted(),
):
  """Runs a program forward and backward and returns the gradient.

  Args:
    spec: model, readout, mode and schedule.
    params: parameters.
    program: the program of a tree or a group.
    loss: (outputs, *args) -> scalar, for the rows of one run; None if the only
      one of `args` is the cotangent of the outputs.
    args: tuple of pytrees of arrays with leading axis N, see `outputs`.
    key: PRNG key for "sampled"; else unused.
    share: factor on the load-balance term.
    how: whether to show progress, and where the state is.

  Returns:
    An `Evaluation` (a `Balanced` with a load-balance term): the loss summed
    over runs, outputs [N, ...], and in "sampled" which runs were drawn; and
    gradients like `spec.trained(params)`, at least float32.
  """
  if spec.layout.devices > 1 and spec.schedule.activations == "keep":
    spec = spec.with_policy("recompute")  # activations are kept on one only
  seeds, load = _count(spec, params, program, share)
  state = _placed(how, _empty, spec, program.capacity, params)
  grads = total = None
  stack, found, values, draws = [], [], [], None
  keep = None
  if spec.schedule.activations == "keep" and spec.accumulates:
    keep = "stages"
  if spec.prefix_gradient == "sampled":
    draws = Draws(spec, program, key)
  shown = [
      step for step in program.steps
      if spec.accumulates or step.kind != Kind.CLOSE
  ]
  with tqdm.tqdm(
      total=len(shown), unit="step", disable=not how.progress
  ) as bar:
    for kind, run, places in program.steps:
      mine = () if run.read is None else _take(args, places)
      opens = kind == Kind.OPEN and (spec.accumulates or run.read is None)
      if grads is None and not opens:
        grads = _zero_grads(spec, params)
        if spec.accumulates:
          total = _placed(how, _zero_total, spec, program.capacity, params)
      out = None
      if kind == Kind.VISIT:
        grads, total, *out = _visit(
            spec, loss, params, grads, total, state, run, places, mine, seeds
        )
      elif opens:
        state, saved, kept, _ = _push(spec, keep, False, params, state, run)
        of_parent, total = _set_aside(spec.config, total)
        stack.append(_Open(saved, kept, of_parent))
        if draws:
          draws.opened(run)
      elif kind == Kind.OPEN:
        grads, state, saved, *out = _push_and_visit(
            spec, loss, params, grads, state, run, places, mine, seeds
        )
        stack.append(_Open(saved))
      elif spec.accumulates:
        turn = draws.turn() if draws else None
        grads, total, rest, report, *out = _pop(
            spec, loss, params, grads, total, state, run, stack.pop(), places,
            mine, turn, seeds,
        )
        state = state_lib.with_rest(spec.config, state, rest)
        if draws:
          draws.closed(report)
      else:
        state = _restored(spec, state, run, stack.pop())
      if out and run.read is not None:
        found.append((places, out[0]))
        values.append(out[1])
      if how.progress and (spec.accumulates or kind != Kind.CLOSE):
        jax.block_until_ready((state, grads))  # done, not only enqueued
        bar.set_description(_SHOWN[kind])
        bar.update()
  report = draws.report() if draws else None
  everything = _collect(found, program.outputs)
  return spec_lib.evaluation(sum(values), everything, report, load), grads


_SHOWN = {
    Kind.OPEN: "prefix forward", Kind.VISIT: "branches",
    Kind.CLOSE: "prefix backward",
}


class Draws:
  """Decides which runs "sampled" pulls back as a program opens and closes them.

  A run with outputs of its own is pulled back in any case, with all of its
  accumulated cotangent. Every other run is drawn when it is closed, with a
  probability that is fixed before the draw, see `estimators`. The runs of a
  path are closed deepest first, so the cotangent of a run is complete when it
  is drawn, and the expectation is the exact gradient.

  The budget is how many runs to pull back, in expectation. At a draw it is
  divided between the runs that are open, whose cotangents have a known size,
  and those that are not opened yet, in proportion to their numbers.
  """

  def __init__(self, spec: Spec, program: Program, key):
    self._count = sum(run.read is None for run in program.inner)
    self._uniform_N = estimators.uniforms(key, self._count)
    self._budget = min(spec.sampling.chunks, self._count)
    self._depth = program.depth
    self._open, self._started, self._found = [], 0, {}

  def opened(self, run):
    """Notes that a run was pushed."""
    self._open.append((run, None if run.read else self._started))
    self._started += run.read is None

  def turn(self) -> steps.Turn | None:
    """Inputs to the draw of the run opened last; None if it always runs."""
    number = self._open[-1][1]
    if number is None:
      return None
    room = self._depth - len(self._open)
    starts = [int(run.first) for run, _ in self._open]
    waiting = [number is not None for _, number in self._open]
    known, later = sum(waiting), self._count - self._started
    return steps.Turn(
        np.array(starts + [np.iinfo(np.int32).max] * room, np.int32),
        np.array(waiting + [False] * room), np.int32(len(starts) - 1),
        jnp.asarray(self._budget * known / (known + later)),
        self._uniform_N[number],
    )

  def closed(self, report):
    """Notes that the run opened last was popped.

    Args:
      report: how its draw went, a `PrefixPass` of scalars; None without a draw.
    """
    number = self._open.pop()[1]
    if number is not None:
      self._found[number] = report
      self._budget = self._budget - report.probability

  def report(self) -> estimators.PrefixPass | None:
    """Returns the `PrefixPass` of all drawn runs, in the order of opening."""
    found = [self._found[number] for number in range(self._count)]
    return jax.tree.map(lambda *x: jnp.stack(x), *found) if found else None


def _forward(spec, params, program, step):
  """Runs a program forward, calling step for each push and visit.

  `step` is (kind, run, places, state) -> (state, saved).
  """
  state, stack = _empty(spec, program.capacity, params), []
  for kind, run, places in program.steps:
    if kind == Kind.CLOSE:
      state = _restored(spec, state, run, stack.pop())
      continue
    state, saved = step(kind, run, places, state)
    if kind == Kind.OPEN:
      stack.append(_Open(saved))


def _count(spec, params, program, share):
  """Counts experts in a forward pass: (seeds, load) of the balance term."""
  if not spec.balance:
    return None, None
  counts = balance_lib.zeros(spec.config)

  def step(kind, run, places, state):
    nonlocal counts
    del places
    counts, state, saved = _tally(
        spec, kind == Kind.OPEN, params, counts, state, run
    )
    return state, saved

  _forward(spec, params, program, step)
  return (
      balance_lib.seeds(spec.config, share * spec.balance, counts),
      balance_lib.load(spec.config, counts),
  )


def _collect(found, size: int):
  """Puts the outputs of all runs at their places in arrays [size, ...]."""
  places, first = found[0]
  flat = jax.tree.map(
      lambda x: jnp.zeros((size, *x.shape[places.ndim :]), x.dtype), first
  )
  for places, out in found:
    flat = _put(flat, places, out)
  return flat


def _placed(how: Hosted, make, *args):
  """Makes zeros by `make(*args)`, in the host's memory if it is offloaded."""
  if not how.offload:
    return make(*args)
  shapes = jax.eval_shape(functools.partial(make, *args))
  if not isinstance(shapes, state_lib.PrefixState):
    return host_memory.zeros(shapes)
  rest = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      dataclasses.replace(shapes, mixer=None),
  )
  return dataclasses.replace(rest, mixer=host_memory.zeros(shapes.mixer))


def _set_aside(config, total):
  """Takes `rest_of` an accumulator out while a run is open; leaves zeros."""
  if total is None or kinds.positional(config):
    return None, total
  rest = state_lib.rest_of(config, total)
  zeros = jax.tree.map(jnp.zeros_like, rest)
  return rest, state_lib.with_rest_of(config, total, zeros)


def _restored(spec, state, run, opened: _Open):
  """Rebuilds the state before the run that was pushed last."""
  if kinds.positional(spec.config):
    return state
  return state_lib.with_rest(
      spec.config, state, _restore(spec, state, run, opened.saved)
  )


@functools.partial(jax.jit, donate_argnums=0)
def _put(flat, places, out):
  """Writes the outputs of a run at their places in arrays [N, ...]."""
  def put_one(x_N, new):
    at = jnp.where(places < 0, x_N.shape[0], places)
    return x_N.at[at].set(new, mode="drop")

  return jax.tree.map(put_one, flat, out)


@jax.jit
def _take(args, places):
  """Takes the arguments of one run from arrays [N, ...] of a program."""
  return jax.tree.map(lambda x: token_tree.take(x, places), args)


def _pull(loss, places, args) -> steps.Pull:
  """Makes the `Pull` of a loss that sees 0 for outputs that are not wanted."""
  cotangent = spec_lib.cotangent_of(loss)

  def wanted(tree):
    def of(x):
      there = (places >= 0).reshape(
          *places.shape, *(1,) * (x.ndim - places.ndim)
      )
      return jnp.where(there, x, jnp.zeros((), x.dtype))

    return tree if places.ndim == 1 else jax.tree.map(of, tree)

  def of_wanted(outputs, *args):
    d_outputs, value = cotangent(wanted(outputs), *args)
    return wanted(d_outputs), value

  return steps.Pull(of_wanted, args)


# The compiled steps. Each runs on every device, on its share: `here`.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(spec, capacity, params):
  def here(_):
    return state_lib.empty(
        spec.config, capacity, devices=spec.layout.devices
    )

  return spec.layout.over(here, ("params",), spec.state)(params)


@functools.partial(jax.jit, static_argnums=0)
def _zero_grads(spec, params):
  def here(params):
    return spec_lib.zero_grads(spec.trained(params))

  return spec.layout.over(
      here, ("params",), "grads", spec.trained(params)
  )(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zero_total(spec, capacity, params):
  def here(_):
    return state_lib.accumulator(
        spec.config, capacity // spec.layout.devices,
        spec.schedule.accumulator_dtype, spec.layout.devices,
    )

  return spec.layout.over(here, ("params",), "mixer")(params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _push(spec, keep, looks, params, state, run):
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
def _look(spec, params, state, run):
  def here(params, state, run):
    outer = spec.outer(params)
    return steps.look(spec, params, outer, state, run, keep=None)[0]

  ins = "params", spec.state, "all"
  return spec.layout.over(here, ins, "all")(params, state, run)


@functools.partial(jax.jit, static_argnums=0)
def _restore(spec, state, run, saved):
  def here(state, run, saved):
    return steps.restore(spec, state, run, saved)

  ins = spec.state, "all", "mixer"
  return spec.layout.over(here, ins, "mixer")(state, run, saved)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _tally(spec, opens, params, counts, state, run):
  """Counts the experts that a run chooses, and pushes it if `opens`."""
  def here(params, counts, state, run):
    new, saved = balance_lib.zeros(spec.config), None
    if opens:
      state, saved, _ = steps.push(spec, params, state, run)
      new = steps.count_pushed(spec, new, state, run)
    else:
      new = steps.count(spec, params, new, state, run)
    counts = jax.tree.map(jnp.add, counts, spec.layout.sum(new))
    return counts, state, saved

  ins, outs = ("params", "all", spec.state, "all"), ("all", spec.state, "mixer")
  return spec.layout.over(here, ins, outs)(params, counts, state, run)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _visit(spec, loss, params, grads, total, state, run, places, args, seeds):
  """Runs leaves forward and backward."""
  def here(params, grads, total, state, run, places, args, seeds):
    pull = None if run.read is None else _pull(loss, places, args)
    return steps.visit(
        spec, params, spec.outer(params), grads, total, state, run, pull,
        seeds=seeds,
    )

  mixer = "mixer" if spec.accumulates else "all"
  ins = "params", "grads", mixer, spec.state, *("all",) * 4
  outs = "grads", mixer, "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, total, state, run, places, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _push_and_visit(
    spec, loss, params, grads, state, run, places, args, seeds
):
  """Pushes a run and pulls back its own outputs; the state is constant."""
  def here(params, grads, state, run, places, args, seeds):
    kept_as = steps.keeps(spec.schedule.activations)
    state, saved, kept = steps.push(spec, params, state, run, keep=kept_as)
    # The run's backward pass reads the new state: the old one would be copied.
    before = state_lib.with_rest(
        spec.config, state, steps.restore(spec, state, run, saved)
    )
    grads, _, out, value = steps.visit(
        spec, params, spec.outer(params), grads, None, before, run,
        _pull(loss, places, args), kept=kept, seeds=seeds,
    )
    return grads, state, saved, out, value

  ins = "params", "grads", spec.state, *("all",) * 4
  outs = "grads", spec.state, "mixer", "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, state, run, places, args, seeds
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _pop(
    spec, loss, params, grads, total, state, run, opened, places, args, turn,
    seeds,
):
  """Pops a run: pulls back its own outputs and its accumulated cotangent."""
  def here(params, grads, total, state, run, opened, places, args, turn, seeds):
    pull = None if run.read is None else _pull(loss, places, args)
    grads, total, rest, out, value, report = steps.pop(
        spec, params, grads, total, state, run, opened.saved,
        kept=opened.kept, pull=pull, turn=turn, seeds=seeds,
    )
    if opened.of_parent is not None:
      of_rest = state_lib.rest_of(spec.config, total)
      of_rest = jax.tree.map(jnp.add, opened.of_parent, of_rest)
      total = state_lib.with_rest_of(spec.config, total, of_rest)
    start = spec.layout.here(run.first)
    width = run.tokens_RS.shape[1] // spec.layout.devices
    total = _cleared(spec.config, total, start, width)
    return grads, total, rest, report, out, value

  mixer = _Open("mixer", "all", "mixer")
  ins = "params", "grads", "mixer", spec.state, "all", mixer, *("all",) * 4
  outs = "grads", "mixer", "mixer", "all", "all", "all"
  return spec.layout.over(here, ins, outs, grads)(
      params, grads, total, state, run, opened, places, args, turn, seeds
  )


def _cleared(config: config_lib.ModelConfig, total, start, width: int):
  """Sets the accumulator to zero at the places of a run that was popped.

  The next run pushed there must start from zero. All `width` places are
  cleared, since the padding of the run has places too.
  """
  def clear(x_LKPD):
    shape = *x_LKPD.shape[:2], width, x_LKPD.shape[3]
    zeros = host_memory.beside(jnp.zeros(shape, x_LKPD.dtype), x_LKPD)
    return lax.dynamic_update_slice_in_dim(x_LKPD, zeros, start, axis=2)

  return state_lib.over_places(config, clear, total)
