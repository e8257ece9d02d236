# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of parameters and configs, to tell what a state belongs to.

The fingerprint of parameters is 32 bits. The first axis of a leaf is cut into
at most `_FOLD` equal stretches j; with b_jp the bits of the element at place p
of stretch j,

  F = Σ over leaves and p of  w(leaf, p) · mix(Σ_j spread(b_jp, j))  mod 2³²,

where spread and mix are bijections of 32 bits and w is odd. A change of one
element always changes F; any other change (a swap, a sign, an optimizer step)
leaves it with a chance of about 2⁻³². Sums of integers do not depend on their
order, so sharded parameters have the fingerprint of whole ones, and each device
sums what it has. Stretches are added elementwise first, because reductions of
integers to a scalar are slow on CPU.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib

_FOLD = 8  # a loop over more arrays is not vectorised on CPU
_ODD = 0x9E3779B1
_MASK = 0xFFFFFFFF

# Fields of a config that do not change what a model computes.
_NOT_COMPUTED = ("max_positions", "param_dtype")


def of_params(params) -> jax.Array:
  """Computes the fingerprint of a tree of parameters, u32[]; see the module.

  It is one of bits: −0 differs from 0, and so do dtypes.
  """
  # Two programs: as one, XLA fuses both passes into one slow loop on CPU. Under
  # an outer `jit` they become one all the same.
  return _summed(_folded(jax.tree.leaves(params)))


@functools.lru_cache(maxsize=64)
def of_config(config: config_lib.ModelConfig) -> tuple:
  """Lists (field, value) of all fields that change what a model computes."""
  return tuple(
      (field.name, getattr(config, field.name))
      for field in dataclasses.fields(config)
      if field.name not in _NOT_COMPUTED
  )


def difference(mine: tuple, other: tuple) -> str:
  """Describes where two results of `of_config` differ, for an error message."""
  return ", ".join(
      f"{name}={b!r} (now {a!r})"
      for (name, a), (_, b) in zip(mine, other, strict=True) if a != b
  )


def _words(leaf):
  """The bits as u32, with a further axis of two for 64-bit elements."""
  if leaf.dtype.itemsize == 8:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
  if leaf.dtype == bool:
    return leaf.astype(jnp.uint32)
  unsigned = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


@jax.jit
def _folded(leaves):
  """For each leaf, weighted arrays whose elements `_summed` adds up."""
  return [
      _parts(_words(jnp.asarray(leaf)), number)
      for number, leaf in enumerate(leaves)
  ]


def _parts(words, number: int):
  if words.ndim < 2:
    return [_weighted(words.reshape(1, -1), number, 0)]
  # Only the first axis is cut: layers and vocabulary tables are never sharded
  # along it.
  parts, start, rows = [], 0, words.shape[0]
  while start < rows:
    size = max(1, (rows - start) // _FOLD)
    count = min(_FOLD, (rows - start) // size)
    folded = functools.reduce(jnp.add, (
        _spread(words[start + j * size : start + (j + 1) * size], j)
        for j in range(count)
    ))
    parts.append(_weighted(folded, number, start))
    start += count * size
  return parts


@jax.jit
def _summed(leaves):
  """Sums all elements of all arrays, adding rows as vectors first."""
  total = jnp.uint32(0)
  for parts in leaves:
    for x in parts:
      if x.shape[0] >= _FOLD:
        size = x.shape[0] // _FOLD
        slices = [x[j * size : (j + 1) * size] for j in range(_FOLD)]
        total += jnp.sum(functools.reduce(jnp.add, slices), dtype=jnp.uint32)
        total += jnp.sum(x[_FOLD * size :], dtype=jnp.uint32)
    rows = [row for x in parts if x.shape[0] < _FOLD for row in x]
    if rows:
      total += jnp.sum(functools.reduce(jnp.add, rows), dtype=jnp.uint32)
  return total


def _spread(bits, stretch: int):
  """A bijection of 32 bits, another one for each stretch."""
  bits ^= bits >> 16  # so that the sign bit, too, affects many bits
  bits *= jnp.uint32((_ODD * (2 * stretch + 1)) & _MASK)
  return bits ^ (bits >> 15)


def _mix(bits):
  """A bijection of 32 bits in which each output bit depends on all inputs."""
  bits ^= bits >> 16
  bits *= jnp.uint32(0x85EBCA6B)
  bits ^= bits >> 13
  bits *= jnp.uint32(0xC2B2AE35)
  return bits ^ (bits >> 16)


def _weighted(folded, number: int, start: int):
  """w(leaf, p) · mix(folded bits) of every place p."""
  place = jnp.uint32((number * 0x27D4EB2F + start * 0x165667B1) & _MASK)
  for axis, odd in zip(range(folded.ndim), _odds(), strict=False):
    place += jax.lax.broadcasted_iota(
        jnp.uint32, folded.shape, axis
    ) * jnp.uint32(odd)
  return _mix(folded) * (_mix(place) | jnp.uint32(1))


def _odds():
  return ((_ODD * k) & _MASK for k in itertools.count(1, 2))

