# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole passes under jit, with the task as their static argument.

Another prefix length in the same bucket, other tokens, other parameters do not
compile again. What a caller may get wrong is checked outside, in `prefix` and
`prefix_replay`.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import balance
from branch_replay import chunk_sampling
from branch_replay import engine
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay.layout import Layout
from branch_replay.mixers import kinds
from branch_replay.mixers import sizes


class Evaluation(NamedTuple):
  """What `value_and_grad` returns beside the gradient.

  Attributes:
    loss: the sum over branches, and over stacked groups.
    outputs: the readout's pytree, [G, T, ...] or [groups, G, T, ...].
    prefix_pass: in `sampled` a `chunk_sampling.PrefixPass`: which chunks ran
      and with what probability; None in the other modes and without a prefix.
  """

  loss: jax.Array
  outputs: Any
  prefix_pass: Any


class Balanced(NamedTuple):
  """`Evaluation` of a gradient that has a load-balance term; the loss has not.

  Attributes:
    loss, outputs, prefix_pass: as there.
    load: the share of the choices that fell on every expert, [L, E] of the
      layers that have them; of stacked groups with an axis of groups before.
  """

  loss: jax.Array
  outputs: Any
  prefix_pass: Any
  load: jax.Array


def evaluation(loss, outputs, prefix_pass, load) -> Evaluation | Balanced:
  """`Balanced` where there is a load, else `Evaluation`."""
  if load is None:
    return Evaluation(loss, outputs, prefix_pass)
  return Balanced(loss, outputs, prefix_pass, load)


@functools.partial(jax.jit, static_argnums=(0, 4))
def capture(task: engine.Task, params, group, version, capacity=0):
  """The prefix state of one group, without checks."""
  here = functools.partial(_capture, task, capacity)
  return task.layout.over(here, ("params", "all", "all"), "state")(
      params, group, version
  )


# Functions with an underscore run on every device, on its share.


def _capture(task, capacity, params, group, version):
  positions = group.prompt.shape[0] - 1
  chunks = task.chunks(positions)
  capacity = -(-capacity // task.layout.devices) * task.layout.devices
  length = group.prompt_length - 1
  state = dataclasses.replace(
      state_lib.empty(
          task.config, chunks.capacity, version, task.layout.devices,
          popped=_popped(task, chunks, capacity), room=capacity,
      ),
      tokens=jnp.pad(group.prompt[:-1], (0, chunks.capacity - positions)),
      length=length,
  )
  keep = "stages" if task.schedule.activations == "keep" else None

  def push(index, carry):
    state, buffers = carry
    state, kept = engine.push_chunk(task, params, state, index, keep=keep)
    buffers = jax.tree.map(
        lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, index, 0),
        buffers, kept,
    )
    return state, buffers

  if chunks.count == 1:  # what is kept is then the buffer, without a copy
    state, kept = engine.push_chunk(task, params, state, 0, keep=keep)
    kept = jax.tree.map(lambda x: x[None], kept)
  elif chunks.count:
    kept = jax.tree.map(
        lambda x: jnp.zeros((chunks.count, *x.shape), x.dtype),
        jax.eval_shape(
            lambda: engine.push_chunk(task, params, state, 0, keep=keep)[1]
        ),
    )
    state, kept = lax.fori_loop(
        0, _used(length, chunks), push, (state, kept)
    )
  else:
    kept = None
  state = dataclasses.replace(state, kept=kept)
  return state_lib.resize(
      task.config, state, max(chunks.capacity, capacity)
  )


def _popped(task, chunks: state_lib.Chunks, capacity=0) -> state_lib.Chunks:
  """The chunks that will be popped: none of a state that is to be extended."""
  if task.accumulates and capacity <= chunks.capacity:
    return chunks
  return state_lib.NO_CHUNKS


