# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Short convolution and gated delta rule, in blocks or token by token.

  Sₜ = αₜ Sₜ₋₁ + kₜ uₜᵀ,   uₜ = βₜ (vₜ − αₜ Sₜ₋₁ᵀ kₜ),   oₜ = Sₜᵀ qₜ / √D

for every value head. Later tokens need only S, [D, E], and the last inputs of
the convolution. For a block of positions after S₀, with γₜ = α₁ ⋯ αₜ, the u are
the solution of a unit lower-triangular system,

  uₜ + βₜ Σ_{s<t} (γₜ/γₛ)(kₜ·kₛ) uₛ = βₜ vₜ − βₜ γₜ S₀ᵀ kₜ,

and outputs and the next block's S₀ are matrix products:

  oₜ = γₜ S₀ᵀ qₜ + Σ_{s≤t} (γₜ/γₛ)(qₜ·kₛ) uₛ.

Gradients are by autodiff; for these, the recurrence between blocks keeps one S
for each block.

Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.
"""

from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops.attention import tiling

BLOCK = 64
_ELIMINATED = 16  # largest system that is inverted row by row
_EPSILON = 1e-6  # ε of the norms of queries and keys


class Parameters(NamedTuple):
  """Parameters of the convolution and of the decay.

  Attributes:
    filter_KXW: weights of the convolution, that of the latest input last.
    log_rate_KR: log of the decay rate.
    rate_bias_KR: bias added to the token's own speed of decay.
  """

  filter_KXW: jax.Array
  log_rate_KR: jax.Array
  rate_bias_KR: jax.Array


class _DeltaInputs(NamedTuple):
  """What the recurrence reads, at least float32."""

  q_GTKD: jax.Array
  k_GTKD: jax.Array
  v_GTKRE: jax.Array
  log_decay_GTKR: jax.Array
  beta_GTKR: jax.Array


def mix(
    params: Parameters, channels_GTKX, rates_GTKR, matrix_GKRDE, last_GKWX,
    lengths_G=None, *, key_dim: int,
):
  """Convolution, gates and recurrence of a segment.

  The reference is `gated_delta_reference.mix`.

  Args:
    params: parameters, for K key heads with R value heads each.
    channels_GTKX: queries, keys and values of each key head before the
      convolution: D + D + R·E numbers.
    rates_GTKR: projections of the R writing strengths, then of the R speeds of
      decay.
    matrix_GKRDE: S before the segment, at least float32.
    last_GKWX: the W − 1 inputs of the convolution before the segment.
    lengths_G: i32, real tokens of each row; the others change neither S nor the
      inputs that are returned. None for all.
    key_dim: D.

  Returns:
    out_GTKRE in the dtype of the channels, and matrix_GKRDE and last_GKWX after
    the last real token.
  """
  tokens = channels_GTKX.shape[1]
  seen_GTKX = jnp.concatenate(
      [last_GKWX.swapaxes(1, 2).astype(channels_GTKX.dtype), channels_GTKX],
      axis=1,
  )
  inputs = _inputs(params, seen_GTKX, rates_GTKR, key_dim)
  width = params.filter_KXW.shape[-1] - 1
  if lengths_G is None:
    last_GWKX = seen_GTKX[:, tokens:]
  else:
    real_GT = jnp.arange(tokens)[None] < lengths_G[:, None]
    inputs = inputs._replace(**{
        name: jnp.where(real_GT[..., None, None], getattr(inputs, name), 0)
        for name in ("log_decay_GTKR", "beta_GTKR")
    })
    last_GWKX = jax.vmap(
        lambda x, start: lax.dynamic_slice_in_dim(x, start, width, axis=0)
    )(seen_GTKX, lengths_G)
  out_GTKRE, matrix_GKRDE = _blocks(inputs, matrix_GKRDE)
  out_GTKRE = out_GTKRE.astype(channels_GTKX.dtype)
  return out_GTKRE, matrix_GKRDE, last_GWKX.swapaxes(1, 2)


def step(
    params: Parameters, channels_GTKX, rates_GTKR, matrix_GKRDE, last_GKWX, *,
    key_dim: int,
):
  """`mix` of one token, without blocks."""
  chex.assert_axis_dimension(channels_GTKX, 1, 1)
  seen_GTKX = jnp.concatenate(
      [last_GKWX.swapaxes(1, 2), channels_GTKX], axis=1
  )
  q_GKD, k_GKD, v_GKRE, log_decay_GKR, beta_GKR = (
      x[:, 0] for x in _inputs(params, seen_GTKX, rates_GTKR, key_dim)
  )
  matrix_GKRDE *= jnp.exp(log_decay_GKR)[..., None, None]
  held_GKRE = jnp.einsum("gkrde,gkd->gkre", matrix_GKRDE, k_GKD)
  u_GKRE = beta_GKR[..., None] * (v_GKRE - held_GKRE)
  matrix_GKRDE += k_GKD[:, :, None, :, None] * u_GKRE[..., None, :]
  out_GKRE = jnp.einsum("gkrde,gkd->gkre", matrix_GKRDE, q_GKD)
  out_GTKRE = out_GKRE[:, None].astype(channels_GTKX.dtype)
  return out_GTKRE, matrix_GKRDE, seen_GTKX[:, 1:].swapaxes(1, 2)


def _inputs(params: Parameters, seen_GTKX, rates_GTKR, key_dim) -> _DeltaInputs:
  """Inputs of the recurrence for T tokens, from T + W − 1 channels."""
  tokens, repeats = rates_GTKR.shape[1], params.log_rate_KR.shape[1]
  wide = config_lib.at_least_float32(seen_GTKX.dtype)
  filter_KXW = params.filter_KXW.astype(wide)
  mixed_GTKX = jax.nn.silu(sum(
      seen_GTKX[:, at : at + tokens].astype(wide) * filter_KXW[
          None, None, ..., at
      ]
      for at in range(filter_KXW.shape[-1])
  ))
  q_GTKD, k_GTKD, v_GTKX = jnp.split(mixed_GTKX, [key_dim, 2 * key_dim], -1)
  strength_GTKR, speed_GTKR = jnp.split(rates_GTKR.astype(wide), 2, axis=-1)
  rate_KR = jnp.exp(params.log_rate_KR.astype(wide))
  speed_GTKR += params.rate_bias_KR.astype(wide)[None, None]
  return _DeltaInputs(
      _unit(q_GTKD) * key_dim**-0.5,
      _unit(k_GTKD),
      v_GTKX.reshape(*v_GTKX.shape[:3], repeats, -1),
      -rate_KR[None, None] * jax.nn.softplus(speed_GTKR),
      jax.nn.sigmoid(strength_GTKR),
  )


def _unit(x):
  """x / √(x·x + ε): at 0 its gradient is finite, 1/√ε."""
  return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + _EPSILON)


def _blocks(inputs: _DeltaInputs, matrix_GKRDE):
  """(out_GTKRE, S after the last token), block by block."""
  tokens = inputs.q_GTKD.shape[1]
  cut = tiling.even(tokens, BLOCK)

  def blocks(x_GTK):  # [N, G, K, B, ...]: a padded token has β = 0 and α = 1
    x_GTK = tiling.pad(x_GTK, 1, cut.padded)
    shape = x_GTK.shape[0], cut.count, cut.size, *x_GTK.shape[2:]
    return jnp.moveaxis(x_GTK.reshape(shape), (1, 2), (0, 3))

  q_NGKBD, k_NGKBD = blocks(inputs.q_GTKD), blocks(inputs.k_GTKD)
  v_NGKRBE = jnp.moveaxis(blocks(inputs.v_GTKRE), 3, 4)
  log_decay, beta = (
      jnp.moveaxis(blocks(x), 3, 4)
      for x in (inputs.log_decay_GTKR, inputs.beta_GTKR)
  )
  total_NGKRB = jnp.cumsum(log_decay, axis=-1)
  lower = jnp.tril(jnp.ones((cut.size, cut.size), bool))
  # Masked before exp, which would overflow above the diagonal.
  between = total_NGKRB[..., :, None] - total_NGKRB[..., None, :]
  decay = jnp.exp(jnp.where(_like(lower, between), between, -jnp.inf))

  def products(a, b):
    return jnp.einsum("ngktd,ngksd->ngkts", a, b)[:, :, :, None] * decay

  strictly = _like(jnp.tril(lower, -1), decay)
  system = jnp.where(
      strictly, beta[..., None] * products(k_NGKBD, k_NGKBD), 0
  )
  keys = beta[..., None] * (
      jnp.exp(total_NGKRB)[..., None] * k_NGKBD[:, :, :, None]
  )
  values = beta[..., None] * v_NGKRBE
  solved = _solve(system, jnp.concatenate([keys, values], axis=-1))
  keys, values = jnp.split(solved, [keys.shape[-1]], axis=-1)
  to_end_NGKRB = jnp.exp(total_NGKRB[..., -1:] - total_NGKRB)

  def block(matrix_GKRDE, inputs):
    q_GKBD, k_GKBD, scores, keys, values, total_GKRB, to_end_GKRB = inputs
    u_GKRBE = values - jnp.einsum("gkrtd,gkrde->gkrte", keys, matrix_GKRDE)
    out_GKRBE = jnp.exp(total_GKRB)[..., None] * jnp.einsum(
        "gktd,gkrde->gkrte", q_GKBD, matrix_GKRDE
    ) + jnp.einsum("gkrts,gkrse->gkrte", scores, u_GKRBE)
    matrix_GKRDE = jnp.exp(total_GKRB[..., -1])[..., None, None] * (
        matrix_GKRDE
    ) + jnp.einsum(
        "gktd,gkrte->gkrde", k_GKBD, to_end_GKRB[..., None] * u_GKRBE
    )
    return matrix_GKRDE, out_GKRBE

  matrix_GKRDE, out_NGKRBE = lax.scan(block, matrix_GKRDE, (
      q_NGKBD, k_NGKBD, products(q_NGKBD, k_NGKBD), keys, values, total_NGKRB,
      to_end_NGKRB,
  ))
  out_GNBKRE = out_NGKRBE.transpose(1, 0, 4, 2, 3, 5)
  out_GTKRE = out_GNBKRE.reshape(
      out_GNBKRE.shape[0], cut.padded, *out_GNBKRE.shape[3:]
  )
  return out_GTKRE[:, :tokens], matrix_GKRDE


@jax.custom_vjp
def _solve(system, right):
  """x of (I + system) x = right, for a strictly lower-triangular system.

  Computed by matrix products and a short elimination. A triangular solve on CPU
  is LAPACK's, whose own threads keep a core busy while they wait. Two of them
  at a time, as in JAX's derivative, may wait for a thread forever.
  """
  return _solve_forward(system, right)[0]


def _solve_forward(system, right):
  inverse = _inverse(system)
  solved = _matmul(inverse, right)
  return solved, (inverse, solved)


def _solve_backward(kept, d_solved):
  inverse, solved = kept
  d_right = _matmul(inverse.swapaxes(-1, -2), d_solved)
  return -_matmul(d_right, solved.swapaxes(-1, -2)), d_right


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(system):
  """(I + system)⁻¹, [..., B, B], by halves that are inverted as one batch.

    [A    ]⁻¹   [A⁻¹          ]
    [C   D]   = [−D⁻¹CA⁻¹  D⁻¹]
  """
  size = system.shape[-1]
  if size <= _ELIMINATED:
    return _eliminated(system)
  if size % 2:
    padding = [(0, 0)] * (system.ndim - 2) + [(0, 1)] * 2
    return _inverse(jnp.pad(system, padding))[..., :size, :size]
  half = size // 2
  upper, lower = _inverse(jnp.stack(
      [system[..., :half, :half], system[..., half:, half:]]
  ))
  corner = -_matmul(_matmul(lower, system[..., half:, :half]), upper)
  return jnp.concatenate([
      jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
      jnp.concatenate([corner, lower], axis=-1),
  ], axis=-2)


def _eliminated(system):
  """The same by elimination, row by row."""
  size = system.shape[-1]

  def take_off(row, inverse):
    column = lax.dynamic_slice_in_dim(system, row, 1, axis=-1)
    done = lax.dynamic_slice_in_dim(inverse, row, 1, axis=-2)
    return inverse - column * done

  identity = jnp.broadcast_to(jnp.eye(size, dtype=system.dtype), system.shape)
  return lax.fori_loop(0, size - 1, take_off, identity)


def _matmul(a, b):
  """A matrix product in full precision, also on accelerators."""
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _like(x_BB, to):
  return x_BB.reshape((1,) * (to.ndim - 2) + x_BB.shape)
