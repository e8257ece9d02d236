# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding with the published long-context scalings."""

import math

import chex
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib


def frequencies(
    head_dim: int, theta: float, scaling: config_lib.RopeScaling | None
) -> tuple[np.ndarray, float]:
  """Inverse frequencies and the factor on cos and sin.

  θᵢ = theta^(−2i/head_dim), then scaled as the scaling's paper says.

  Args:
    head_dim: D, even.
    theta: base.
    scaling: one of the classes in `config`, or None.

  Returns:
    float64 [D/2] radians per position, and the attention factor (1 unless
    YaRN).
  """
  exponent_H = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
  inverse_H = theta**-exponent_H
  match scaling:
    case None:
      return inverse_H, 1.0
    case config_lib.LinearScaling():
      return inverse_H / scaling.factor, 1.0
    case config_lib.Llama3Scaling():
      return _llama3(inverse_H, scaling), 1.0
    case config_lib.YarnScaling():
      return _yarn(inverse_H, head_dim, theta, scaling)
    case _:
      raise ValueError(f"Unknown RoPE scaling {scaling!r}.")


def _llama3(inverse_H, scaling):
  turns_H = scaling.original_max_positions * inverse_H / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  # 0 where fewer than `low` turns fit the original context, 1 above `high`.
  keep_H = np.clip((turns_H - low) / (high - low), 0.0, 1.0)
  return inverse_H * (keep_H + (1 - keep_H) / scaling.factor)


def _yarn(inverse_H, head_dim, theta, scaling):
  def index_of(turns):
    span = scaling.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(span) / (2 * math.log(theta))

  low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  width = max(high - low, 1e-3)
  interpolate_H = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
  scaled_H = inverse_H * (1 - interpolate_H + interpolate_H / scaling.factor)
  return scaled_H, _yarn_attention_factor(scaling)


def _temperature(factor, mscale):
  if factor <= 1:
    return 1.0
  return 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(scaling):
  factor = scaling.factor
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  if scaling.mscale and scaling.mscale_all_dim:
    of_all = _temperature(factor, scaling.mscale_all_dim)
    return _temperature(factor, scaling.mscale) / of_all
  return _temperature(factor, 1.0)


def score_factor(scaling: config_lib.RopeScaling | None) -> float:
  """What latent layers multiply their scores by; 1 unless YaRN says so.

  Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
  """
  if not isinstance(scaling, config_lib.YarnScaling):
    return 1.0
  if not scaling.mscale_all_dim:
    return 1.0
  return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def rotate(
    x_GTND, positions_GT, *, theta: float, scaling=None, dim: int | None = None
):
  """Rotates each head's two halves by position · frequency.

  (x₁, x₂) ↦ (x₁ cos φ − x₂ sin φ, x₂ cos φ + x₁ sin φ), φ = tθᵢ, where x₁ and
  x₂ are the first and second half of the head (the Hugging Face layout).
  Angles are taken in at least float32: in bfloat16 position 257 is 256.

  Args:
    x_GTND: branches, tokens, heads, head_dim.
    positions_GT: i32 absolute positions.
    theta: base.
    scaling: see `frequencies`.
    dim: how many of a head's numbers are rotated, the first ones, as if they
      were the head; None for all.

  Returns:
    Like x_GTND, in its dtype.

  Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
  """
  chex.assert_rank([x_GTND, positions_GT], [4, 2])
  if dim is not None:
    turned, rest = jnp.split(x_GTND, [dim], axis=-1)
    turned = rotate(turned, positions_GT, theta=theta, scaling=scaling)
    return jnp.concatenate([turned, rest], axis=-1)
  dtype = config_lib.at_least_float32(x_GTND.dtype)
  inverse_H, factor = frequencies(x_GTND.shape[-1], theta, scaling)
  inverse_GTH = jnp.asarray(inverse_H, dtype)[None, None]
  angle_GTH = positions_GT[..., None].astype(dtype) * inverse_GTH
  cos_GTNH = (jnp.cos(angle_GTH) * factor)[:, :, None, :]
  sin_GTNH = (jnp.sin(angle_GTH) * factor)[:, :, None, :]
  first, second = jnp.split(x_GTND.astype(dtype), 2, axis=-1)
  turned = jnp.concatenate(
      [
          first * cos_GTNH - second * sin_GTNH,
          second * cos_GTNH + first * sin_GTNH,
      ],
      axis=-1,
  )
  return turned.astype(x_GTND.dtype)
