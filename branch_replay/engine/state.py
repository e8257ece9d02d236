# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""PrefixState: what a prefix leaves behind for the tokens that follow it."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import kinds
from branch_replay.mixers import places as places_lib
from branch_replay.mixers import sizes as sizes_lib
from branch_replay.models import pattern


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixState:
  """What every layer needs of a prefix, and where it comes from.

  Attributes:
    mixer: the state of every stack of layers, see `pattern`; of attention a
      pair (k, v), each [L, K, P, D] in the compute dtype.
    tokens: i32[P], the ids that were run; the prefix pass runs them again.
    length: i32[], positions that are real.
    version: u32[], fingerprint of the parameters it was captured under.
    kept: activations of the chunks, when the policy is to keep them.
    saved: what popping each chunk needs of the state before it, by stack,
      [chunks, ...]; nothing in stacks with a place for every position, None in
      a state that is not for popping.
    choices: the experts of every position, i32[L, 1, P, k] by stack, with which
      chunks are run again; nothing in stacks without experts.
    devices: how many devices the positions are dealt to; position p is on
      device p mod devices, and the arrays hold one device after the other.
    model: what captured it, `fingerprint.of_config`; None inside of a
      computation, where it has been checked.
  """

  mixer: Any
  tokens: jax.Array
  length: jax.Array
  version: jax.Array
  kept: object = None
  saved: Any = None
  choices: Any = dataclasses.field(default_factory=dict)
  devices: int = dataclasses.field(default=1, metadata=dict(static=True))
  model: tuple | None = dataclasses.field(
      default=None, metadata=dict(static=True)
  )

  @property
  def capacity(self) -> int:
    """Positions there is room for."""
    return self.tokens.shape[-1]


class Chunks(NamedTuple):
  """A prefix cut into `count` chunks of `size` positions."""

  count: int
  size: int

  @property
  def capacity(self) -> int:
    return self.count * self.size


NO_CHUNKS = Chunks(0, 0)