@functools.partial(jax.jit, static_argnums=0)
def extend(model, params, state, tokens, length):
  """Appends padded tokens; what lies past `length` is dropped."""
  positions = state.length + jnp.arange(tokens.shape[0])
  real = length - state.length
  context = segment.Context(
      state_lib.seen(model.config, state.mixer), state.length,
      positions[None], real[None] if kinds.recurrent(model.config) else None,
  )
  _, present, _ = segment.forward(
      model.config, params["layers"],
      segment.embed(model.config, params, tokens[None], Layout()), context,
      layout=Layout(), keep=None, present=True,
  )
  at = jnp.where(positions < length, positions, state.capacity)
  chunk = sizes.Chunk(None, state.length, real)
  state = state_lib.extend(model.config, state, present, chunk)
  return dataclasses.replace(
      state, length=length, kept=None,
      tokens=state.tokens.at[at].set(tokens, mode="drop"),
  )


def _used(length, chunks: state_lib.Chunks):
  """Chunks that hold the first `length` positions."""
  return (length + chunks.size - 1) // chunks.size


def prefix_pass(
    task: engine.Task, params, grads, accumulator, state, uniform_N=None,
    seeds=None,
):
  """Pops chunks last to first: every one, or in `sampled` those drawn.

  Args:
    task: model and schedule.
    params: parameters.
    grads: like `task.trained(params)`; added to.
    accumulator: cotangent of the state.
    state: the captured prefix.
    uniform_N: for `sampled`, the numbers that chunks are drawn by.
    seeds: of the load-balance term for a position of the prefix, or None.

  Returns:
    grads, the whole cotangent of the state, and in `sampled` the `PrefixPass`.
  """
  positions = state_lib.positions(task.config, accumulator, state)
  chunks = task.chunks(positions)
  if not chunks.count:
    return grads, accumulator, None
  used = _used(state.length, chunks)

  def pop(index, scale, grads, accumulator):
    kept = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False),
        state.kept,
    )
    return engine.pop_chunk(
        task, params, grads, accumulator, state, index, kept, scale, seeds
    )

  if task.prefix_gradient == "sampled":
    return chunk_sampling.run(
        task.config, task.sampling, accumulator, used, uniform_N, pop,
        lambda index, total: engine.skip_chunk(task, total, state, index),
        grads, task.layout,
    )
  if chunks.count == 1:  # without a loop what was kept is not copied
    return *pop(0, 1.0, grads, accumulator), None
  grads, accumulator = lax.fori_loop(
      0, used, lambda step, carry: pop(used - 1 - step, 1.0, *carry),
      (grads, accumulator),
  )
  return grads, accumulator, None


def _gradient(
    task, params, grads, group, state, key, cotangent, args=(),
    kept=(None, None), share=1.0,
):
  """Adds the gradient of one group; the schedule of all modes but capture.

  Returns:
    grads, outputs, "anything" of the cotangent, and the last two arguments of
    `evaluation`.
  """
  accumulator = report = None
  if state is not None:
    # Work follows the prompt, not the room that a state has to spare.
    chunks = task.chunks(group.prompt.shape[0] - 1)
    if state.capacity > chunks.capacity:
      state = state_lib.resize(task.config, state, chunks.capacity)
  if task.accumulates:
    here = chunks.capacity // task.layout.devices
    accumulator = state_lib.accumulator(
        task.config, here, task.schedule.accumulator_dtype,
        task.layout.devices,
    )
  load = seeds = prefix_seeds = None
  if task.balance:
    counts = engine.count_choices(task, params, state, group)
    load = balance.load(task.config, counts)
    seeds = balance.seeds(task.config, share * task.balance, counts)
    branches = balance.answered(group.tail_lengths)
    prefix_seeds = jax.tree.map(lambda x: branches * x, seeds)
  grads, accumulator, outputs, extra = engine.visit_branches(
      task, params, grads, accumulator, state, group, cotangent, args, kept,
      seeds,
  )
  if task.accumulates:
    uniform_N = None
    if task.prefix_gradient == "sampled":
      uniform_N = chunk_sampling.uniforms(key, chunks.count)
    grads, _, report = prefix_pass(
        task, params, grads, accumulator, state, uniform_N, prefix_seeds
    )
  return grads, outputs, extra, (report, load)


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(task, keep, params, group, state):
  """Outputs, the state, and what is kept for `backward`."""
  # What is kept does not leave the devices; several run their tails again.
  keep = keep and task.layout.devices == 1
  outs = "all", "all" if task.prefix_gradient == "full" else "state", "all"
  here = functools.partial(_forward, task, keep)
  return task.layout.over(here, ("params", "all", "state"), outs)(
      params, group, state
  )


