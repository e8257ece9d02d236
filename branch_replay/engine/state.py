# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""PrefixState: what a prefix leaves behind for the tokens that follow it.

A stack is all layers of one kind in one place of the layer pattern (see
`models.pattern`); "by stack" means a tree with one entry per stack. Stacks of
full or latent attention have a place for every position; stacks with a window
or a recurrence do not, and those are the "rest" in the names below.
"""

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
  """What every layer leaves behind of a prefix, and what it was captured from.

  Attributes:
    mixer: the state of each stack; for attention a pair (k, v), each
      [L, K, P, D] in the compute dtype.
    tokens: i32[P], the ids that were run; popping runs them again.
    length: i32[], how many of the P positions are real.
    version: u32[], fingerprint of the parameters it was captured under.
    kept: activations of the chunks, [chunks, ...]; None unless the activation
      policy is "keep".
    saved: what popping each chunk needs of the state before it, by stack,
      [chunks, ...]; empty for stacks with a place for every position, None for
      a state whose chunks cannot be popped.
    choices: the experts that each position chose, i32[L, 1, P, k] by stack, so
      that a chunk is run again with the same ones; empty without experts.
    attended: the outputs of attention of every position, by stack, so that a
      chunk that is popped need not attend to the prefix again; see
      `Mixer.attended`. Empty unless the schedule keeps them.
    devices: how many devices the positions are dealt to; position p is on
      device p mod devices, and the arrays hold one device after the other.
    model: `fingerprint.of_config` of the model that captured it; None if the
      state is not marked, as inside compiled functions, whose callers check
      the mark first (see `unmarked`). Public functions refuse such a state.
  """

  mixer: Any
  tokens: jax.Array
  length: jax.Array
  version: jax.Array
  kept: object = None
  saved: Any = None
  choices: Any = dataclasses.field(default_factory=dict)
  attended: Any = dataclasses.field(default_factory=dict)
  devices: int = dataclasses.field(default=1, metadata=dict(static=True))
  model: tuple | None = dataclasses.field(
      default=None, metadata=dict(static=True)
  )

  @property
  def capacity(self) -> int:
    """P, the positions there is room for on all devices."""
    return self.tokens.shape[-1]

  def unmarked(self) -> "PrefixState":
    """The state without `model`, for compiled functions.

    It is static, so that they would be compiled once for every mark.
    """
    return dataclasses.replace(self, model=None)


class Chunks(NamedTuple):
  """How a prefix is cut: `count` chunks of `size` positions each."""

  count: int
  size: int

  @property
  def capacity(self) -> int:
    return self.count * self.size


NO_CHUNKS = Chunks(0, 0)


def chunks(positions: int, at_most: int, multiple: int = 1) -> Chunks:
  """Cuts a prefix into equal chunks; the last one may be partly padding.

  Args:
    positions: positions of the prefix.
    at_most: most positions of a chunk.
    multiple: the size of a chunk is a multiple of this.

  Raises:
    ValueError: `at_most` is less than `multiple`.
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
    devices: int = 1, *, room: int = 0, keep_attention: bool = False,
) -> PrefixState:
  """Makes one device's share of an empty state with room for `capacity`.

  Args:
    config: geometry of the model.
    capacity: positions there is room for on all devices.
    version: u32 that marks the parameters, see `PrefixState`.
    devices: how many devices share the state.
    room: the largest capacity that `resize` will give it later.
    keep_attention: whether it has `attended`.
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
      attended=_no_outputs(config, sizes.here) if keep_attention else {},
      devices=devices,
  )


def _no_outputs(config: config_lib.ModelConfig, here: int):
  def of(kind, count):
    mixer = kinds.of(config, kind)
    return mixer.attended_zeros(count, here) if mixer.attends else ()

  return pattern.build(config, of)


def _no_choices(config: config_lib.ModelConfig, part, here: int):
  if not part.experts:
    return {}
  shape = part.count, 1, here, config.experts.top_k
  return jnp.zeros(shape, jnp.int32)


def accumulator(
    config: config_lib.ModelConfig, capacity: int, dtype: str | None = None,
    devices: int = 1,
):
  """Makes zeros to accumulate the cotangent of a state in.

  They have the tree of `PrefixState.mixer`; for attention a pair of
  [L, K, P, D].

  Args:
    config: geometry of the model.
    capacity: P, the positions that are on this device.
    dtype: see `Schedule.accumulator_dtype`.
    devices: how many devices share the state.
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
  """The part of a mixer state that a segment on top of it reads."""
  return pattern.over(
      config, lambda kind, stack: kinds.of(config, kind).seen(stack), mixer
  )


def of_chunk(arrays, start, size: int, end: int):
  """Slices a chunk's positions from a state's `choices` or `attended`.

  Args:
    arrays: the field of the state, arrays [L, K, P, D].
    start: first position of the chunk on this device.
    size: positions of the chunk on this device.
    end: where the last chunk ends on this device; this may be past the state's
      capacity if the state was captured in chunks of another size.
  """
  def part(x_LKPD):
    room = max(0, end - x_LKPD.shape[2])
    padded = jnp.pad(x_LKPD, ((0, 0), (0, 0), (0, room), (0, 0)))
    return jax.lax.dynamic_slice_in_dim(padded, start, size, axis=2)

  return jax.tree.map(part, arrays)


