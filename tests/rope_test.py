# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions by hand; parity_test.py compares with transformers."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay import config as config_lib
from branch_replay.ops import rope


def rotate(x_TD, positions_T, theta=10_000.0, scaling=None):
  """One branch, one head."""
  return np.asarray(
      rope.rotate(
          x_TD[None, :, None], jnp.asarray(positions_T)[None], theta=theta,
          scaling=scaling,
      )
  )[0, :, 0]


def test_bfloat16_angles_at_position_4095_are_those_of_float32():
  """Positions or frequencies cast to bfloat16 first are off by up to 1.26."""
  head_dim, position, theta = 128, 4095, 1e6
  ones = np.zeros((1, head_dim))
  ones[:, : head_dim // 2] = 1  # turns into (cos, sin)
  turned = rotate(jnp.asarray(ones, jnp.bfloat16), [position], theta)
  assert turned.dtype == jnp.bfloat16
  inverse_H = theta ** -(np.arange(0, head_dim, 2) / head_dim)
  angle_H = position * inverse_H
  right = np.concatenate([np.cos(angle_H), np.sin(angle_H)])
  assert np.max(np.abs(turned[0].astype(float) - right)) < 0.004
  faulty_H = np.asarray(jnp.bfloat16(position)) * np.asarray(
      inverse_H, jnp.bfloat16
  )
  faulty = np.concatenate([np.cos(faulty_H), np.sin(faulty_H)]).astype(float)
  assert np.max(np.abs(faulty - right)) > 1


def test_rotation_turns_the_two_halves_by_the_hand_computed_angle(x64):
  """(1, 0) ↦ (cos t, sin t) at frequency 1, and 100^(−2/4) = 0.1."""
  x_TD = jnp.asarray([[1.0, 0.0, 0.0, 1.0]])
  turned = rotate(x_TD, [2], theta=100.0)
  np.testing.assert_allclose(
      turned[0], [math.cos(2), -math.sin(0.2), math.sin(2), math.cos(0.2)],
      rtol=1e-14,
  )


def test_rotation_preserves_norms_and_position_zero_is_the_identity(x64):
  x_TD = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)))
  turned = rotate(x_TD, [0, 1, 77, 4095, 100_000])
  np.testing.assert_allclose(
      np.linalg.norm(turned, axis=1), np.linalg.norm(x_TD, axis=1), rtol=1e-13
  )
  np.testing.assert_array_equal(turned[0], x_TD[0])
  assert np.all(np.abs(turned[1:] - x_TD[1:]).max(axis=1) > 0.1)


def test_dot_products_depend_on_relative_positions_alone(x64):
  random = np.random.default_rng(0)
  q_D, k_D = (jnp.asarray(random.normal(size=16)) for _ in range(2))

  def dot(query, key):
    return rotate(q_D[None], [query])[0] @ rotate(k_D[None], [key])[0]

  np.testing.assert_allclose(dot(7, 3), dot(1007, 1003), rtol=1e-10)
  np.testing.assert_allclose(dot(0, 0), q_D @ k_D, rtol=1e-13)
  assert abs(dot(7, 3) - dot(3, 7)) > 0.1  # the sign of the distance counts


def test_each_branch_has_positions_of_its_own(x64):
  x_GTND = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 8)))
  positions_GT = jnp.asarray([[0, 1, 2], [40, 41, 42]])
  both = rope.rotate(x_GTND, positions_GT, theta=1e4)
  for branch in range(2):
    alone = rope.rotate(
        x_GTND[branch : branch + 1], positions_GT[branch : branch + 1],
        theta=1e4,
    )
    np.testing.assert_allclose(both[branch], alone[0], rtol=1e-13)


def test_linear_scaling_divides_every_frequency():
  plain, _ = rope.frequencies(8, 1e4, None)
  np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-14)
  scaled, factor = rope.frequencies(8, 1e4, config_lib.LinearScaling(4.0))
  np.testing.assert_allclose(scaled, plain / 4, rtol=1e-14)
  assert factor == 1


def test_llama3_scaling_keeps_fast_slows_slow_and_blends_between():
  """Turns in 2000π positions: 1000, 100, 10 and 1; blend from 5 to 20."""
  scaling = config_lib.Llama3Scaling(
      factor=8.0, low_freq_factor=5.0, high_freq_factor=20.0,
      original_max_positions=2000 * math.pi,
  )
  scaled, factor = rope.frequencies(8, 1e4, scaling)
  blend = (10 - 5) / (20 - 5)
  np.testing.assert_allclose(
      scaled,
      [1, 0.1, 0.01 * (blend + (1 - blend) / 8), 0.001 / 8],
      rtol=1e-13,
  )
  assert factor == 1


def test_yarn_interpolates_between_its_two_corners():
  """Of 8 frequencies 10⁻ⁱ/², those of 100 and 1 turns are i = 2 and 6."""
  scaling = config_lib.YarnScaling(
      factor=4.0, original_max_positions=2000 * math.pi,
      beta_fast=100.0, beta_slow=1.0, truncate=False,
  )
  scaled, factor = rope.frequencies(16, 1e4, scaling)
  share = np.array([0, 0, 0, 0.25, 0.5, 0.75, 1, 1])
  plain = 10.0 ** -(np.arange(8) / 2)
  np.testing.assert_allclose(
      scaled, plain * (1 - share + share / 4), rtol=1e-12
  )
  assert factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("options, factor", (
    (dict(factor=1.0), 1.0),
    (dict(factor=40.0, attention_factor=1.5), 1.5),
    (dict(factor=40.0, mscale=1.0, mscale_all_dim=1.0), 1.0),
    (dict(factor=math.e, mscale=2.0, mscale_all_dim=1.0), 1.2 / 1.1),
))
def test_yarn_scales_the_rotated_vectors_by_its_attention_factor(
    x64, options, factor
):
  scaling = config_lib.YarnScaling(original_max_positions=64, **options)
  x_TD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16)))
  turned = rotate(x_TD, [9], scaling=scaling)
  np.testing.assert_allclose(
      np.linalg.norm(turned), factor * np.linalg.norm(x_TD), rtol=1e-13
  )


def test_latent_layers_scale_their_scores_by_the_square_of_a_temperature():
  for options, factor in (
      (dict(factor=math.e, mscale_all_dim=1.0), 1.1**2),
      (dict(factor=math.e, mscale=2.0, mscale_all_dim=0.5), 1.05**2),
      (dict(factor=math.e), 1.0),
      (dict(factor=1.0, mscale_all_dim=1.0), 1.0),
  ):
    scaling = config_lib.YarnScaling(original_max_positions=64, **options)
    assert rope.score_factor(scaling) == pytest.approx(factor, rel=1e-14)
  assert rope.score_factor(config_lib.LinearScaling(4.0)) == 1
  assert rope.score_factor(None) == 1


def test_of_a_head_the_first_numbers_alone_are_rotated(x64):
  x_GTND = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)))
  at_GT = jnp.asarray([[3, 4, 50]])
  found = rope.rotate(x_GTND, at_GT, theta=1e4, dim=4)
  # As of a head of four: its frequencies are those of its own size.
  alone = rope.rotate(x_GTND[..., :4], at_GT, theta=1e4)
  np.testing.assert_array_equal(found[..., :4], alone)
  np.testing.assert_array_equal(found[..., 4:], x_GTND[..., 4:])


def test_an_unknown_scaling_is_an_error():
  with pytest.raises(ValueError, match="Unknown RoPE scaling.*dynamic"):
    rope.frequencies(8, 1e4, "dynamic")
