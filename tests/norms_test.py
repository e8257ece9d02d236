# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Scales of norms against numbers by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.models import delta_layers
from branch_replay.models import layers
from tests import tiny

WIDTH = 64


def normed(x_NM, epsilon=1e-6):
  """x / √(mean(x²) + ε) in float64."""
  x_NM = np.asarray(x_NM, np.float64)
  return x_NM / np.sqrt(np.mean(x_NM**2, axis=1, keepdims=True) + epsilon)


def inputs(dtype=jnp.bfloat16):
  random = np.random.default_rng(0).normal(size=(256, WIDTH))
  return jnp.asarray(random, dtype)


@pytest.mark.parametrize("from_one", (False, True))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_scales_next_to_1_count_in_bfloat16(from_one, dtype):
  """Rounded to bfloat16 first, a scale of 1.003 is 1."""
  x_NM, w = inputs(), np.float64(jnp.asarray(0.003, dtype))
  if not from_one:
    w = np.float64(jnp.asarray(1.003, dtype)) - 1
  norm = layers.RMSNorm(1e-6, "float32", from_one)
  param = jnp.full(WIDTH, w if from_one else 1 + w, dtype)
  found = norm.apply({"params": {"scale": param}}, x_NM)
  assert found.dtype == jnp.bfloat16
  # Its own rounding, 2⁻⁸ at most, averages out over so many numbers.
  found, unscaled = np.asarray(found, np.float64), normed(x_NM)
  scale = np.sum(found * unscaled) / np.sum(unscaled**2)
  assert scale == pytest.approx(1 + w, abs=3e-4)
  # Rounded once: no number is further than half of its last digit.
  right = (1 + w) * unscaled
  assert np.max(np.abs(found / right - 1)) < 2**-7.99


def test_a_norm_from_one_starts_as_a_norm_of_scale_one():
  x_NM = inputs(jnp.float32)
  norm = layers.RMSNorm(1e-6, "float32", from_one=True)
  params = norm.init(jax.random.key(0), x_NM)
  np.testing.assert_array_equal(params["params"]["scale"], np.zeros(WIDTH))
  np.testing.assert_allclose(
      norm.apply(params, x_NM), normed(x_NM), rtol=1e-5
  )


@pytest.mark.exhaustive
def test_a_model_from_one_is_the_model_of_its_scales(x64):
  """Every norm but that inside of delta layers has its scale less 1."""
  for name in ("qwen3.5", "gemma3"):
    from_one = tiny.in_float64(tiny.ARCHITECTURES[name])
    decoder, params = tiny.model(from_one)
    plain = dataclasses.replace(from_one, norms_from_one=False)

    def scales(path, x):
      keys = [key.key for key in path]
      in_delta = keys[-3:] == ["join", "norm", "scale"]
      return x + 1 if keys[-1] == "scale" and not in_delta else x

    tokens = jnp.arange(7)[None]
    np.testing.assert_allclose(
        decoder.apply({"params": params}, tokens),
        br.Decoder(plain).apply(
            {"params": jax.tree_util.tree_map_with_path(scales, params)},
            tokens,
        ),
        rtol=1e-9, atol=1e-9,
    )


def test_the_norm_inside_of_delta_layers_has_its_scale_itself():
  config = tiny.ARCHITECTURES["qwen3.5"]
  params = delta_layers.DeltaJoin(config).init(
      jax.random.key(0), jnp.ones((1, 2, config.width)),
      jnp.ones((1, 2, 2, 2, 4)), jnp.ones((2, 16)),
  )["params"]
  np.testing.assert_array_equal(params["norm"]["scale"], np.ones(4))


def test_scores_are_divided_by_the_root_of_their_divisor():
  """The queries alone carry √(16 / 24)."""
  config = dataclasses.replace(tiny.BASE, qk_norm=True)
  divided = dataclasses.replace(config, score_divisor=24)
  x_NA = inputs(jnp.float32)[:3]
  params = {
      name: {"scale": jnp.full(16, 1.5)} for name in ("query_norm", "key_norm")
  }
  plain, scaled = (
      layers.Rotate(one).apply(
          {"params": params}, x_NA, x_NA, x_NA, jnp.arange(3)[None]
      )
      for one in (config, divided)
  )
  np.testing.assert_allclose(
      scaled[0], plain[0] * (16 / 24) ** 0.5, rtol=1e-6, atol=1e-6
  )
  np.testing.assert_array_equal(scaled[1], plain[1])


def test_a_divisor_of_scores_that_would_do_nothing_is_refused():
  for wrong in (dict(score_divisor=24), dict(score_divisor=0, qk_norm=True)):
    with pytest.raises(ValueError, match="score_divisor.*qk_norm"):
      dataclasses.replace(tiny.BASE, **wrong)
