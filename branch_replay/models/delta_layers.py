# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The stages of a gated delta layer that attention layers do not have.

A layer is project → (short convolution, gated delta rule) → join, and then the
feed-forward of any layer. As there, each stage is an elementwise prologue and
linear maps.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.models import layers
from branch_replay.ops import gated_delta
from branch_replay.ops import gated_delta_reference


class DeltaProject(nn.Module):
  """x_GTM ↦ channels, rates and output gates, [G·T, heads · numbers per head].

  Channels are queries, keys and values of each key head before the convolution;
  rates are the writing strengths and speeds of decay.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM):
    config, delta = self.config, self.config.delta
    normed_NM = layers.rows(layers.norm(config, "norm")(x_GTM))
    widths = {
        "channels": delta.key_heads * delta.channels,
        "rates": 2 * delta.value_heads,
        "output_gate": delta.value_heads * delta.value_dim,
    }
    return tuple(
        layers.linear(config, width, name)(normed_NM)
        for name, width in widths.items()
    )


class DeltaRecur(nn.Module):
  """Owns the parameters of the convolution and of the decay.

  Calling it runs the readable mixer on whole sequences.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, channels_NX, rates_NR, tokens: int):
    delta, dtype = self.config.delta, self.config.param_dtype
    heads = delta.key_heads, delta.value_heads // delta.key_heads
    params = gated_delta.Parameters(
        self.param(
            "filter", nn.initializers.normal(delta.conv_width**-0.5),
            (delta.key_heads, delta.channels, delta.conv_width), dtype,
        ),
        self.param("log_rate", _log_uniform, heads, dtype),
        self.param("rate_bias", nn.initializers.ones, heads, dtype),
    )

    def shaped(x):
      return x.reshape(-1, tokens, delta.key_heads, x.shape[-1] // heads[0])

    channels_GTKX = shaped(channels_NX)
    branches = channels_GTKX.shape[0]
    wide = config_lib.at_least_float32(channels_NX.dtype)
    out_GTKRE, _, _ = gated_delta_reference.mix(
        params, channels_GTKX, shaped(rates_NR),
        jnp.zeros((branches, *heads, delta.key_dim, delta.value_dim), wide),
        jnp.zeros(
            (branches, heads[0], delta.conv_width - 1, delta.channels),
            channels_NX.dtype,
        ),
        key_dim=delta.key_dim,
    )
    return out_GTKRE


def _log_uniform(key, shape, dtype):
  """The log of a decay rate drawn between 1 and 16."""
  return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


class DeltaJoin(nn.Module):
  """Residual stream plus the projection of the normed and gated output."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM, out_GTKRE, gate_NE):
    config = self.config
    # The parameter is the scale, also if `norms_from_one` is set.
    norm = layers.RMSNorm(config.norm_eps, config.param_dtype, name="norm")
    normed_GTKRE = norm(out_GTKRE)
    gated_NE = normed_GTKRE.reshape(gate_NE.shape) * nn.silu(gate_NE)
    joined_NM = layers.linear(config, config.width, "output")(gated_NE)
    return layers.added(config, x_GTM, joined_NM)