def _forward(task, keep, params, group, state):
  if state is None and task.prefix_gradient != "full":
    state = _own_state(task, keep, params, group)
  outputs, kept = engine.run_branches(task, params, state, group, keep=keep)
  return outputs, state, kept


@functools.partial(jax.jit, static_argnums=0)
def backward(task, params, group, state, key, kept, d_outputs):
  """The gradient, in the dtypes of the parameters."""
  ins = "params", "all", "state", "all", "all", "all"
  here = functools.partial(_backward, task)
  return task.layout.over(here, ins, "grads", params)(
      params, group, state, key, kept, d_outputs
  )


def _backward(task, params, group, state, key, kept, d_outputs):
  grads, *_ = _gradient(
      task, params, engine.zero_grads(params), group, state, key,
      lambda _, d_outputs: (d_outputs, None), (d_outputs,), kept,
  )
  return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_grad(task, loss, params, group, args, state, key, share=1.0):
  """`Evaluation` and gradient, of one group or of stacked ones."""
  here = functools.partial(_value_and_grad, task, loss)
  ins = "params", "all", "all", "state", "all", "all"
  outs = "all", "grads"
  return task.layout.over(here, ins, outs, task.trained(params))(
      params, group, args, state, key, share
  )


def _value_and_grad(task, loss, params, group, args, state, key, share):
  cotangent = cotangent_of(loss)
  if task.balance:
    share = share / balance.groups(group.tail_lengths)

  def one(grads, inputs, state=None):
    group, args, key = inputs
    if state is None and task.prefix_gradient != "full":
      keep = task.schedule.activations == "keep"
      state = _own_state(task, keep, params, group)
    grads, outputs, (whole, rest), reports = _gradient(
        task, params, grads, group, state, key, cotangent, args, share=share
    )
    value = jnp.sum(whole) + (0 if rest is None else rest)
    return grads, evaluation(value, outputs, *reports)

  grads = engine.zero_grads(task.trained(params))
  if group.prompt.ndim == 1:
    grads, found = one(grads, (group, args, key), state)
  else:
    if key is not None:  # a key for every group, by its place
      key = jax.vmap(lambda i: jax.random.fold_in(key, i))(
          jnp.arange(group.prompt.shape[0])
      )
    grads, found = lax.scan(one, grads, (group, args, key))
    found = found._replace(loss=jnp.sum(found.loss))
  return found, grads


def cotangent_of(loss):
  """(outputs, *args) -> (cotangent of the outputs, loss), see `engine`."""
  def cotangent(outputs, *args):
    value, pull = jax.vjp(lambda outputs: loss(outputs, *args), outputs)
    if not isinstance(value, jax.Array) or not jnp.issubdtype(
        value.dtype, jnp.floating
    ):
      raise TypeError(
          "The loss must return one float, the sum over the branches it is "
          f"given, not {value!r}."
      )
    if value.shape:
      raise ValueError(
          f"The loss has shape {value.shape}: it must be a scalar, the sum "
          "over the branches it is given."
      )
    (d_outputs,) = pull(jnp.ones_like(value))
    return d_outputs, value

  return cotangent


def _own_state(task: engine.Task, keep: bool, params, group):
  """A state that does not outlive its gradient, and needs no version."""
  keep = keep and task.accumulates
  schedule = dataclasses.replace(
      task.schedule, activations="keep" if keep else "recompute"
  )
  mode = "exact" if task.accumulates else "stop"  # what is kept of chunks
  capturing = engine.Task(
      task.model, prefix_gradient=mode, schedule=schedule
  )
  return _capture(capturing, 0, params, group, jnp.uint32(0))
