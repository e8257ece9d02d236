# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed attention: the reference's, sample by sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops.attention import packed as attention_packed
from branch_replay.ops.attention import reference

HEADS, REPEATS, HEAD_DIM, CAPACITY = 2, 3, 4, 10
SEGMENTS = ((1, 1, 1, 2, 2, 3, 3, 3), (4, 4, 4, 4, 4, 0, 0, 0))


def arrays(capacity=CAPACITY):
  """q, k, v, and a prefix of two layers, of which the second is meant."""
  rng = np.random.default_rng(0)
  branches, tokens = np.shape(SEGMENTS)
  shapes = (
      (HEADS, branches, REPEATS, tokens, HEAD_DIM),
      *[(HEADS, branches, tokens, HEAD_DIM)] * 2,
      *[(2, HEADS, capacity, HEAD_DIM)] * 2,
  )
  q, k, v, *prefix = (jnp.asarray(rng.normal(size=shape)) for shape in shapes)
  return (q, k, v), tuple(prefix)


def one_by_one(qkv, prefix, length):
  """The reference on every sample alone, joined again."""
  out = jnp.zeros_like(qkv[0])
  for row, ids in enumerate(np.asarray(SEGMENTS)):
    for one in np.unique(ids):
      at = np.flatnonzero(ids == one)
      sample = tuple(x[:, row : row + 1][..., at, :] for x in qkv)
      alone, _ = reference.replay_attention(
          *sample, *(x[1] for x in prefix), length
      )
      out = out.at[:, row : row + 1, :, at[0] : at[-1] + 1].set(alone)
  return out


@pytest.mark.exhaustive(but="0-0")
@pytest.mark.parametrize("capacity, length", (
    (CAPACITY, 7), (CAPACITY, 0), (0, 0),
))
def test_samples_see_themselves_and_the_prefix(x64, capacity, length):
  qkv, prefix = arrays(capacity)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=qkv[0].shape))

  def loss(qkv, attend):
    return jnp.sum(jnp.sin(attend(qkv)) * weights)

  def packed(qkv):
    return attention_packed.attend(
        *qkv, jnp.asarray(SEGMENTS), prefix, layer=1, prefix_length=length
    )

  def separate(qkv):
    return one_by_one(qkv, prefix, length)

  np.testing.assert_allclose(packed(qkv), separate(qkv), rtol=0, atol=1e-13)
  got = jax.jit(jax.grad(loss), static_argnums=1)(qkv, packed)
  wanted = jax.jit(jax.grad(loss), static_argnums=1)(qkv, separate)
  for name, mine, theirs in zip("qkv", got, wanted, strict=True):
    np.testing.assert_allclose(
        mine, theirs, rtol=0, atol=1e-12, err_msg=f"d{name}"
    )


def test_gradients_flow_through_the_log_sum_exp_of_the_prefix(x64):
  (q, _, _), prefix = arrays()
  direction = jnp.asarray(np.random.default_rng(2).normal(size=q.shape))

  def value(step):
    out, lse = attention_packed.attend_prefix(
        q + step * direction, prefix, 1, 7
    )
    return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.sin(lse))

  slope = (value(1e-5) - value(-1e-5)) / 2e-5
  np.testing.assert_allclose(jax.grad(value)(0.0), slope, rtol=1e-7)
