# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The stages of a latent attention layer that attention layers do not have.

A token leaves behind one vector for all heads: a latent c of C numbers and a
rotated key r of D_r numbers. The key of head h is (K_h c, r) and its value V_h
c. For a query (n, s) the score is n·K_h c + s·r = (K_hᵀ n, s)·(c, r). So the
queries are multiplied by K_hᵀ and attend to (c, r) as one shared head, and
values are computed from the attended latent:

  out_h = V_h Σ p c,    p = softmax((K_hᵀ n, s)·(c, r) / √(D_n + D_r)).

Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.models import layers
from branch_replay.ops import rope


class LatentProject(nn.Module):
  """x_GTM ↦ queries (or their latent), and the shared latent."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM):
    config, latent = self.config, self.config.latent
    normed_NM = layers.rows(layers.norm(config, "norm")(x_GTM))
    queries = latent.query_rank or config.num_heads * latent.query_dim
    return (
        layers.linear(config, queries, "query")(normed_NM),
        layers.linear(config, latent.slot, "latent")(normed_NM),
    )


def _norm(config, name):
  """The norm of a latent vector, whose ε may be of its own."""
  eps = config.latent.norm_eps
  return layers.norm(
      config if eps is None else dataclasses.replace(config, norm_eps=eps), name
  )


class LatentRotate(nn.Module):
  """Projections ↦ what attention reads: q [1, G, heads, T, C + D_r], (c, r)."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, query, latent_NX, positions_GT):
    config, latent = self.config, self.config.latent
    heads, rank = config.num_heads, latent.rank
    if latent.query_rank:
      normed = _norm(config, "query_norm")(query)
      width = heads * latent.query_dim
      query = layers.linear(config, width, "query_up")(normed)
    key_up_HDC = self.param(
        "key_up", nn.initializers.normal(rank**-0.5),
        (heads, latent.nope_dim, rank), config.param_dtype,
    ).astype(config.compute_dtype)
    shape = positions_GT.shape
    q_GTND = query.reshape(*shape, heads, latent.query_dim)
    nope_GTND, turned_GTND = jnp.split(q_GTND, [latent.nope_dim], axis=-1)
    c_NC, key_ND = jnp.split(latent_NX, [rank], axis=-1)
    c_GTC = _norm(config, "latent_norm")(c_NC).reshape(*shape, rank)

    def turn(x_GTND):
      return rope.rotate(
          x_GTND, positions_GT, theta=config.rope_theta,
          scaling=config.rope_scaling,
      )

    turned_GTND = turn(turned_GTND)
    r_GTD = turn(key_ND.reshape(*shape, 1, latent.rope_dim))[:, :, 0]
    left_GTC = jnp.einsum("gtnd,ndc->gtnc", nope_GTND, key_up_HDC)
    slots = jnp.concatenate([c_GTC, r_GTD], axis=-1)[None]
    q = jnp.concatenate([left_GTC, turned_GTND], axis=-1)
    # Attention divides scores by the root of the size of c and r together. In
    # bfloat16 this correction would be rounded, and change all scores.
    factor = rope.score_factor(config.rope_scaling) * (
        latent.slot / latent.query_dim
    ) ** 0.5
    wide = config_lib.at_least_float32(q.dtype)
    q = (q.astype(wide) * factor).astype(q.dtype)
    return q.transpose(0, 2, 1, 3)[None], slots, slots


class LatentJoin(nn.Module):
  """Residual stream plus the projection of the values of attended latents."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM, out_KGRTD):
    config, latent = self.config, self.config.latent
    value_up = self.param(
        "value_up", nn.initializers.normal(latent.rank**-0.5),
        (config.num_heads, latent.rank, latent.value_dim), config.param_dtype,
    ).astype(config.compute_dtype)
    attended = out_KGRTD[0, ..., : latent.rank]
    values = jnp.einsum("gntc,nce->gtne", attended, value_up)
    flat = values.reshape(x_GTM.shape[0] * x_GTM.shape[1], -1)
    joined_NM = layers.linear(config, config.width, "output")(flat)
    return layers.added(config, x_GTM, joined_NM)
