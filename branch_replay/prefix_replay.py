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
from branch_replay import passes
from branch_replay import readout as readout_lib
from branch_replay import state as state_lib
from branch_replay.chunk_sampling import Sampling
from branch_replay.models import decoder
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.schedule import Schedule


def capture(
    model: decoder.Decoder,
    params,
    prompt,
    *,
    capacity: int | None = None,
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
    capacity: positions to make room for, at least those of the prefix, if the
      state is to be extended; None for the prefix alone.
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
  _check_single(prompt)
  if keep and schedule.layout.devices > 1:
    raise ValueError("keep=True keeps activations on one device only.")
  policy = "keep" if keep else "recompute"
  task = engine.Task(
      model, schedule=dataclasses.replace(schedule, activations=policy)
  )
  if capacity is not None:
    length = prompt.prompt_length - 1
    if group_lib.is_concrete(length) and capacity < int(length):
      raise ValueError(
          f"capacity={capacity} is less than the prefix of {length} positions."
      )
  return passes.capture(task, params, prompt, version, capacity or 0)


def replay(
    model: decoder.Decoder,
    params,
    group: group_lib.Group,
    *,
    state: state_lib.PrefixState | None = None,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    sampling: Sampling = Sampling(),
    key=None,
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
    prefix_gradient: "exact" equals the full gradient; "sampled" estimates it
      from some chunks of the prefix, without bias; "stop" holds the captured
      positions constant, which is biased; "full" runs every sequence on its
      own.
    sampling: of "sampled": how many chunks, by which law.
    key: of "sampled": a PRNG key; the same key draws the same chunks.
    schedule: sizes and policies, which do not change the result.
    allow_stale: accept a state captured under other parameters. Otherwise it
      is an error, and inside `jit`, where it cannot be one, turns everything
      into NaN.
    version: u32 the state must be marked with, in place of the fingerprint of
      `params`.

  Returns:
    The readout's pytree, each leaf [G, T, ...] and 0 where a tail is padding
    (stacked groups: [groups, G, T, ...]).

  Raises:
    ValueError: see `Group.create`; an unknown mode; a state of another prompt
      or captured under other parameters.
  """
  task = make_task(
      model, group, readout, prefix_gradient, schedule, sampling,
      one_pass=False,
  )
  _check_key(task, key)
  if group.prompt.ndim == 2:
    if state is not None or version is not None:
      raise ValueError("state= takes one group; stacked groups have several.")
    places = jnp.arange(group.prompt.shape[0])

    def one(inputs):
      group, place = inputs
      mine = None if key is None else jax.random.fold_in(key, place)
      return _replay(task, allow_stale, params, group, None, None, mine)

    return lax.map(one, (group, places))
  if state is not None:
    _check_state(task, state, group)
  return _replay(task, allow_stale, params, group, state, version, key)


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
  _check_single(group)
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
    sampling: Sampling = Sampling(),
    schedule: Schedule = Schedule(),
):
  """One-pass gradient of a loss that is a sum over branches.

  The loss of each branch group is known when it has been run, so its backward
  pass follows at once and no tail is run twice; of stacked groups the state of
  one lives at a time. `jax.grad` of `replay` gives the same for any loss.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar, a *sum* over the branches it is given: a
      mean would depend on `branches_at_once`. One function object compiles
      once; a new lambda compiles again.
    readout: see `branch_replay.readout`.
    prefix_gradient: as in `replay`.
    sampling: as in `replay`.
    schedule: as in `replay`.

  Returns:
    A function (params, group, *args, state=None, key=None, allow_stale=False,
    version=None) -> (`Evaluation`, grads): loss, outputs, and in "sampled"
    which chunks ran. Each of `args` has the leading axes of the tails,
    [G, ...] or [groups, G, ...]. Gradients are at least float32.
  """
  def run(
      params, group, *args, state=None, key=None, allow_stale=False,
      version=None,
  ):
    task = make_task(
        model, group, readout, prefix_gradient, schedule, sampling
    )
    _check_key(task, key)
    if state is not None:
      if group.prompt.ndim == 2:
        raise ValueError("state= takes one group; stacked groups have several.")
      _check_state(task, state, group)
    good = None
    if state is not None and not allow_stale:
      good = _check_version(state, params, version)
    return _poisoned(good, passes.value_and_grad(
        task, loss, params, group, args, state, key
    ))

  return run


def extend(
    model: decoder.Decoder,
    params,
    state: state_lib.PrefixState,
    tokens,
    *,
    schedule: Schedule = Schedule(),
) -> state_lib.PrefixState:
  """Appends tokens to a state that has room for them.

  Args:
    model: the decoder.
    params: the parameters the state was captured under.
    state: captured with `capacity` to spare; what it keeps is dropped.
    tokens: ids.
    schedule: how many are run at a time.

  Returns:
    The longer state; `state` itself is unchanged.

  Raises:
    ValueError: no room, ids outside the vocabulary, more positions than the
      model has, or other parameters; nothing has been overwritten then.
  """
  tokens = group_lib.as_ids(tokens, "tokens")
  length = int(state.length) + tokens.size
  if state.devices > 1:
    raise ValueError("A state on several devices cannot be extended.")
  group_lib.check_tokens(tokens, model.config, "tokens")
  group_lib.check_positions(length, model.config)
  _check_version(state, params, None)
  if length > state.capacity:
    raise ValueError(
        f"The state is full: {int(state.length)} of {state.capacity} positions "
        f"are taken and {tokens.size} more do not fit. Capture it with "
        f"capacity={length} or more."
    )
  for start in range(0, tokens.size, schedule.chunk_size):
    part = tokens[start : start + schedule.chunk_size]
    end = int(state.length) + part.size
    padded = np.pad(part, (0, group_lib.bucket(part.size) - part.size))
    state = passes.extend(
        model, params, state, jnp.asarray(padded, jnp.int32), jnp.int32(end)
    )
  return state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replay(
    task: engine.Task, allow_stale, params, group, state, version, key
):
  del key  # chunks are drawn in the backward pass
  args = params, group, state, version
  return _checked_forward(task, allow_stale, False, *args)[1]


def _replay_forward(task, allow_stale, params, group, state, version, key):
  keep = task.schedule.activations == "keep"
  args = params, group, state, version
  good, outputs, state, kept = _checked_forward(
      task, allow_stale, keep, *args
  )
  return outputs, (good, params, group, state, key, kept)


def _checked_forward(task, allow_stale, keep, params, group, state, version):
  # Checked here and not in `replay`: under `jax.grad` the parameters have
  # values only inside of the custom_vjp.
  good = None
  if state is not None and not allow_stale:
    good = _check_version(state, params, version)
  outputs, state, kept = passes.forward(task, keep, params, group, state)
  return good, _poisoned(good, outputs), state, kept


def _poisoned(good, tree):
  """The tree, or NaN in all its floats where `good` is false."""
  def poison(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(good, x, jnp.nan)

  return tree if good is None else jax.tree.map(poison, tree)


def _replay_backward(task, allow_stale, residuals, d_outputs):
  del allow_stale
  good, *residuals = residuals
  grads = passes.backward(task, *residuals, d_outputs)
  return _poisoned(good, grads), None, None, None, None


_replay.defvjp(_replay_forward, _replay_backward)


def _check_key(task: engine.Task, key):
  if task.prefix_gradient == "sampled" and key is None:
    raise ValueError("prefix_gradient='sampled' draws chunks: pass key=.")


def make_task(
    model, group, readout, prefix_gradient, schedule, sampling=Sampling(),
    one_pass=True,
) -> engine.Task:
  """The static half, with the activation policy settled."""
  group_lib.check(group, model.config)
  task = engine.Task(model, readout, prefix_gradient, schedule, sampling)
  policy = task.policy(group, one_pass=one_pass)
  settled = dataclasses.replace(schedule, activations=policy)
  return dataclasses.replace(task, schedule=settled)


def check_samplable(state, params, group):
  """Raises ValueError for a state that `params` cannot go on from."""
  if state.devices > 1:
    raise ValueError("A state on several devices cannot be sampled from.")
  _check_prompt(state, group)
  _check_version(state, params, None)


def _check_single(group):
  if group.prompt.ndim != 1:
    raise ValueError("This takes one group, not stacked groups.")


def _check_state(task, state, group):
  """Raises ValueError for a state this task cannot replay."""
  if task.prefix_gradient == "full":
    raise ValueError("prefix_gradient='full' runs whole sequences: no state=.")
  if state.devices != task.layout.devices:
    raise ValueError(
        f"The state lies on {state.devices} devices, the schedule's layout has "
        f"{task.layout.devices}. Capture it with the same schedule."
    )
  _check_prompt(state, group)
  if state.kept is not None:
    kept, positions = state.kept.x_GTM.shape, group.prompt.shape[0] - 1
    if (kept[0], kept[3]) != task.chunks(positions):
      raise ValueError(
          f"The state keeps chunks of {kept[3]} positions; chunk_size="
          f"{task.schedule.chunk_size} asks for others. Use one schedule for "
          "both, or capture with keep=False."
      )


def _check_prompt(state, group):
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


def _check_version(state, params, version):
  """None, or under jit whether the state is of these parameters.

  Raises:
    ValueError: it is not, and the values are there to see it.
  """
  if version is None:
    version = state_lib.fingerprint(params)
  if not group_lib.is_concrete((state.version, version)):
    return state.version == jnp.asarray(version, jnp.uint32)
  if int(state.version) != int(version):
    raise ValueError(
        "The state was captured under other parameters: capture it again "
        "after an update, or pass allow_stale=True to study staleness."
    )
  return None