def push(
    config: config_lib.ModelConfig, state: PrefixState, present, chunk
) -> PrefixState:
  """Appends what a chunk left behind to the state.

  Args:
    config: geometry of the model.
    state: the state before the chunk.
    present: what the chunk left behind, a `segment.Present`.
    chunk: where the chunk stands, a `sizes.Chunk`.
  """
  mixer = pattern.over(
      config,
      lambda kind, stack, new: (
          kinds.of(config, kind).push(stack, new, chunk)
      ),
      state.mixer, present.mixer,
  )
  choices, attended = jax.tree.map(
      lambda x, new: places_lib.push((x,), (new,), chunk)[0],
      (state.choices, state.attended), (present.choices, present.attended),
  )
  return dataclasses.replace(
      state, mixer=mixer, choices=choices, attended=attended
  )


def save(config: config_lib.ModelConfig, mixer, size: int):
  """Takes from a state what `restore` will need when a chunk is popped.

  It stays in memory; nothing is written to a file. Stacks with a place for
  every position need nothing, because a chunk does not overwrite what is before
  it. A window gives its oldest slots, which the chunk pushes out, and a
  recurrent stack all of its state, which the chunk replaces.

  Args:
    config: geometry of the model.
    mixer: `PrefixState.mixer` before the chunk is pushed.
    size: positions of the chunk on this device, its padding included.

  Returns:
    A tree with one entry for each stack, () where nothing is needed.
  """
  return pattern.over(
      config, lambda kind, stack: kinds.of(config, kind).save(stack, size),
      mixer,
  )


def restore(config: config_lib.ModelConfig, state: PrefixState, saved, chunk):
  """Rebuilds the stacks that pushing a chunk overwrote, as they were before it.

  Args:
    config: geometry of the model.
    state: the state after the chunk that was pushed last.
    saved: what `save` returned before the chunk was pushed.
    chunk: where the chunk stands, a `sizes.Chunk`.

  Returns:
    `rest_of` the mixer state before the chunk.
  """
  return pattern.over(
      config,
      lambda kind, stack, saved: ()
      if kinds.of(config, kind).positional
      else kinds.of(config, kind).restore(stack, saved, chunk),
      state.mixer, saved,
  )


def rest_of(config: config_lib.ModelConfig, mixer):
  """Keeps the stacks without a place for every position; empties the others.

  Args:
    config: geometry of the model.
    mixer: `PrefixState.mixer`, or its cotangent.

  Returns:
    The same tree, with () for each stack that has a place for every position.
  """
  return pattern.over(
      config,
      lambda kind, stack: () if kinds.of(config, kind).positional else stack,
      mixer,
  )


def with_rest_of(config: config_lib.ModelConfig, mixer, rest):
  """Replaces the stacks without a place for every position.

  Args:
    config: geometry of the model.
    mixer: `PrefixState.mixer`, or its cotangent.
    rest: a tree as `rest_of` returns it, with the stacks to put in.
  """
  return pattern.over(
      config,
      lambda kind, stack, other: stack
      if kinds.of(config, kind).positional else other,
      mixer, rest,
  )


def with_rest(config: config_lib.ModelConfig, state: PrefixState, rest):
  """`with_rest_of` for the mixer state inside a `PrefixState`."""
  return dataclasses.replace(
      state, mixer=with_rest_of(config, state.mixer, rest)
  )


def over_places(config: config_lib.ModelConfig, function, mixer):
  """Maps a function over all arrays [L, K, P, D] with a place per position."""
  return pattern.over(
      config,
      lambda kind, stack: jax.tree.map(function, stack)
      if kinds.of(config, kind).positional else stack,
      mixer,
  )


def extend(
    config: config_lib.ModelConfig, state: PrefixState, present, chunk
) -> PrefixState:
  """Appends tokens that are never popped, as `push` does for a chunk.

  Any number of tokens may be appended; padding is not written. `attended` is
  not kept up.
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
  """Updates the accumulator for a chunk that "sampled" does not pull back.

  Args:
    config: geometry of the model.
    accumulator: accumulated cotangent of the state that includes the chunk.
    chunk: where the chunk stands, a `sizes.Chunk`.
  """
  return pattern.over(
      config,
      lambda kind, stack: kinds.of(config, kind).skip(stack, chunk),
      accumulator,
  )


def places(config: config_lib.ModelConfig, accumulator) -> int:
  """How many places for positions an accumulator's arrays have on this device.

  It is 0 if no stack has a place for every position.
  """
  for kind, stack in pattern.leaves(config, accumulator):
    if kinds.of(config, kind).positional:
      return stack[0].shape[2]
  return 0


def complete(
    config: config_lib.ModelConfig, state: PrefixState, popped: Chunks
) -> bool:
  """Whether a state holds all that popping these chunks needs."""
  if kinds.positional(config) or not popped.count:
    return True
  if state.saved is None or state.capacity != popped.capacity:
    return False
  return all(
      x.shape[0] == popped.count for x in jax.tree.leaves(state.saved)
  )


def sharing_of(devices: int) -> PrefixState:
  """Makes a `PrefixState` that has words in place of arrays, for `Layout.over`.

  Each word says how devices share the field that it stands in.

  Args:
    devices: how many devices share the state.
  """
  return PrefixState(
      "mixer", "all", "all", "all", None, "stacked", "mixer", "mixer", devices
  )


def caches(
    config: config_lib.ModelConfig, mixer, branches: int, tokens: int
):
  """Makes empty caches for `tokens` decoded tokens of every branch, by stack.

  Axis 2 of every array is the branches, e.g. [L, K, G, S, D] for attention.
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
  """Changes the capacity of one device's share of a state.

  `capacity` counts positions on all devices and must not be below the length.
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
      **{
          name: jax.tree.map(
              lambda x: places_lib.fit((x,), here)[0], getattr(state, name)
          )
          for name in ("choices", "attended")
      },
  )
