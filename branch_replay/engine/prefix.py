# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Captures a prefix state, extends it, and checks one before it is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay.data import group as group_lib
from branch_replay.engine import compiled
from branch_replay.engine import fingerprint
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import Schedule
from branch_replay.engine.spec import Spec
from branch_replay.models import decoder
from branch_replay.models import params as params_lib


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
  """Runs a prefix, all of a prompt but its last token, and returns its state.

  The prefix is run chunk by chunk without autodiff, each chunk on top of the
  state of those before it, so the activations of one chunk live at a time.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: a `Group`, or the ids of a prompt.
    capacity: positions to make room for, at least those of the prefix, so that
      `extend` can append to the state; None for the prefix alone. With room to
      spare, layers with a window or a recurrence do not save what they need to
      pop chunks: such a state serves sampling and "stop", but not "exact".
    schedule: chunk size and layout.
    keep: whether the state also stores the activations of the prefix, so that
      "exact" does not run the prefix a second time; on one device only.
    version: u32 to mark the state with, instead of a fingerprint of `params`.

  Returns:
    The state, a constant under autodiff. It is accepted only with these
    parameters and this model's config (`max_positions` and `param_dtype`, which
    change nothing that is computed, may differ).

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: an empty prompt, an id outside the vocabulary, more positions
      than the model has, a capacity below the prefix, stacked groups, or keep
      on several devices.
  """
  params_lib.check(model, params)
  schedule_lib.check(schedule)
  checks.flag(keep, "keep")
  if version is not None:
    checks.version(version)
  if not isinstance(prompt, group_lib.Group):
    prompt = group_lib.Group.create(prompt, [[]], config=model.config)
  group_lib.check(prompt, model.config)
  check_single(prompt)
  if keep and schedule.layout.devices > 1:
    raise ValueError("keep=True keeps activations on one device only.")
  policy = "keep" if keep else "recompute"
  spec = Spec(model, schedule=schedule).with_policy(policy)
  if capacity is not None:
    checks.integer(capacity, "capacity", 0)
    length = prompt.prompt_length - 1
    if group_lib.is_concrete(length) and capacity < int(length):
      raise ValueError(
          f"capacity={capacity} is less than the prefix of {length} positions."
      )
  params = jax.lax.stop_gradient(params)  # a state has no derivative
  if version is None:
    version = fingerprint.of_params(params)
  state = compiled.capture(spec, params, prompt, version, capacity or 0)
  return dataclasses.replace(
      state, model=fingerprint.of_config(model.config)
  )


def extend(
    model: decoder.Decoder,
    params,
    state: state_lib.PrefixState,
    tokens,
    *,
    schedule: Schedule = Schedule(),
    version=None,
) -> state_lib.PrefixState:
  """Runs more tokens on top of a state and appends what they leave behind.

  Args:
    model: the decoder.
    params: the parameters the state was captured under.
    state: captured with `capacity` to spare, on one device. Stored activations
      and what popping chunks needs are dropped, so that a model with windows or
      recurrences can use the result for sampling and "stop" only.
    tokens: ids, in order.
    schedule: its `chunk_size` is how many tokens are run at a time.
    version: u32 the state must be marked with, in place of the fingerprint of
      `params`.

  Returns:
    The longer state; `state` itself is unchanged.

  Raises:
    ValueError: the state has too little room or is on several devices; ids
      outside the vocabulary; more positions than the model has; a state of
      another model or other parameters.
  """
  params_lib.check(model, params)
  schedule_lib.check(schedule)
  check_state(state)
  tokens = group_lib.as_ids(tokens, "tokens")
  length = int(state.length) + tokens.size
  if max(state.devices, schedule.layout.devices) > 1:
    raise ValueError("States are extended on one device only.")
  group_lib.check_tokens(tokens, model.config, "tokens")
  group_lib.check_positions(length, model.config)
  check_model(state, model.config)
  check_version(state, params, version)
  params = jax.lax.stop_gradient(params)
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
    state = compiled.extend(
        Spec(model), params, state, jnp.asarray(padded, jnp.int32),
        jnp.int32(end),
    )
  return state


def check_state(state):
  """Raises TypeError for anything but a `PrefixState`."""
  checks.instance(
      state, "state", state_lib.PrefixState, "capture makes one of a prompt."
  )


