# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""PrefixState: what a prefix leaves behind for the tokens that follow it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib

_SAMPLES = 1024  # strided elements of each parameter in a fingerprint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixState:
  """Keys and values of every layer, and where they come from.

  Attributes:
    mixer: pair (k, v), each [L, K, P, D] in the compute dtype.
    tokens: i32[P], the ids that were run; the prefix pass runs them again.
    length: i32[], positions that are real.
    version: u32[], fingerprint of the parameters it was captured under.
    kept: activations of the chunks, when the policy is to keep them.
    devices: how many devices the positions are dealt to; position p is on
      device p mod devices, and the arrays hold one device after the other.
  """

  mixer: tuple[jax.Array, jax.Array]
  tokens: jax.Array
  length: jax.Array
  version: jax.Array
  kept: object = None
  devices: int = dataclasses.field(default=1, metadata=dict(static=True))

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
    return Chunks(0, 0)
  count = -(-positions // at_most)
  size = -(-positions // count)
  return Chunks(count, -(-size // multiple) * multiple)


def empty(
    config: config_lib.ModelConfig, capacity: int, version=0, devices: int = 1
):
  """One device's share of a state of no positions and room for `capacity`."""
  here = capacity // devices
  shape = config.num_layers, config.num_kv_heads, here, config.head_dim
  return PrefixState(
      mixer=tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(2)),
      tokens=jnp.zeros(capacity, jnp.int32),
      length=jnp.zeros((), jnp.int32),
      version=jnp.asarray(version, jnp.uint32),
      devices=devices,
  )


def accumulator(
    config: config_lib.ModelConfig, capacity: int, dtype: str | None = None
):
  """Zeros for the cotangent of a state, pair of [L, K, P, D].

  Args:
    config: geometry.
    capacity: P.
    dtype: see `Schedule.accumulator_dtype`.
  """
  shape = config.num_layers, config.num_kv_heads, capacity, config.head_dim
  dtype = dtype or config_lib.at_least_float32(config.compute_dtype)
  return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def resize(state: PrefixState, capacity: int) -> PrefixState:
  """The state with room for `capacity` positions, which must hold its own.

  Of a state on several devices this is one device's share.
  """
  if capacity == state.capacity:
    return state
  here = capacity // state.devices

  def fit(x, axis, size):
    if x.shape[axis] >= size:
      return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)

  return dataclasses.replace(
      state,
      mixer=tuple(fit(x, 2, here) for x in state.mixer),
      tokens=fit(state.tokens, 0, capacity),
  )


@jax.jit
def fingerprint(params) -> jax.Array:
  """u32 checksum over strided elements of every parameter.

  Two sets of parameters that differ by one optimizer step differ in it, but
  for a chance of about 2⁻³².
  """
  total = jnp.uint32(0)
  for i, leaf in enumerate(jax.tree.leaves(params)):
    flat = leaf.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLES)]
    wide = sample.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    if sample.dtype == jnp.float64:  # what float32 rounds away counts too
      rest = (sample - wide.astype(sample.dtype)).astype(jnp.float32)
      bits ^= jax.lax.bitcast_convert_type(rest, jnp.uint32) << 1
    odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 2 * i + 1
    total = total * jnp.uint32(0x9E3779B1) + jnp.sum(
        (bits ^ (bits >> 15)) * (odd * jnp.uint32(0x85EBCA6B)),
        dtype=jnp.uint32,
    )
  return total
