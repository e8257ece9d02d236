# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay as differentiable functions: capture, replay, log_probs."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branch_replay import engine
from branch_replay import group as group_lib
from branch_replay import readout as readout_lib
from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.schedule import Schedule


def capture(
    model: decoder.Decoder,
    params,
    prompt,
    *,
    schedule: Schedule = Schedule(),
    keep: bool = False,
    version=None,
) -> state_lib.PrefixState:
  """Runs all of a prompt but its last token, once, for all its branches.

  Chunks of the prompt are run without autodiff, each on top of those before;
  the activations of one chunk live at a time.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: a `Group`, or the ids of a prompt.
    schedule: chunk size and layout.
    keep: whether the state keeps its activations, so that the prefix pass does
      not run the prefix again.
    version: u32 to mark the state with, instead of a fingerprint of `params`.

  Returns:
    The state. It belongs to these parameters.

  Raises:
    ValueError: an empty prompt, an id outside the vocabulary, more positions
      than the model has.
  """
  if not isinstance(prompt, group_lib.Group):
    prompt = group_lib.Group.create(prompt, [[]], config=model.config)
  group_lib.check(prompt, model.config)
  policy = "keep" if keep else "recompute"
  task = engine.Task(
      model, schedule=dataclasses.replace(schedule, activations=policy)
  )
  return _capture(task, params, prompt, version)


def replay(
    model: decoder.Decoder,
    params,
    group: group_lib.Group,
    *,
    state: state_lib.PrefixState | None = None,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    schedule: Schedule = Schedule(),
    allow_stale: bool = False,
    version=None,
):
  """What a readout reads from the tails, differentiable in `params`.

  Args:
    model: the decoder.
    params: its parameters; the only differentiable argument.
    group: prompt and tails; of stacked groups one is run after the other, and
      the states of all live until the backward pass.
    state: a captured prefix, which is then not run again. In `exact` the
      prefix pass still runs, and reads what the state keeps.
    readout: see `branch_replay.readout`.
    prefix_gradient: "exact" equals the full gradient; "stop" holds the
      captured positions constant, which is biased; "full" runs every sequence
      on its own.
    schedule: sizes and policies, which do not change the result.
    allow_stale: accept a state captured under other parameters.
    version: u32 the state must be marked with; inside `jit`, where it cannot
      be an error, every output is NaN if it is not.

  Returns:
    The readout's pytree, each leaf [G, T, ...] and 0 where a tail is padding
    (stacked groups: [groups, G, T, ...]).

  Raises:
    ValueError: see `Group.create`; an unknown mode; a state of another prompt
      or captured under other parameters.
  """
  task = _task(model, group, readout, prefix_gradient, schedule)
  if group.prompt.ndim == 2:
    if state is not None:
      raise ValueError("state= takes one group; stacked groups have several.")
    return lax.map(lambda one: _replay(task, params, one, None), group)
  if state is not None:
    _check_state(task, state, group)
  return _replay(task, allow_stale, params, group, state, version)


def log_probs(
    model: decoder.Decoder, params, group, *, temperature: float = 1.0,
    **options,
) -> jax.Array:
  """log p(token | prompt, earlier tokens) of every token of every tail.

  Args:
    model: the decoder.
    params: its parameters.
    group: prompt and tails.
    temperature: of the softmax; the sampler's.
    **options: as in `replay`.

  Returns:
    f32[G, T], 0 where a tail is padding.

  Raises:
    ValueError: see `replay`.
  """
  readout = readout_lib.LogProbs(temperature)
  return replay(model, params, group, readout=readout, **options)


def dense_log_probs(
    model: decoder.Decoder, params, group, *, temperature: float = 1.0
) -> jax.Array:
  """The reference of `log_probs`: whole sequences, plain attention, autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    group: prompt and tails, not stacked.
    temperature: of the softmax.

  Returns:
    f32[G, T], 0 where a tail is padding.
  """
  group_lib.check(group, model.config)
  tokens_GS = group.sequences()
  hidden_GSM = model.apply({"params": params}, tokens_GS, method="hidden")
  tokens = group.tails.shape[1]
  hidden_GTM = lax.dynamic_slice_in_dim(
      hidden_GSM, group.prompt_length - 1, tokens, axis=1
  )
  result = log_probs_lib.reference(
      hidden_GTM.reshape(-1, model.config.width),
      model.apply({"params": params}, method="head_table"),
      group.tails.reshape(-1),
      temperature=temperature,
      vocab_size=model.config.vocab_size,
  )
  return jnp.where(group.mask(), result.reshape(group.tails.shape), 0)