def chunks(positions: int, at_most: int, multiple: int = 1) -> Chunks:
  """Equal chunks that hold `positions`; the last one may be ragged.

  Args:
    positions: of the prefix.
    at_most: largest chunk.
    multiple: what the size of a chunk must be a multiple of.

  Raises:
    ValueError: no multiple is small enough.
  """
  at_most = at_most // multiple * multiple
  if at_most < 1:
    raise ValueError(f"chunk_size must be at least {multiple}.")
  if positions < 1:
    return NO_CHUNKS
  count = -(-positions // at_most)
  size = -(-positions // count)
  return Chunks(count, -(-size // multiple) * multiple)


def empty(
    config: config_lib.ModelConfig, capacity: int, version=0,
    devices: int = 1, *, room: int = 0,
) -> PrefixState:
  """One device's share of a state of no positions and room for `capacity`.

  Args:
    config: geometry.
    capacity: positions there is room for on all devices.
    version: see `PrefixState`.
    devices: that share it.
    room: the largest capacity it will be given later.
  """
  sizes = sizes_lib.Sizes(
      capacity // devices, max(room, capacity) // devices, devices
  )
  return PrefixState(
      mixer=pattern.build(
          config,
          lambda kind, count: kinds.of(config, kind).empty(count, sizes),
      ),
      tokens=jnp.zeros(capacity, jnp.int32),
      length=jnp.zeros((), jnp.int32),
      version=jnp.asarray(version, jnp.uint32),
      choices=pattern.join(config, [
          [_no_choices(config, part, sizes.here)] * len(part.kinds)
          for part in pattern.parts(config)
      ]),
      devices=devices,
  )


def _no_choices(config: config_lib.ModelConfig, part, here: int):
  if not part.experts:
    return {}
  shape = part.count, 1, here, config.experts.top_k
  return jnp.zeros(shape, jnp.int32)


def accumulator(
    config: config_lib.ModelConfig, capacity: int, dtype: str | None = None,
    devices: int = 1,
):
  """Zeros for the cotangent of a state, of attention a pair of [L, K, P, D].

  Args:
    config: geometry.
    capacity: P, the positions that are on this device.
    dtype: see `Schedule.accumulator_dtype`.
    devices: that share it.
  """
  dtype = dtype or config_lib.at_least_float32(config.compute_dtype)
  sizes = sizes_lib.Sizes(capacity, capacity, devices)
  return pattern.build(
      config,
      lambda kind, count: kinds.of(config, kind).accumulator(
          count, sizes, dtype
      ),
  )


def seen(config: config_lib.ModelConfig, mixer):
  """What a segment continues from."""
  return pattern.over(
      config, lambda kind, stack: kinds.of(config, kind).seen(stack), mixer
  )


def chosen(state: PrefixState, start, size: int, places: int):
  """The experts of a chunk's positions, `PrefixState.choices` of them alone.

  Args:
    state: the prefix.
    start: of the chunk, on this device.
    size: of its positions.
    places: positions that chunks reach on this device, more than the state has
      room for where it was captured in other chunks.
  """
  def part(x_L1Pk):
    room = max(0, places - x_L1Pk.shape[2])
    padded = jnp.pad(x_L1Pk, ((0, 0), (0, 0), (0, room), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, size, axis=2)

  return jax.tree.map(part, state.choices)


def push(
    config: config_lib.ModelConfig, state: PrefixState, present, chunk
) -> PrefixState:
  """The state with what a chunk left behind.

  Args:
    config: geometry.
    state: before the chunk.
    present: `segment.Present` of the chunk.
    chunk: where it stands, `sizes.Chunk`.
  """
  mixer = pattern.over(
      config,
      lambda kind, stack, new: (
          kinds.of(config, kind).push(stack, new, chunk)
      ),
      state.mixer, present.mixer,
  )
  choices = jax.tree.map(
      lambda x, new: places_lib.push((x,), (new,), chunk)[0],
      state.choices, present.choices,
  )
  return dataclasses.replace(state, mixer=mixer, choices=choices)


def save(config: config_lib.ModelConfig, mixer, size: int):
  """What popping a chunk needs of the state before it, by stack.

  Args:
    config: geometry.
    mixer: the mixer state before the chunk.
    size: positions of the chunk on this device.
  """
  return pattern.over(
      config, lambda kind, stack: kinds.of(config, kind).save(stack, size),
      mixer,
  )


def restore(config: config_lib.ModelConfig, state: PrefixState, saved, chunk):
  """`rest_of` the state before the chunk that was pushed last."""
  return pattern.over(
      config,
      lambda kind, stack, saved: ()
      if kinds.of(config, kind).positional
      else kinds.of(config, kind).restore(stack, saved, chunk),
      state.mixer, saved,
  )


def rest_of(config: config_lib.ModelConfig, mixer):
  """The stacks of a state or its cotangent without a place for every position.

  Those with places are left empty.
  """
  return pattern.over(
      config,
      lambda kind, stack: () if kinds.of(config, kind).positional else stack,
      mixer,
  )


def with_rest_of(config: config_lib.ModelConfig, mixer, rest):
  """A state or its cotangent with another `rest_of`."""
  return pattern.over(
      config,
      lambda kind, stack, other: stack
      if kinds.of(config, kind).positional else other,
      mixer, rest,
  )


def with_rest(config: config_lib.ModelConfig, state: PrefixState, rest):
  """The state with another `rest_of` its mixer state."""
  return dataclasses.replace(
      state, mixer=with_rest_of(config, state.mixer, rest)
  )


def over_places(config: config_lib.ModelConfig, function, mixer):
  """A function of arrays [L, K, P, D] on all that have places."""
  return pattern.over(
      config,
      lambda kind, stack: jax.tree.map(function, stack)
      if kinds.of(config, kind).positional else stack,
      mixer,
  )


def extend(
    config: config_lib.ModelConfig, state: PrefixState, present, chunk
) -> PrefixState:
  """The state with more of a prompt, which must find room; see `push`.

  This need not be a chunk, and is never popped.
  """
  mixer = pattern.over(
      config,
      lambda kind, stack, new: kinds.of(config, kind).extend(stack, new, chunk),
      state.mixer, present.mixer,
  )
  choices = jax.tree.map(
      lambda x, new: places_lib.extend((x,), (new,), chunk)[0],
      state.choices, present.choices,
  )
  return dataclasses.replace(state, mixer=mixer, choices=choices)


def skip(config: config_lib.ModelConfig, accumulator, chunk):
  """The cotangent where a chunk's turn to be popped passes."""
  return pattern.over(
      config,
      lambda kind, stack: kinds.of(config, kind).skip(stack, chunk),
      accumulator,
  )


def places(config: config_lib.ModelConfig, accumulator) -> int:
  """Positions that an accumulator has room for on this device, or 0."""
  for kind, stack in pattern.leaves(config, accumulator):
    if kinds.of(config, kind).positional:
      return stack[0].shape[2]
  return 0


def complete(
    config: config_lib.ModelConfig, state: PrefixState, popped: Chunks
) -> bool:
  """Whether all that popping these chunks needs is there."""
  if kinds.positional(config) or not popped.count:
    return True
  if state.saved is None or state.capacity != popped.capacity:
    return False
  return all(
      x.shape[0] == popped.count for x in jax.tree.leaves(state.saved)
  )


def kinds_of(devices: int) -> PrefixState:
  """How a state is shared, for `Layout.over`: a kind for each of its fields."""
  return PrefixState(
      "mixer", "all", "all", "all", None, "stacked", "mixer", devices
  )


def caches(
    config: config_lib.ModelConfig, mixer, branches: int, tokens: int
):
  """Room for what `tokens` tokens of every branch leave behind.

  Axis 2 of every array is that of the branches.
  """
  return pattern.over(
      config,
      lambda kind, stack: kinds.of(config, kind).cache(
          jax.tree.leaves(stack)[0].shape[0], branches, tokens, stack
      ),
      mixer,
  )


def resize(
    config: config_lib.ModelConfig, state: PrefixState, capacity: int
) -> PrefixState:
  """The state with room for `capacity` positions, which must hold its own.

  Of a state on several devices this is one device's share.
  """
  if capacity == state.capacity:
    return state
  here = capacity // state.devices
  room = max(0, capacity - state.capacity)
  return dataclasses.replace(
      state,
      mixer=pattern.over(
          config, lambda kind, stack: kinds.of(config, kind).fit(stack, here),
          state.mixer,
      ),
      tokens=jnp.pad(state.tokens, (0, room))[:capacity],
      choices=jax.tree.map(
          lambda x: places_lib.fit((x,), here)[0], state.choices
      ),
  )
