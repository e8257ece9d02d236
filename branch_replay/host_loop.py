# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The other driver: a Python loop over donated buffers.

For prefixes of minutes or hours: it shows progress after every chunk and every
visit, and stops between two of them. It runs the same three functions as the
scan under jit in `passes`, on one device or several, and gives the same result.
The prefix state and its cotangent may stay in the host's memory, see
`host_memory`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import tqdm

from branch_replay import balance as balance_lib
from branch_replay import engine
from branch_replay import group as group_lib
from branch_replay import host_memory
from branch_replay import params as params_lib
from branch_replay import passes
from branch_replay import prefix_replay
from branch_replay import readout as readout_lib
from branch_replay import state as state_lib
from branch_replay.mixers import kinds
from branch_replay.models import decoder
from branch_replay.schedule import Schedule


def value_and_grad(
    model: decoder.Decoder,
    loss,
    *,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    schedule: Schedule = Schedule(),
    trainable: str = "all",
    balance: float = 0.0,
    progress: bool = True,
    offload: bool = False,
):
  """`prefix_replay.value_and_grad` of one group, step by step from the host.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar, a sum over the branches it is given.
    readout: see `branch_replay.readout`.
    prefix_gradient: "exact" or "stop".
    schedule: sizes, policies and layout; on several devices "keep" becomes
      "recompute", as what is kept does not leave the devices.
    trainable: "all" or "adapters".
    balance: as there, of this group alone: who adds up the gradients of N
      groups divides it by N.
    progress: whether to show a progress bar.
    offload: whether the prefix state and its cotangent stay in the host's
      memory, and on the device one layer at a time. Every chunk and every
      visit then moves all of the state across, and in "exact" the cotangent
      there and back.

  Returns:
    A function (params, group, *args) -> (`Evaluation`, grads), not to be called
    under `jit`. An interrupt raises KeyboardInterrupt between two
    steps; nothing that was passed in has changed then.

  Raises:
    ValueError: another mode; or `offload` with several devices, with layers
      whose state does not grow with the prefix, or without host memory that
      the device reaches.
  """
  if prefix_gradient not in ("exact", "stop"):
    raise ValueError(
        f"The host loop runs 'exact' and 'stop', not {prefix_gradient!r}: use "
        "prefix_replay.value_and_grad."
    )

  params_lib.check_model(model)
  prefix_replay.check_loss(loss)
  if offload and not kinds.positional(model.config):
    raise ValueError(
        "offload=True is for full and latent attention: the state of "
        f"{model.config.layer_pattern} does not grow with the prefix."
    )
  if offload and schedule.layout.devices > 1:
    raise ValueError(
        f"offload=True is for one device, not {schedule.layout.devices}."
    )

  def run(params, group, *args):
    params_lib.check(model, params)
    group_lib.check(group, model.config)
    if group.prompt.ndim == 2:
      raise ValueError("The host loop takes one group, not stacked groups.")
    task = prefix_replay.make_task(
        model, group, readout, prefix_gradient, schedule, trainable=trainable,
        balance=balance,
    )
    prefix_replay.check_args(args, group)
    if task.layout.devices > 1 and task.schedule.activations == "keep":
      again = dataclasses.replace(task.schedule, activations="recompute")
      task = dataclasses.replace(task, schedule=again)
    return _Run(task, params, group, progress, offload).gradient(loss, args)

  return run


