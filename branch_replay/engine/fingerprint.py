# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a prefix state belongs to: the bits of all parameters, and the model.

The fingerprint of parameters is 32 bits. With b the bits of an element, at
place p of one of at most `_FOLD` stretches j that the first axis is cut into,

  F = Σ over leaves and p of  w(leaf, p) · mix(Σ_j spread(b_jp, j))  mod 2³²,

where spread and mix are bijections of 32 bits and w is odd: a change of one
element always changes F, and any other change (a swap, a sign, a step of an
optimizer) does but for a chance of about 2⁻³². Sums of integers do not depend
on their order, so that sharded parameters have the fingerprint of whole ones,
and each device sums what it has. Stretches are added up by one elementwise
pass over the parameters, because sums to a scalar of anything but a plain
float are slow on CPU.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib

_FOLD = 8  # more arrays in one loop are not vectorised on CPU
_ODD = 0x9E3779B1
_MASK = 0xFFFFFFFF

# These bound and store a model, and change nothing that is computed.
_NOT_COMPUTED = ("max_positions", "param_dtype")


def of_params(params) -> jax.Array:
  """The fingerprint of a tree of parameters, u32[]; see the module.

  Bits count: −0 is not 0, and parameters of another dtype are other ones.
  """
  # Two programs, or the second would be fused into the first and both run as
  # one slow loop on CPU. Under `jit` they are one all the same.
  return _summed(_folded(jax.tree.leaves(params)))


@functools.lru_cache(maxsize=64)
def of_config(config: config_lib.ModelConfig) -> tuple:
  """(field, value) of everything in a config that changes what is computed."""
  return tuple(
      (field.name, getattr(config, field.name))
      for field in dataclasses.fields(config)
      if field.name not in _NOT_COMPUTED
  )


def difference(mine: tuple, other: tuple) -> str:
  """Where two of `of_config` differ, with both values, for a message."""
  return ", ".join(
      f"{name}={b!r} (now {a!r})"
      for (name, a), (_, b) in zip(mine, other, strict=True) if a != b
  )


def _words(leaf):
  """The bits as u32, with one more axis where an element has 64 of them."""
  if leaf.dtype.itemsize == 8:
    return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
  if leaf.dtype == bool:
    return leaf.astype(jnp.uint32)
  unsigned = np.dtype(f"uint{8 * leaf.dtype.itemsize}")
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


@jax.jit
def _folded(leaves):
  """Of every leaf some arrays, which `_summed` sums up."""
  return [
      _parts(_words(jnp.asarray(leaf)), number)
      for number, leaf in enumerate(leaves)
  ]


def _parts(words, number: int):
  if words.ndim < 2:
    return [_weighted(words.reshape(1, -1), number, 0)]
  # Stretches are cut along the first axis alone, which layers and vocabulary
  # tables are never sharded along.
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
  """The sum of all elements of all arrays, first of rows as whole vectors."""
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
  """A bijection of 32 bits for every stretch."""
  bits ^= bits >> 16  # a sign, too, must reach many bits
  bits *= jnp.uint32((_ODD * (2 * stretch + 1)) & _MASK)
  return bits ^ (bits >> 15)


def _mix(bits):
  """A bijection of 32 bits in which each depends on all."""
  bits ^= bits >> 16
  bits *= jnp.uint32(0x85EBCA6B)
  bits ^= bits >> 13
  bits *= jnp.uint32(0xC2B2AE35)
  return bits ^ (bits >> 16)


def _weighted(folded, number: int, start: int):
  """w · mix of every place."""
  place = jnp.uint32((number * 0x27D4EB2F + start * 0x165667B1) & _MASK)
  for axis, odd in zip(range(folded.ndim), _odds(), strict=False):
    place += jax.lax.broadcasted_iota(
        jnp.uint32, folded.shape, axis
    ) * jnp.uint32(odd)
  return _mix(folded) * (_mix(place) | jnp.uint32(1))


def _odds():
  return ((_ODD * k) & _MASK for k in itertools.count(1, 2))

