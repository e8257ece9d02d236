# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: blocks and steps against one token after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops import gated_delta
from branch_replay.ops import gated_delta_reference as reference

KEY, VALUE, WIDTH = 6, 5, 4


def case(tokens, branches=2, heads=2, repeats=3, seed=0):
  """Arguments of `gated_delta.mix` but for the lengths."""
  random = np.random.default_rng(seed)
  channels = 2 * KEY + repeats * VALUE

  def normal(*shape):
    return jnp.asarray(random.normal(size=shape))

  params = gated_delta.Parameters(
      normal(heads, channels, WIDTH), 0.5 * normal(heads, repeats),
      normal(heads, repeats),
  )
  return (
      params, normal(branches, tokens, heads, channels),
      normal(branches, tokens, heads, 2 * repeats),
      normal(branches, heads, repeats, KEY, VALUE),
      normal(branches, heads, WIDTH - 1, channels),
  )


def by_blocks(*arguments, **options):
  return gated_delta.mix(*arguments, key_dim=KEY, **options)


def by_tokens(*arguments):
  return reference.mix(*arguments, key_dim=KEY)


def close(actual, expected, tolerance=1e-12):
  for got, right in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(mix, arguments, cotangents):
  outputs, pull = jax.vjp(mix, *arguments)
  return outputs, pull(cotangents)


@pytest.mark.parametrize("tokens", (1, 8, 21))
def test_blocks_equal_the_recurrence_and_so_do_all_gradients(
    x64, monkeypatch, tokens
):
  """Of parameters, inputs, and both parts of the state before and after."""
  monkeypatch.setattr(gated_delta, "BLOCK", 8)
  arguments = case(tokens)
  cotangents = jax.tree.map(
      lambda x: jnp.asarray(np.random.default_rng(1).normal(size=x.shape)),
      jax.eval_shape(by_tokens, *arguments),
  )
  expected = there_and_back(by_tokens, arguments, cotangents)
  actual = there_and_back(
      lambda *arguments: by_blocks(*arguments), arguments, cotangents
  )
  close(actual, expected)
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(actual[1]))


def test_one_head_by_hand(x64):
  """Two tokens that write 1 and overwrite it by 3 at the same key."""
  inputs = gated_delta._DeltaInputs(
      q_GTKD=jnp.ones((1, 2, 1, 1)), k_GTKD=jnp.ones((1, 2, 1, 1)),
      v_GTKRE=jnp.asarray([1.0, 3.0]).reshape(1, 2, 1, 1, 1),
      log_decay_GTKR=jnp.log(jnp.asarray([1.0, 0.5])).reshape(1, 2, 1, 1),
      beta_GTKR=jnp.asarray([1.0, 0.5]).reshape(1, 2, 1, 1),
  )
  out, matrix = gated_delta._blocks(inputs, jnp.full((1, 1, 1, 1, 1), 8.0))
  # S₁ = 8 + 1·(1 − 8) = 1; S₂ = ½·1 + ½·(3 − ½·1) = 1.75.
  np.testing.assert_allclose(out.reshape(-1), [1.0, 1.75], rtol=1e-12)
  np.testing.assert_allclose(matrix.reshape(-1), [1.75], rtol=1e-12)


def test_a_segment_in_two_parts_equals_one(x64):
  params, channels, rates, matrix, last = case(13)
  whole, *left = by_blocks(params, channels, rates, matrix, last)
  first, *between = by_blocks(
      params, channels[:, :6], rates[:, :6], matrix, last
  )
  second, *after = by_blocks(params, channels[:, 6:], rates[:, 6:], *between)
  close((jnp.concatenate([first, second], axis=1), after), (whole, left))


def test_steps_equal_the_recurrence(x64):
  params, channels, rates, *left = arguments = case(7)
  outputs = []
  for at in range(7):
    out, *left = gated_delta.step(
        params, channels[:, at : at + 1], rates[:, at : at + 1], *left,
        key_dim=KEY,
    )
    outputs.append(out)
  out, *expected = by_tokens(*arguments)
  close((jnp.concatenate(outputs, axis=1), left), (out, expected))


