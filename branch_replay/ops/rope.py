# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding with the published long-context scalings.

At position 2²² the rounding error of a float32 angle is a quarter of a radian.
So angles are not computed as float32 products. A frequency is stored in turns,
as an integer with 64 bits behind the point, and multiplied by the position in
integer arithmetic, in which whole turns drop out.
"""

import fractions
import math

import chex
from jax import lax
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib

# 1/2π in units of 2⁻¹²⁸.
_TURNS_A_RADIAN = 0x28BE60DB9391054A7F09D5F47D4D3770
_HALF = 16  # bits
_LOW_HALF = np.uint32((1 << _HALF) - 1)


def frequencies(
    head_dim: int, theta: float, scaling: config_lib.RopeScaling | None
) -> tuple[np.ndarray, float]:
  """Inverse frequencies, and the factor on cos and sin.

  θᵢ = theta^(−2i/head_dim), then scaled as the scaling's paper says. The
  computation follows transformers, in the same order and with a rounding to
  float32 after every step, because models were trained with these rounded
  frequencies, which matters at large positions. (Of the powers that torch's
  vector instructions compute, one in a hundred is rounded the other way, and
  not the same ones on every processor.)

  Args:
    head_dim: D, even.
    theta: base.
    scaling: one of the scalings of `config`, or None.

  Returns:
    float32 [D/2] in radians per position, and the attention factor (1 unless
    YaRN).
  """
  exponent_H = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(
      head_dim
  )
  base = np.float64(np.float32(theta))
  power_H = (base ** exponent_H.astype(np.float64)).astype(np.float32)
  inverse_H = 1 / power_H
  match scaling:
    case None:
      return inverse_H, 1.0
    case config_lib.LinearScaling():
      return inverse_H / np.float32(scaling.factor), 1.0
    case config_lib.Llama3Scaling():
      return _llama3(inverse_H, scaling), 1.0
    case config_lib.YarnScaling():
      return _yarn(power_H, head_dim, theta, scaling)
    case _:
      raise ValueError(f"Unknown RoPE scaling {scaling!r}.")


# Below, Python numbers are rounded to float32 where they meet an array, and a
# number divided by an array is the number times reciprocals, as in torch.


def _llama3(inverse_H, scaling):
  factor, original = scaling.factor, scaling.original_max_positions
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  wavelength_H = (1 / inverse_H) * (2 * math.pi)
  slow_H, fast_H = (
      wavelength_H > original / low, wavelength_H < original / high
  )
  inverse_H = np.where(slow_H, inverse_H / factor, inverse_H)
  # 0 where fewer than `low` turns fit the original context, 1 above `high`.
  keep_H = ((1 / wavelength_H) * original - low) / (high - low)
  blend_H = (1 - keep_H) * inverse_H / factor + keep_H * inverse_H
  return np.where(slow_H | fast_H, inverse_H, blend_H)


def _yarn(power_H, head_dim, theta, scaling):
  def index_of(turns):
    span = scaling.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(span) / (2 * math.log(theta))

  low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  if low == high:
    high += 0.001
  index_H = np.arange(head_dim // 2, dtype=np.float32)
  keep_H = 1 - np.clip((index_H - low) / (high - low), 0, 1)
  stretched_H = 1 / (scaling.factor * power_H)
  inverse_H = stretched_H * (1 - keep_H) + (1 / power_H) * keep_H
  return inverse_H, _yarn_attention_factor(scaling)


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
  """Factor on the scores of latent layers; 1 unless YaRN sets it.

  Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
  """
  if not isinstance(scaling, config_lib.YarnScaling):
    return 1.0
  if not scaling.mscale_all_dim:
    return 1.0
  return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def angles(positions_GT, inverse_H, dtype):
  """position · frequency without whole turns, in [−π, π) radians, [G, T, D/2].

  The error is that of the conversion to the result's dtype and 2⁻⁶⁵ turns per
  position, at any i32 position.

  Args:
    positions_GT: i32.
    inverse_H: frequencies of `frequencies`, a constant.
    dtype: dtype of the result, at least float32.
  """
  # Turns per position in units of 2⁻⁶⁴, as two words.
  scale = fractions.Fraction(_TURNS_A_RADIAN, 1 << 64)
  turns = [
      round(fractions.Fraction(float(x)) * scale) % (1 << 64)
      for x in inverse_H
  ]
  high_11H, low_11H = (
      np.array([word(x) for x in turns], np.uint32)[None, None]
      for word in (lambda x: x >> 32, lambda x: x & 0xFFFFFFFF)
  )
  at_GT1 = positions_GT[..., None]
  word_GT1 = at_GT1.astype(jnp.uint32)
  # The high word of the product modulo 2⁶⁴: turns in units of 2⁻³².
  high_GTH = word_GT1 * high_11H + _high_word(word_GT1, low_11H)
  # As an unsigned word a negative position is too large by 2³².
  high_GTH -= jnp.where(at_GT1 < 0, low_11H, np.uint32(0))
  signed_GTH = lax.bitcast_convert_type(high_GTH, jnp.int32).astype(dtype)
  if dtype == jnp.float64:  # float64 has room for the low word too
    signed_GTH += (word_GT1 * low_11H).astype(dtype) * 2.0**-32
  return signed_GTH * np.asarray(2 * math.pi * 2.0**-32, dtype)


def _high_word(a, b):
  """⌊a b / 2³²⌋ of u32 numbers, by halves, of which no sum overflows."""
  high_a, low_a = a >> _HALF, a & _LOW_HALF
  high_b, low_b = b >> _HALF, b & _LOW_HALF
  first = high_a * low_b + ((low_a * low_b) >> _HALF)
  second = low_a * high_b + (first & _LOW_HALF)
  return high_a * high_b + (first >> _HALF) + (second >> _HALF)


def rotate(
    x_GTND, positions_GT, *, theta: float, scaling=None, dim: int | None = None
):
  """Rotates the two halves of each head by position · frequency.

  (x₁, x₂) ↦ (x₁ cos φ − x₂ sin φ, x₂ cos φ + x₁ sin φ), φ = tθᵢ, where x₁ and
  x₂ are the first and second half of the head, as in Hugging Face models. In
  float32 and narrower dtypes cos and sin are within 10⁻⁶ of those of the
  frequencies in exact arithmetic, at any position; see `angles`.

  Args:
    x_GTND: branches, tokens, heads, head_dim.
    positions_GT: i32 absolute positions.
    theta: base.
    scaling: see `frequencies`.
    dim: only the first `dim` numbers of a head are rotated, as if they were the
      whole head; None for all.

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
  angle_GTH = angles(positions_GT, inverse_H, dtype)
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