def check_single(group):
  """Raises ValueError for stacked groups."""
  if group.prompt.ndim != 1:
    raise ValueError("This takes one group, not stacked groups.")


def check_samplable(state, model, params, group, version):
  """Raises ValueError for a state that this group cannot be sampled from."""
  check_state(state)
  if state.devices > 1:
    raise ValueError("A state on several devices cannot be sampled from.")
  check_model(state, model.config)
  _check_prompt(state, group)
  check_version(state, params, version)


def check_replayable(spec, state, group):
  """Checks that a group's tails can be replayed on a state, in a spec's mode.

  Returns:
    None; under jit, where ids have no values yet, a bool scalar that says
    whether the state is of this group's prompt.

  Raises:
    ValueError: the state is of another model, prompt, layout or chunk size, or
      lacks what popping its chunks needs; or the mode is "full".
  """
  check_state(state)
  if spec.whole:
    raise ValueError("prefix_gradient='full' runs whole sequences: no state=.")
  check_model(state, spec.config)
  if state.devices != spec.layout.devices:
    raise ValueError(
        f"The state lies on {state.devices} devices, the schedule's layout has "
        f"{spec.layout.devices}. Capture it with the same schedule."
    )
  if state.kept is not None:
    # The first leaf holds every chunk's layer inputs, [chunks, L, 1, C, M].
    kept = jax.tree.leaves(state.kept)[0].shape
    if (kept[0], kept[3]) != spec.chunks(group.prompt.shape[0] - 1):
      raise ValueError(
          f"The state keeps chunks of {kept[3]} positions; chunk_size="
          f"{spec.schedule.chunk_size} asks for others. Use one schedule for "
          "both, or capture with keep=False."
      )
  chunks = spec.chunks(group.prompt.shape[0] - 1)
  if spec.accumulates and not state_lib.complete(spec.config, state, chunks):
    raise ValueError(
        f"chunk_size={spec.schedule.chunk_size} cuts this group's prefix into "
        f"{chunks.count} chunks of {chunks.size}, and the state does not keep "
        "what precedes each of them in layers with a window or a recurrence. "
        "Capture it for this group with the same schedule, without capacity=, "
        "and not extended; or use prefix_gradient='stop'."
    )
  return _check_prompt(state, group)


def _check_prompt(state, group):
  if not group_lib.is_concrete((state.tokens, state.length, group)):
    shared = min(state.capacity, group.prompt.shape[0] - 1)
    same = state.tokens[:shared] == group.prompt[:shared]
    past = jnp.arange(shared) >= state.length
    return (state.length == group.prompt_length - 1) & jnp.all(same | past)
  length = int(group.prompt_length) - 1
  prefix = np.asarray(group.prompt)[:length]
  if int(state.length) != length or (
      np.asarray(state.tokens)[:length] != prefix
  ).any():
    raise ValueError(
        f"The state holds {int(state.length)} positions of another prompt: "
        f"this group's prefix has {length}. Capture it for this group."
    )
  return None


def check_model(state, config):
  """Raises ValueError for a state that a model of another config captured.

  It raises under `jit` too, and does not look at the state's `version`.
  """
  if state.model is None:
    raise ValueError("The state was not made by capture: capture it.")
  mine = fingerprint.of_config(config)
  if state.model != mine:
    raise ValueError(
        "The state was captured by another model, of "
        f"{fingerprint.difference(mine, state.model)}: capture it again with "
        "this one."
    )


def check_version(state, params, version):
  """Checks that a state was captured under these parameters.

  Args:
    state: the state.
    params: the parameters, whose fingerprint it must be marked with.
    version: u32 it must be marked with instead; None for the fingerprint.

  Returns:
    None; under jit, where these have no values yet, a bool scalar.

  Raises:
    ValueError: the state is marked with something else.
  """
  if version is None:
    version = fingerprint.of_params(params)
  else:
    checks.version(version)
  if not group_lib.is_concrete((state.version, version)):
    return state.version == jnp.asarray(version, jnp.uint32)
  if int(state.version) != int(version):
    raise ValueError(
        "The state was captured under other parameters: capture it again "
        "after an update, or pass allow_stale=True to study staleness."
    )
  return None
