# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What the KL estimators estimate, and what their gradients are: enumerated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.rl import divergences

# Logits of a policy and of a reference over five ids, far apart.
LOGITS_V = np.array([0.3, -1.2, 2.0, 0.0, 0.9])
REFERENCE_V = np.array([1.5, 0.2, -0.4, 0.1, -2.0])
ONE = jnp.ones((1, 5), bool)


def kl(logits_V, other_V):
  p_V, q_V = jax.nn.log_softmax(logits_V), jax.nn.log_softmax(other_V)
  return jnp.sum(jnp.exp(p_V) * (p_V - q_V))


def enumerated(estimator, logits_V):
  """Σₓ p(x) estimate(x), with p(x) constant: the mean over sampled tokens."""
  reference_V = jax.nn.log_softmax(jnp.asarray(REFERENCE_V))
  log_probs_V = jax.nn.log_softmax(logits_V)
  estimate_GT = divergences.penalty(
      log_probs_V[None], reference_V[None], ONE, estimator=estimator
  )
  drawn_V = jax.nn.softmax(jnp.asarray(LOGITS_V))
  return jnp.sum(drawn_V * estimate_GT[0])


def test_values(x64):
  right = kl(jnp.asarray(LOGITS_V), jnp.asarray(REFERENCE_V))
  for estimator, biased in (("k1", False), ("k2", True), ("k3", False)):
    mean = enumerated(estimator, jnp.asarray(LOGITS_V))
    assert np.isclose(mean, right, rtol=1e-12) != biased, estimator


def test_gradients(x64):
  logits_V, reference_V = jnp.asarray(LOGITS_V), jnp.asarray(REFERENCE_V)
  gradients = {
      estimator: jax.grad(lambda x, e=estimator: enumerated(e, x))(logits_V)
      for estimator in ("k1", "k2", "k3")
  }
  reverse = jax.grad(kl)(logits_V, reference_V)
  forward = jax.grad(kl, argnums=1)(reference_V, logits_V)
  np.testing.assert_allclose(gradients["k1"], 0, atol=1e-14)
  np.testing.assert_allclose(gradients["k2"], reverse, rtol=1e-12)
  np.testing.assert_allclose(gradients["k3"], forward, rtol=1e-12)
  assert np.abs(forward - reverse).max() > 0.1


def test_by_hand():
  ratio_GT = jnp.log(jnp.array([[2.0, 0.5]]))
  log2 = np.log(2)
  np.testing.assert_allclose(
      divergences.k1(ratio_GT), [[log2, -log2]], rtol=1e-6
  )
  np.testing.assert_allclose(
      divergences.k2(ratio_GT), [[log2**2 / 2] * 2], rtol=1e-6
  )
  np.testing.assert_allclose(
      divergences.k3(ratio_GT), [[log2 - 0.5, 1 - log2]], rtol=1e-6
  )
  near = np.asarray(divergences.k3(jnp.array([[1e-3, 0.0]])))
  np.testing.assert_allclose(near, [[5e-7, 0]], rtol=2e-2, atol=0)


@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
def test_the_reference_is_a_constant_and_masked_tokens_are_not_read(estimator):
  log_probs_GT = jnp.array([[-1.0, 200.0, -jnp.inf, jnp.nan]])
  reference_GT = jnp.array([[-2.0, -200.0, -jnp.inf, 0.0]])
  mask_GT = jnp.array([[True, False, False, False]])

  def total(log_probs_GT, reference_GT):
    return jnp.sum(
        divergences.penalty(
            log_probs_GT, reference_GT, mask_GT, estimator=estimator
        )
    )

  value, (mine, others) = jax.value_and_grad(total, argnums=(0, 1))(
      log_probs_GT, reference_GT
  )
  right = {"k1": 1, "k2": 0.5, "k3": np.exp(-1)}[estimator]
  np.testing.assert_allclose(value, right, rtol=1e-6)
  slope = {"k1": 1, "k2": 1, "k3": 1 - np.exp(-1)}[estimator]
  np.testing.assert_allclose(mine, [[slope, 0, 0, 0]], rtol=1e-6)
  np.testing.assert_array_equal(others, 0)


def test_low_precision_is_left_at_once():
  half_GT = jnp.full((1, 5), -3.0, jnp.bfloat16)
  result_GT = divergences.log_ratio(half_GT, half_GT + 0.125, ONE)
  assert result_GT.dtype == jnp.float32
  np.testing.assert_array_equal(result_GT, -0.125)


def test_entropy(x64):
  logits_NV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)))
  p_NV = jax.nn.softmax(logits_NV)
  right_N = -np.sum(p_NV * np.log(p_NV), axis=-1)
  np.testing.assert_allclose(
      divergences.entropy(logits_NV), right_N, rtol=1e-12
  )
  even = divergences.entropy(jnp.zeros((1, 8)) + 5.0)
  np.testing.assert_allclose(even, np.log(8), rtol=1e-12)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_entropy_of_truncated_laws(x64, dtype):
  """As if the ids left out were not in the vocabulary, gradient included."""
  kept_NV = jnp.array([[0.5, -1.0, 30.0], [1.0, 2.0, 3.0]], dtype)
  inf = -jnp.inf
  logits_NV = jnp.array(
      [[0.5, inf, -1.0, 30.0], [inf, 1.0, 2.0, 3.0], [inf] * 4], dtype
  )

  def total(logits_NV):
    result_N = divergences.entropy(logits_NV)
    return jnp.sum(result_N), result_N

  (_, result_N), gradient_NV = jax.value_and_grad(total, has_aux=True)(
      logits_NV
  )
  (_, right_N), wanted_NV = jax.value_and_grad(total, has_aux=True)(kept_NV)
  np.testing.assert_allclose(result_N, [*right_N, 0], rtol=1e-6)
  assert result_N.dtype == dtype
  there_NV = logits_NV > -jnp.inf
  np.testing.assert_array_equal(gradient_NV[~there_NV], 0)
  np.testing.assert_allclose(
      gradient_NV[there_NV], wanted_NV.ravel(), rtol=1e-6
  )


def test_bad_input_is_an_error():
  with pytest.raises(ValueError, match="estimator 'k4'.*k1, k2, k3"):
    divergences.penalty(jnp.ones((1, 5)), jnp.ones((1, 5)), ONE, estimator="k4")
  with pytest.raises(ValueError, match=r"other_log_probs has shape \(5,\)"):
    divergences.log_ratio(jnp.ones((1, 5)), jnp.ones(5), ONE)
  with pytest.raises(ValueError, match="mask of float32.*must be bool"):
    divergences.log_ratio(jnp.ones((1, 5)), jnp.ones((1, 5)), jnp.ones((1, 5)))