def value_and_grad(
    model: decoder.Decoder,
    loss,
    *,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    schedule: Schedule = Schedule(),
):
  """One-pass gradient of a loss that is a sum over branches.

  The loss of each branch group is known when it has been run, so its backward
  pass follows at once and no tail is run twice; of stacked groups the state of
  one lives at a time. `jax.grad` of `replay` gives the same for any loss.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar, a sum over the branches it is given.
    readout: see `branch_replay.readout`.
    prefix_gradient: as in `replay`.
    schedule: as in `replay`.

  Returns:
    A function (params, group, *args, state=None) -> ((loss, outputs), grads).
    Each of `args` has the leading axes of the tails, [G, ...] or
    [groups, G, ...]. Gradients are at least float32.
  """
  def run(params, group, *args, state=None):
    task = _task(model, group, readout, prefix_gradient, schedule)
    if state is not None:
      if group.prompt.ndim == 2:
        raise ValueError("state= takes one group; stacked groups have several.")
      _check_state(task, state, group)
      _check_version(state, params, None)
    return _value_and_grad(task, loss, params, group, args, state)

  return run


# Below, everything is under jit with the task as its static argument: another
# prefix length in the same bucket, other tokens, other parameters do not
# compile again.


@functools.partial(jax.jit, static_argnums=0)
def _capture(task: engine.Task, params, group, version=None):
  """The prefix state of one group, without checks."""
  positions = group.prompt.shape[0] - 1
  chunks = task.chunks(positions)
  length = group.prompt_length - 1
  if version is None:
    version = state_lib.fingerprint(params)
  state = dataclasses.replace(
      state_lib.empty(task.config, chunks.capacity, version),
      tokens=jnp.pad(group.prompt[:-1], (0, chunks.capacity - positions)),
  )
  keep = "stages" if task.schedule.activations == "keep" else None

  def push(index, carry):
    state, buffers = carry
    mixer, kept = engine.push_chunk(task, params, state, index, keep=keep)
    buffers = jax.tree.map(
        lambda buffer, x: lax.dynamic_update_index_in_dim(buffer, x, index, 0),
        buffers, kept,
    )
    return dataclasses.replace(state, mixer=mixer), buffers

  if chunks.count == 1:  # what is kept is then the buffer, without a copy
    mixer, kept = engine.push_chunk(task, params, state, 0, keep=keep)
    state = dataclasses.replace(state, mixer=mixer)
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
  return dataclasses.replace(state, length=length, kept=kept)


def _used(length, chunks: state_lib.Chunks):
  """Chunks that hold the first `length` positions."""
  return (length + chunks.size - 1) // chunks.size


def _prefix_pass(task: engine.Task, params, grads, accumulator, state):
  """Pops every chunk, last to first."""
  chunks = task.chunks(state.capacity)
  if not chunks.count:
    return grads
  used = _used(state.length, chunks)

  def pop(step, carry):
    grads, accumulator = carry
    index = used - 1 - step
    kept = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False),
        state.kept,
    )
    return engine.pop_chunk(
        task, params, grads, accumulator, state, index, kept
    )

  if chunks.count == 1:
    kept = jax.tree.map(lambda x: x[0], state.kept)
    return engine.pop_chunk(
        task, params, grads, accumulator, state, 0, kept
    )[0]
  return lax.fori_loop(0, used, pop, (grads, accumulator))[0]


def _accumulator(task: engine.Task, state):
  if task.prefix_gradient != "exact":
    return None
  capacity = task.chunks(state.capacity).capacity
  return state_lib.accumulator(task.config, capacity)


def _gradient(
    task, params, grads, group, state, cotangent, args=(), kept=(None, None)
):
  """Adds the gradient of one group; the schedule of all modes but capture."""
  exact = task.prefix_gradient == "exact"
  accumulator = _accumulator(task, state) if exact else None
  grads, accumulator, outputs, extra = engine.visit_branches(
      task, params, grads, accumulator, state, group, cotangent, args, kept
  )
  if exact:
    grads = _prefix_pass(task, params, grads, accumulator, state)
  return grads, outputs, extra


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replay(task: engine.Task, allow_stale, params, group, state, version):
  args = params, group, state, version
  return _checked_forward(task, allow_stale, False, *args)[0]


def _replay_forward(task, allow_stale, params, group, state, version):
  keep = task.schedule.activations == "keep"
  args = params, group, state, version
  outputs, state, kept = _checked_forward(task, allow_stale, keep, *args)
  return outputs, (params, group, state, kept)


