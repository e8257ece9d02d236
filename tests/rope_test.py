# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions by hand; parity_test.py compares with transformers."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay import config as config_lib
from branch_replay.mixers import kinds
from branch_replay.mixers import mixer
from branch_replay.mixers import sizes
from branch_replay.models import latent_layers
from branch_replay.ops import rope
from tests import tiny

FAR = 2**22


def rotate(x_TD, positions_T, theta=10_000.0, scaling=None):
  """One branch, one head."""
  return np.asarray(
      rope.rotate(
          x_TD[None, :, None], jnp.asarray(positions_T)[None], theta=theta,
          scaling=scaling,
      )
  )[0, :, 0]


def far_positions():
  """Near 0, near every power of 2 up to 2²², and at random between."""
  near = [2**k + d for k in range(4, 23) for d in (-2, -1, 0)]
  between = np.random.default_rng(0).integers(0, FAR, 1000)
  return np.concatenate([np.arange(64), near, between]).astype(np.int32)


def right_angles(positions, inverse_H):
  """A product of 23 and 24 bits is exact in float64."""
  assert inverse_H.dtype == np.float32
  return np.asarray(positions, np.float64)[..., None] * inverse_H


def turned_by(x_GTND, positions_GT, theta, scaling=None, dim=None):
  """`rope.rotate` in float64, from the float32 frequencies alone."""
  x_GTND = np.asarray(x_GTND, np.float64)
  dim = dim or x_GTND.shape[-1]
  inverse_H, factor = rope.frequencies(dim, theta, scaling)
  angle_GT1H = right_angles(positions_GT, inverse_H)[:, :, None]
  cos, sin = factor * np.cos(angle_GT1H), factor * np.sin(angle_GT1H)
  first, second = np.split(x_GTND[..., :dim], 2, axis=-1)
  return np.concatenate([
      first * cos - second * sin, second * cos + first * sin,
      x_GTND[..., dim:],
  ], axis=-1)