@pytest.mark.exhaustive
@pytest.mark.parametrize("branches", (1, 2))
def test_padding_leaves_no_trace(x64, branches):
  """Neither in outputs nor in what is left behind, nor in any gradient."""
  params, channels, rates, matrix, last = case(9, branches)
  lengths = jnp.asarray([4, 0])[:branches]
  real = (jnp.arange(9)[None] < lengths[:, None])[..., None, None]

  def run(noise):
    def mix(channels, rates, matrix, last):
      out, *left = by_blocks(
          params, channels, rates, matrix, last, lengths_G=lengths
      )
      return jnp.where(real[..., None], out, 0), left

    inputs = (
        jnp.where(real, channels, noise), jnp.where(real, rates, -noise)
    )
    outputs, pull = jax.vjp(mix, *inputs, matrix, last)
    return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

  (outputs, gradient), other = run(3.0), run(1e3)
  for got, right in zip(
      jax.tree.leaves(other), jax.tree.leaves((outputs, gradient)), strict=True
  ):
    np.testing.assert_array_equal(got, right)
  for x in gradient[:2]:
    assert not np.where(real, 0, x).any()
  short, *left = by_tokens(
      params, *(x[:1, :4] for x in (channels, rates)), matrix[:1], last[:1]
  )
  close((outputs[0][:1, :4], [x[:1] for x in outputs[1]]), (short, left))
  if branches == 2:  # a row of nothing but padding
    np.testing.assert_array_equal(outputs[1][0][1], matrix[1])
    np.testing.assert_array_equal(outputs[1][1][1], last[1])


def test_rows_do_not_see_each_other(x64):
  params, channels, rates, matrix, last = case(9, branches=3)
  before = by_blocks(params, channels, rates, matrix, last)
  after = by_blocks(params, channels.at[1].add(1.0), rates, matrix, last)
  for a, b in zip(before, after, strict=True):
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[2], b[2])
    assert (a[1] != b[1]).any()


def test_the_norm_of_nothing_has_a_finite_gradient(x64):
  gradient = jax.jacobian(gated_delta._unit)(jnp.zeros(3))
  np.testing.assert_allclose(gradient, 1e3 * np.eye(3), rtol=1e-9)


@pytest.mark.exhaustive
def test_strong_decay_neither_overflows_nor_turns_gradients_into_nan():
  params, channels, rates, matrix, last = jax.tree.map(
      lambda x: x.astype(jnp.float32), case(40)
  )
  params = params._replace(log_rate_KR=params.log_rate_KR + 6)
  outputs, pull = jax.vjp(
      lambda *x: by_blocks(*x), params, channels, rates, matrix, last
  )
  for x in jax.tree.leaves((outputs, pull(outputs))):
    assert np.isfinite(x).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", (1, 5, 16, 33, 58, 64))
def test_systems_are_inverted(x64, size):
  """Also where it is hardest: the same key, and nothing is forgotten."""
  rng = np.random.default_rng(size)
  random = np.tril(rng.uniform(-1, 1, (3, 2, size, size)), -1)
  same = np.tril(np.ones((3, 2, size, size)), -1)
  for system in (random, same):
    inverse = gated_delta._inverse(jnp.asarray(system))
    wanted = np.linalg.inv(np.eye(size) + system)
    np.testing.assert_allclose(
        inverse, wanted, atol=1e-12 * np.abs(wanted).max()
    )
    assert not np.triu(np.asarray(inverse), 1).any()
  in_float32 = gated_delta._inverse(jnp.asarray(same, jnp.float32))
  np.testing.assert_allclose(in_float32, inverse, atol=1e-6)


def test_no_step_calls_a_triangular_solve():
  """Its threads would keep a core each from all that comes after."""
  def loss(*arguments):
    return sum(jnp.sum(x) for x in by_blocks(*arguments))

  jaxpr = str(jax.make_jaxpr(jax.grad(loss, range(5)))(*case(130)))
  assert "dot_general" in jaxpr and "triangular_solve" not in jaxpr