def _checked_forward(task, allow_stale, keep, params, group, state, version):
  # Checked here and not in `replay`: under `jax.grad` the parameters have
  # values only inside of the custom_vjp.
  good = True
  if state is not None and not allow_stale:
    good = _check_version(state, params, version)
  outputs, state, kept = _forward(task, keep, params, group, state)
  if good is not True:
    outputs = jax.tree.map(lambda x: jnp.where(good, x, jnp.nan), outputs)
  return outputs, state, kept


def _replay_backward(task, allow_stale, residuals, d_outputs):
  del allow_stale
  return _backward(task, *residuals, d_outputs), None, None, None


_replay.defvjp(_replay_forward, _replay_backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(task, keep, params, group, state):
  if state is None and task.prefix_gradient != "full":
    state = _capture(_capture_task(task, keep), params, group)
  outputs, kept = engine.run_branches(task, params, state, group, keep=keep)
  return outputs, state, kept


@functools.partial(jax.jit, static_argnums=0)
def _backward(task, params, group, state, kept, d_outputs):
  grads, _, _ = _gradient(
      task, params, engine.zero_grads(params), group, state,
      lambda _, d_outputs: (d_outputs, None), (d_outputs,), kept,
  )
  return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _value_and_grad(task, loss, params, group, args, state):
  def cotangent(outputs, *args):
    value, pull = jax.vjp(lambda outputs: loss(outputs, *args), outputs)
    (d_outputs,) = pull(jnp.ones_like(value))
    return d_outputs, value

  def one(grads, inputs, state=None):
    group, args = inputs
    if state is None and task.prefix_gradient != "full":
      keep = task.schedule.activations == "keep"
      state = _capture(_capture_task(task, keep), params, group)
    grads, outputs, (whole, rest) = _gradient(
        task, params, grads, group, state, cotangent, args
    )
    value = jnp.sum(whole) + (0 if rest is None else rest)
    return grads, (value, outputs)

  grads = engine.zero_grads(params)
  if group.prompt.ndim == 1:
    grads, (value, outputs) = one(grads, (group, args), state)
  else:
    grads, (values, outputs) = lax.scan(one, grads, (group, args))
    value = jnp.sum(values)
  return (value, outputs), grads


def _capture_task(task: engine.Task, keep: bool) -> engine.Task:
  keep = keep and task.prefix_gradient == "exact"
  schedule = dataclasses.replace(
      task.schedule, activations="keep" if keep else "recompute"
  )
  return engine.Task(task.model, schedule=schedule)


def _task(model, group, readout, prefix_gradient, schedule) -> engine.Task:
  """The static half, with the activation policy settled."""
  group_lib.check(group, model.config)
  task = engine.Task(model, readout, prefix_gradient, schedule)
  settled = dataclasses.replace(schedule, activations=task.policy(group))
  return dataclasses.replace(task, schedule=settled)


def _check_state(task, state, group):
  """Raises ValueError for a state that is not of this group's prompt."""
  if task.prefix_gradient == "full":
    raise ValueError("prefix_gradient='full' runs whole sequences: no state=.")
  if not group_lib.is_concrete((state.tokens, state.length, group)):
    return
  length = int(group.prompt_length) - 1
  prefix = np.asarray(group.prompt)[:length]
  if int(state.length) != length or (
      np.asarray(state.tokens)[:length] != prefix
  ).any():
    raise ValueError(
        f"The state holds {int(state.length)} positions of another prompt: "
        f"this group's prefix has {length}. Capture it for this group."
    )
  if state.kept is not None:
    kept = state.kept.x_GTM.shape
    if (kept[0], kept[3]) != task.chunks(state.capacity):
      raise ValueError(
          f"The state keeps chunks of {kept[3]} positions; chunk_size="
          f"{task.schedule.chunk_size} asks for others. Use one schedule for "
          "both, or capture with keep=False."
      )


def _check_version(state, params, version):
  """True, or under jit whether the state is of these parameters.

  Raises:
    ValueError: it is not, and the values are there to see it.
  """
  if version is None:
    if not group_lib.is_concrete((state.version, params)):
      return True
    version = state_lib.fingerprint(params)
  if not group_lib.is_concrete((state.version, version)):
    return state.version == jnp.asarray(version, jnp.uint32)
  if int(state.version) != int(version):
    raise ValueError(
        "The state was captured under other parameters: capture it again "
        "after an update, or pass allow_stale=True to study staleness."
    )
  return True