class _Run:
  """Buffers of one gradient; every step donates the ones it updates."""

  def __init__(
      self, task: engine.Task, params, group, progress: bool, offload: bool
  ):
    self._task, self._params, self._group = task, params, group
    self._offload = offload
    positions = group.prompt.shape[0] - 1
    self._chunks = task.chunks(positions)
    capacity = self._chunks.capacity
    length = int(group.prompt_length) - 1
    self._used = -(-length // self._chunks.size) if length else 0
    self._state = dataclasses.replace(
        self._empty(),
        tokens=jnp.pad(group.prompt[:-1], (0, capacity - positions)),
        length=jnp.int32(length),
    )
    branches = group.tails.shape[0]
    self._at_once = task.at_once(branches)
    self._exact = task.prefix_gradient == "exact"
    steps = self._used * (1 + self._exact) - (-branches // self._at_once)
    self._bar = tqdm.tqdm(total=steps, unit="step", disable=not progress)

  def gradient(self, loss, args):
    with self._bar:
      kept = self._capture()
      seeds, load = self._count()
      value, outputs, grads, accumulator = self._visit(loss, args, seeds)
      if self._exact:
        grads = self._prefix_pass(grads, accumulator, kept, seeds)
    return passes.evaluation(value, outputs, None, load), grads

  def _empty(self):
    """The state of no positions, its mixer where it belongs."""
    make = functools.partial(_empty, self._task, self._chunks, self._params)
    if not self._offload:
      return make()
    shapes = jax.eval_shape(make)
    rest = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        dataclasses.replace(shapes, mixer=None),
    )
    return dataclasses.replace(rest, mixer=host_memory.zeros(shapes.mixer))

  def _place(self, make, *args):
    """Zeros that a function of static shapes makes, where they belong."""
    if not self._offload:
      return make(*args)
    return host_memory.zeros(jax.eval_shape(functools.partial(make, *args)))

  def _done(self, what: str, result):
    self._bar.set_description(what)
    jax.block_until_ready(result)  # progress is work done, not work enqueued
    self._bar.update()
    return result

  def _capture(self):
    kept = []
    for index in range(self._used):
      self._state, of_chunk = self._done("prefix forward", _push(
          self._task, self._params, self._state, index
      ))
      kept.append(of_chunk)
    return kept

  def _count(self):
    """Seeds and load of the load-balance term, of all branches in one step."""
    task = self._task
    if not task.balance:
      return None, None
    counts = _count(task, self._params, self._state, self._group)
    return (
        balance_lib.seeds(task.config, task.balance, counts),
        balance_lib.load(task.config, counts),
    )

  def _visit(self, loss, args, seeds):
    grads = _zero_grads(self._task, self._params)
    accumulator = None
    if self._exact:
      accumulator = self._place(
          _zero_cotangent, self._task, self._chunks.capacity, self._params
      )
    values, outputs = [], []
    for start in range(0, self._group.tails.shape[0], self._at_once):
      rows = slice(start, start + self._at_once)
      part = dataclasses.replace(
          self._group,
          tails=self._group.tails[rows],
          tail_lengths=self._group.tail_lengths[rows],
          tail_inputs=jax.tree.map(
              lambda x, rows=rows: x[rows], self._group.tail_inputs
          ),
      )
      grads, accumulator, output, value = self._done("branches", _visit(
          self._task, loss, self._params, grads, accumulator, self._state,
          part, jax.tree.map(lambda x, rows=rows: x[rows], args), seeds,
      ))
      values.append(value)
      outputs.append(output)
    outputs = jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)
    return sum(values), outputs, grads, accumulator

  def _prefix_pass(self, grads, accumulator, kept, seeds):
    branches = balance_lib.answered(self._group.tail_lengths)
    seeds = jax.tree.map(lambda x: branches * x, seeds)
    for index in reversed(range(self._used)):
      grads, accumulator = self._done("prefix backward", _pop(
          self._task, self._params, grads, accumulator, self._state, index,
          kept.pop(), seeds,
      ))
    return grads


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(task, chunks, params):
  layout = task.layout

  def here(_):
    return state_lib.empty(
        task.config, chunks.capacity, devices=layout.devices,
        popped=chunks if task.accumulates else state_lib.NO_CHUNKS,
    )

  return layout.over(here, ("params",), "state")(params)


@functools.partial(jax.jit, static_argnums=0)
def _zero_grads(task, params):
  def here(params):
    return engine.zero_grads(task.trained(params))

  return task.layout.over(
      here, ("params",), "grads", task.trained(params)
  )(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _zero_cotangent(task, capacity, params):
  layout = task.layout

  def here(_):
    return state_lib.accumulator(
        task.config, capacity // layout.devices,
        task.schedule.accumulator_dtype, layout.devices,
    )

  return layout.over(here, ("params",), "mixer")(params)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _push(task, params, state, index):
  keep = task.prefix_gradient == "exact" and (
      task.schedule.activations == "keep"
  )

  def here(params, state, index):
    return engine.push_chunk(
        task, params, state, index, keep="stages" if keep else None
    )

  ins = "params", "state", "all"
  return task.layout.over(here, ins, ("state", "all"))(params, state, index)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _visit(task, loss, params, grads, accumulator, state, group, args, seeds):
  def here(params, grads, accumulator, state, group, args, seeds):
    grads, accumulator, outputs, (values, _) = engine.visit_branches(
        task, params, grads, accumulator, state, group,
        passes.cotangent_of(loss), args, seeds=seeds,
    )
    return grads, accumulator, outputs, jnp.sum(values)

  mixer = "mixer" if task.accumulates else "all"
  ins = "params", "grads", mixer, "state", "all", "all", "all"
  return task.layout.over(here, ins, ("grads", mixer, "all", "all"), grads)(
      params, grads, accumulator, state, group, args, seeds
  )


@functools.partial(jax.jit, static_argnums=0)
def _count(task, params, state, group):
  here = functools.partial(engine.count_choices, task)
  return task.layout.over(here, ("params", "state", "all"), "all")(
      params, state, group
  )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _pop(task, params, grads, accumulator, state, index, kept, seeds):
  def here(params, grads, accumulator, state, index, kept, seeds):
    return engine.pop_chunk(
        task, params, grads, accumulator, state, index, kept, seeds=seeds
    )

  ins = "params", "grads", "mixer", "state", "all", "all", "all"
  return task.layout.over(here, ins, ("grads", "mixer"), grads)(
      params, grads, accumulator, state, index, kept, seeds
  )
