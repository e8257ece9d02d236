# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readable gated delta rule: token by token, with ordinary autodiff.

`gated_delta` is tested against it, forward and backward.
"""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops import gated_delta


def mix(
    params: gated_delta.Parameters, channels_GTKX, rates_GTKR, matrix_GKRDE,
    last_GKWX, *, key_dim: int,
):
  """Short convolution and gated delta rule; arguments as `gated_delta.mix`.

  With q, k, v from the convolution, αₜ the decay and βₜ the writing strength,

    Sₜ = αₜ Sₜ₋₁ + βₜ kₜ (vₜ − αₜ Sₜ₋₁ᵀ kₜ)ᵀ,    oₜ = Sₜᵀ qₜ / √D.

  Returns:
    out_GTKRE in the dtype of the channels, and matrix_GKRDE and last_GKWX after
    the last token.

  Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.
  """
  dtype = channels_GTKX.dtype
  wide = config_lib.at_least_float32(dtype)
  repeats = params.log_rate_KR.shape[1]
  filter_KXW, log_rate_KR, rate_bias_KR = (x.astype(wide) for x in params)

  def token(carry, inputs):
    matrix_GKRDE, last_GKWX = carry
    channels_GKX, rates_GKR = inputs
    seen_GKWX = jnp.concatenate(
        [last_GKWX, channels_GKX[:, :, None]], axis=2
    )
    mixed_GKX = jax.nn.silu(
        jnp.einsum("gkwx,kxw->gkx", seen_GKWX.astype(wide), filter_KXW)
    )
    q_GKD, k_GKD, v_GKX = jnp.split(mixed_GKX, [key_dim, 2 * key_dim], -1)
    v_GKRE = v_GKX.reshape(*v_GKX.shape[:2], repeats, -1)

    def unit(x):
      squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
      return x / jnp.sqrt(squares + 1e-6)

    q_GKD, k_GKD = unit(q_GKD) / key_dim**0.5, unit(k_GKD)
    strength, speed = jnp.split(rates_GKR.astype(wide), 2, axis=-1)
    beta_GKR = jax.nn.sigmoid(strength)
    speed_GKR = jax.nn.softplus(speed + rate_bias_KR[None])
    decay_GKR = jnp.exp(-jnp.exp(log_rate_KR)[None] * speed_GKR)
    matrix_GKRDE = matrix_GKRDE * decay_GKR[..., None, None]
    held_GKRE = jnp.einsum("gkrde,gkd->gkre", matrix_GKRDE, k_GKD)
    written_GKRE = beta_GKR[..., None] * (v_GKRE - held_GKRE)
    matrix_GKRDE += jnp.einsum("gkd,gkre->gkrde", k_GKD, written_GKRE)
    out_GKRE = jnp.einsum("gkrde,gkd->gkre", matrix_GKRDE, q_GKD)
    return (matrix_GKRDE, seen_GKWX[:, :, 1:]), out_GKRE.astype(dtype)

  inputs = channels_GTKX.swapaxes(0, 1), rates_GTKR.swapaxes(0, 1)
  (matrix_GKRDE, last_GKWX), out_TGKRE = lax.scan(
      token, (matrix_GKRDE.astype(wide), last_GKWX), inputs
  )
  return out_TGKRE.swapaxes(0, 1), matrix_GKRDE, last_GKWX