SCALINGS = {
    "none": (1e4, None),
    "none, local": (50.0, None),
    "linear": (1e6, config_lib.LinearScaling(8.0)),
    "llama3": (5e5, config_lib.Llama3Scaling(8.0, 1.0, 4.0, 8192)),
    "yarn": (1e6, config_lib.YarnScaling(4.0, 32_768)),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_are_exact_at_any_position_up_to_four_million(name):
  head_dim, (theta, scaling) = 128, SCALINGS[name]
  positions_T = far_positions()
  inverse_H, factor = rope.frequencies(head_dim, theta, scaling)
  x_TD = np.zeros((len(positions_T), head_dim), np.float32)
  x_TD[:, : head_dim // 2] = 1  # turns into (cos, sin)
  angle_TH = right_angles(positions_T, inverse_H)
  right = np.concatenate([np.cos(angle_TH), np.sin(angle_TH)], axis=1)
  for sign in (1, -1):  # position −1 is that before 0
    turned = rotate(jnp.asarray(x_TD), sign * positions_T, theta, scaling)
    cos_TH, sin_TH = np.split(turned / factor, 2, axis=1)
    found = np.concatenate([cos_TH, sign * sin_TH], axis=1)
    assert np.max(np.abs(found - right)) < 1e-6
  # The product of a position and a frequency in float32.
  faulty_TH = np.float32(positions_T)[:, None] * inverse_H
  faulty_TH = np.cos(faulty_TH.astype(np.float64))
  assert np.max(np.abs(faulty_TH - np.cos(angle_TH))) > 0.01


def test_float64_uses_the_same_frequencies_with_more_digits(x64):
  positions_T = far_positions()
  inverse_H, _ = rope.frequencies(64, 1e6, None)
  x_TD = np.zeros((len(positions_T), 64))
  x_TD[:, :32] = 1
  angle_TH = right_angles(positions_T, inverse_H)
  right = np.concatenate([np.cos(angle_TH), np.sin(angle_TH)], axis=1)
  turned = rotate(jnp.asarray(x_TD), positions_T, 1e6)
  assert np.max(np.abs(turned - right)) < 2e-12


def random(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", (
    "llama", "qwen3.5", "gemma3", "mistral", "linear", "llama3", "yarn",
))
def test_attention_layers_turn_far_positions_exactly(name):
  """Each kind of layer of a model, with its own base and scaling."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES[name], qk_norm=False, score_divisor=None
  )
  at_GT = far_positions()[None]
  for kind in set(config.layer_pattern) - {"delta"}:
    theta, scaling = kinds.of(config, kind).rope
    q_NA = random(at_GT.size, config.num_heads * config.head_dim)
    k_NA = random(at_GT.size, config.num_kv_heads * config.head_dim)
    rotate = kinds.of(config, kind).mix()
    found = rotate.apply({}, q_NA, k_NA, k_NA, at_GT)
    for x_NA, found_KGRTD in (
        (q_NA, found[0]), (k_NA, found[1][:, :, None])
    ):
      right_GTND = turned_by(
          x_NA.reshape(*at_GT.shape, -1, config.head_dim), at_GT, theta,
          scaling, config.rotary_dim,
      )
      found_GTND = np.asarray(found_KGRTD).transpose(1, 3, 0, 2, 4).reshape(
          right_GTND.shape
      )
      size = np.abs(x_NA).max()
      assert np.max(np.abs(found_GTND - right_GTND)) < 1.5e-6 * size, kind


def test_latent_layers_turn_far_positions_exactly():
  config = tiny.ARCHITECTURES["deepseek"]
  latent, at_GT = config.latent, far_positions()[None]
  heads, turned = config.num_heads, latent.rope_dim
  query = random(at_GT.size, heads * latent.query_dim)
  slots = random(at_GT.size, latent.slot)
  params = {
      "key_up": jnp.zeros((heads, latent.nope_dim, latent.rank)),
      "latent_norm": {"scale": jnp.ones(latent.rank)},
  }
  q_1GNTE, k_1GTE, _ = latent_layers.LatentRotate(config).apply(
      {"params": params}, query, slots, at_GT
  )
  shape = *at_GT.shape, -1
  of_queries = rope.score_factor(config.rope_scaling) * (
      latent.slot / latent.query_dim
  ) ** 0.5
  for found_GTND, x_GTND, factor in (
      (
          q_1GNTE[0].transpose(0, 2, 1, 3),
          query.reshape(*shape, latent.query_dim), of_queries,
      ),
      (k_1GTE[0][:, :, None], slots.reshape(*shape, latent.slot), 1),
  ):
    right_GTND = factor * turned_by(
        x_GTND.reshape(*at_GT.shape, -1, x_GTND.shape[-1])[..., -turned:],
        at_GT, config.rope_theta, config.rope_scaling,
    )
    error = np.abs(np.asarray(found_GTND)[..., -turned:] - right_GTND)
    assert np.max(error) < 1.5e-6 * np.abs(right_GTND).max()


def test_new_tokens_behind_four_million_are_turned_exactly():
  """Decoding counts from the length of the prefix; a window has no more."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES["gemma3"], qk_norm=False, score_divisor=None,
      max_positions=FAR
  )
  slots_GT, length = jnp.arange(6)[None], FAR - 6
  mixed = [
      random(6, heads * config.head_dim)
      for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
  ]
  window = kinds.of(config, "sliding")
  stack = window.empty(1, sizes.Sizes(16, 16))
  _, (k_LKGSD, _), _ = window.decode(
      mixer.NewTokens(0, stack, length, slots_GT), {}, mixed,
      window.cache(1, 1, 6, stack),
  )
  right_GTKD = turned_by(
      mixed[1].reshape(1, 6, config.num_kv_heads, -1), length + slots_GT,
      config.rope_theta_local,
  )
  error = np.abs(np.asarray(k_LKGSD[0]).transpose(1, 2, 0, 3) - right_GTKD)
  assert np.max(error) < 1.5e-6 * np.abs(right_GTKD).max()


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
      rtol=1e-7,  # the frequency is the float32 next to 0.1
  )
  angle = 2 * float(np.float32(0.1))
  np.testing.assert_allclose(
      turned[0], [math.cos(2), -math.sin(angle), math.sin(2), math.cos(angle)],
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
  assert plain.dtype == np.float32
  np.testing.assert_array_equal(plain, np.float32([1, 0.1, 0.01, 0.001]))
  scaled, factor = rope.frequencies(8, 1e4, config_lib.LinearScaling(4.0))
  np.testing.assert_array_equal(scaled, plain / 4)
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
      rtol=2e-7,
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
      scaled, plain * (1 - share + share / 4), rtol=5e-7
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
