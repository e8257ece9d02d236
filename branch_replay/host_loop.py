# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The other driver: a Python loop over donated buffers.

For prefixes of minutes or hours: it shows progress after every chunk and every
visit, and stops between two of them. It runs the same three functions as the
scan under jit in `passes`, on one device or several, and gives the same result.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import tqdm

from branch_replay import engine
from branch_replay import passes
from branch_replay import prefix_replay
from branch_replay import readout as readout_lib
from branch_replay import state as state_lib
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
    progress: bool = True,
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
    progress: whether to show a progress bar.

  Returns:
    A function (params, group, *args) -> (`Evaluation`, grads), not to be called
    under `jit`. An interrupt raises KeyboardInterrupt between two
    steps; nothing that was passed in has changed then.

  Raises:
    ValueError: another mode.
  """
  if prefix_gradient not in ("exact", "stop"):
    raise ValueError(
        f"The host loop runs 'exact' and 'stop', not {prefix_gradient!r}: use "
        "prefix_replay.value_and_grad."
    )

  def run(params, group, *args):
    if group.prompt.ndim == 2:
      raise ValueError("The host loop takes one group, not stacked groups.")
    task = prefix_replay.make_task(
        model, group, readout, prefix_gradient, schedule, trainable=trainable
    )
    if task.layout.devices > 1 and task.schedule.activations == "keep":
      again = dataclasses.replace(task.schedule, activations="recompute")
      task = dataclasses.replace(task, schedule=again)
    return _Run(task, params, group, progress).gradient(loss, args)

  return run


class _Run:
  """Buffers of one gradient; every step donates the ones it updates."""

  def __init__(self, task: engine.Task, params, group, progress: bool):
    self._task, self._params, self._group = task, params, group
    positions = group.prompt.shape[0] - 1
    self._chunks = task.chunks(positions)
    capacity = self._chunks.capacity
    length = int(group.prompt_length) - 1
    self._used = -(-length // self._chunks.size) if length else 0
    self._state = state_lib.PrefixState(
        mixer=_empty(task, self._chunks, params),
        tokens=jnp.pad(group.prompt[:-1], (0, capacity - positions)),
        length=jnp.int32(length),
        version=jnp.uint32(0),
        devices=task.layout.devices,
    )
    branches = group.tails.shape[0]
    self._at_once = task.at_once(branches)
    self._exact = task.prefix_gradient == "exact"
    steps = self._used * (1 + self._exact) - (-branches // self._at_once)
    self._bar = tqdm.tqdm(total=steps, unit="step", disable=not progress)

  def gradient(self, loss, args):
    with self._bar:
      kept = self._capture()
      value, outputs, grads, accumulator = self._visit(loss, args)
      if self._exact:
        grads = self._prefix_pass(grads, accumulator, kept)
    return passes.Evaluation(value, outputs, None), grads

  def _done(self, what: str, result):
    self._bar.set_description(what)
    jax.block_until_ready(result)  # progress is work done, not work enqueued
    self._bar.update()
    return result

  def _capture(self):
    kept = []
    for index in range(self._used):
      mixer, of_chunk = self._done("prefix forward", _push(
          self._task, self._params, self._state.mixer, self._state.tokens,
          self._state.length, index,
      ))
      self._state = dataclasses.replace(self._state, mixer=mixer)
      kept.append(of_chunk)
    return kept

  def _visit(self, loss, args):
    grads, accumulator = _start(
        self._task, self._chunks.capacity, self._params
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
          part, jax.tree.map(lambda x, rows=rows: x[rows], args),
      ))
      values.append(value)
      outputs.append(output)
    outputs = jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)
    return sum(values), outputs, grads, accumulator

  def _prefix_pass(self, grads, accumulator, kept):
    for index in reversed(range(self._used)):
      grads, accumulator = self._done("prefix backward", _pop(
          self._task, self._params, grads, accumulator, self._state, index,
          kept.pop(),
      ))
    return grads


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty(task, chunks, params):
  layout = task.layout

  def here(_):
    return state_lib.empty(
        task.config, chunks.capacity, devices=layout.devices,
        popped=chunks if task.accumulates else state_lib.NO_CHUNKS,
    ).mixer

  return layout.over(here, ("params",), "mixer")(params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(task, capacity, params):
  """Zero gradients, and in exact a zero accumulator."""
  layout, schedule = task.layout, task.schedule

  def here(params):
    accumulator = None
    if task.accumulates:
      accumulator = state_lib.accumulator(
          task.config, capacity // layout.devices, schedule.accumulator_dtype,
          layout.devices,
      )
    return engine.zero_grads(task.trained(params)), accumulator

  outs = "grads", "mixer" if task.accumulates else "all"
  return layout.over(here, ("params",), outs, task.trained(params))(params)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _push(task, params, mixer, tokens, length, index):
  keep = task.prefix_gradient == "exact" and (
      task.schedule.activations == "keep"
  )

  def here(params, mixer, tokens, length, index):
    state = state_lib.PrefixState(
        mixer, tokens, length, jnp.uint32(0), devices=task.layout.devices
    )
    return engine.push_chunk(
        task, params, state, index, keep="stages" if keep else None
    )

  ins = "params", "mixer", "all", "all", "all"
  return task.layout.over(here, ins, ("mixer", "all"))(
      params, mixer, tokens, length, index
  )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _visit(task, loss, params, grads, accumulator, state, group, args):
  def here(params, grads, accumulator, state, group, args):
    grads, accumulator, outputs, (values, _) = engine.visit_branches(
        task, params, grads, accumulator, state, group,
        passes.cotangent_of(loss), args,
    )
    return grads, accumulator, outputs, jnp.sum(values)

  mixer = "mixer" if task.accumulates else "all"
  ins = "params", "grads", mixer, "state", "all", "all"
  return task.layout.over(here, ins, ("grads", mixer, "all", "all"), grads)(
      params, grads, accumulator, state, group, args
  )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def _pop(task, params, grads, accumulator, state, index, kept):
  def here(params, grads, accumulator, state, index, kept):
    return engine.pop_chunk(
        task, params, grads, accumulator, state, index, kept
    )

  ins = "params", "grads", "mixer", "state", "all", "all"
  return task.layout.over(here, ins, ("grads", "mixer"), grads)(
      params, grads, accumulator, state, index, kept
  )
