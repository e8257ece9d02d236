# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One decoder layer as five stages; modules own only parameters.

A layer is project → rotate → (attention) → join → expand → contract. Other
mixers and feed-forwards replace some of these stages. Every stage is an
elementwise prologue followed by at most one linear map, and the cotangent of a
linear map does not need its output. So a backward pass that has the *inputs* of
the stages recomputes no matrix product, and these inputs are what the engine
keeps.

Linear maps are applied to rows, [G·T, ...]: with two leading axes XLA's CPU
backend would transpose the cotangent in memory to compute a kernel's gradient.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.ops import few_rows
from branch_replay.ops import rope


class RMSNorm(nn.Module):
  """x ↦ scale · x / √(mean(x²) + ε), in at least float32, rounded once.

  The rounding comes after the product with the scale: in bfloat16, scales close
  to 1 would all be rounded to 1.

  Attributes:
    epsilon: ε.
    param_dtype: dtype of the parameter.
    from_one: whether the parameter is scale − 1, initially 0.

  Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
  """

  epsilon: float
  param_dtype: str
  from_one: bool = False

  @nn.compact
  def __call__(self, x, factor: float = 1.0):
    """The norm of x, times `factor`."""
    init = nn.initializers.zeros if self.from_one else nn.initializers.ones
    scale = self.param("scale", init, (x.shape[-1],), self.param_dtype)
    dtype = config_lib.at_least_float32(x.dtype)
    wide, scale = x.astype(dtype), scale.astype(dtype)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(variance + self.epsilon)
    scale = (1 + scale if self.from_one else scale) * factor
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return (normed * scale).astype(x.dtype)


class Table(nn.Module):
  """The [V, M] table of the embedding, or of an untied output head."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self):
    config = self.config
    return self.param(
        "table",
        nn.initializers.normal(0.02),
        (config.vocab_size, config.width),
        config.param_dtype,
    )


def norm(config: config_lib.ModelConfig, name: str | None = None) -> RMSNorm:
  """An RMSNorm as the config wants it."""
  return RMSNorm(
      config.norm_eps, config.param_dtype, config.norms_from_one, name=name
  )


class Linear(nn.Module):
  """x_NA ↦ xW + b, plus (α/r)(xA)B if the config puts an adapter here.

  A is random and B zero at first. Parameters of `rollout.unstacked` have Wᵀ as
  "kernel_T" in place of W as "kernel".

  Products are rounded to the compute dtype. Bias and adapter are added in at
  least float32, and α/r is not rounded: in bfloat16 it could be off by a
  quarter of a per cent.
  """

  config: config_lib.ModelConfig
  features: int
  bias: bool = False

  @nn.compact
  def __call__(self, x_NA):
    config, zeros = self.config, nn.initializers.zeros
    random = nn.initializers.lecun_normal()
    x_NA = x_NA.astype(config.compute_dtype)

    def product(x, name, init, features, dtype):
      kernel = self.param(name, init, (x.shape[-1], features), dtype)
      return x @ kernel.astype(x.dtype)

    if self.has_variable("params", "kernel_T"):
      kernel_BA = self.get_variable("params", "kernel_T").astype(x_NA.dtype)
      y_NB = few_rows.product(x_NA, kernel_BA).astype(x_NA.dtype)
    else:
      y_NB = product(
          x_NA, "kernel", random, self.features, config.param_dtype
      )
    dtype, wide = y_NB.dtype, config_lib.at_least_float32(y_NB.dtype)
    if self.bias:
      b_B = self.param("bias", zeros, (self.features,), config.param_dtype)
      y_NB = (y_NB.astype(wide) + b_B.astype(wide)[None]).astype(dtype)
    adapter = config.adapter
    if adapter is not None and self.name in adapter.matrices:
      of_adapter = config_lib.at_least_float32(config.param_dtype)
      low_NR = product(x_NA, "adapter_in", random, adapter.rank, of_adapter)
      more_NB = product(
          low_NR, "adapter_out", zeros, self.features, of_adapter
      ).astype(wide)
      y_NB = y_NB.astype(wide) + adapter.alpha / adapter.rank * more_NB
    return y_NB.astype(dtype)


def linear(
    config: config_lib.ModelConfig, features: int, name: str, bias=False
) -> Linear:
  """A linear map to `features` numbers, with an adapter if the config has one.
  """
  return Linear(config, features, bias, name=name)


def rows(x_GTM):
  """[G, T, M] ↦ [G·T, M]."""
  return x_GTM.reshape(-1, x_GTM.shape[-1])


def added(config: config_lib.ModelConfig, x_GTM, y_NM):
  """The residual stream plus the output of a stage."""
  if config.post_norms:
    y_NM = norm(config, "post_norm")(y_NM)
  return x_GTM + y_NM.reshape(x_GTM.shape)


def activation(config: config_lib.ModelConfig, gate_NF):
  """The feed-forward's activation, applied to its gate."""
  if config.activation == "gelu_tanh":
    return nn.gelu(gate_NF, approximate=True)
  return nn.silu(gate_NF)


class Project(nn.Module):
  """x_GTM ↦ queries, keys and values before rotation, [G·T, heads · D].

  If the config has output gates, they follow, shaped like the queries.
  """

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM):
    config = self.config
    normed_NM = rows(norm(config, "norm")(x_GTM))
    widths = {
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
        "value": config.num_kv_heads * config.head_dim,
    }
    projected = tuple(
        linear(config, width, name, config.qkv_bias)(normed_NM)
        for name, width in widths.items()
    )
    if not config.output_gate:
      return projected
    return *projected, linear(config, widths["query"], "output_gate")(normed_NM)


class Rotate(nn.Module):
  """Head norm, RoPE, and the head-major order of axes that attention reads.

  Query head h = k·R + r goes to [k, ..., r]: the heads that share key head k
  are neighbours, so attention can treat them as rows of one matrix.

  Attributes:
    config: geometry.
    rope: base and scaling of the rotary frequencies; None for the config's.
  """

  config: config_lib.ModelConfig
  rope: tuple[float, config_lib.RopeScaling | None] | None = None

  @nn.compact
  def __call__(self, query, key, value, positions_GT):
    config = self.config
    branches, tokens = positions_GT.shape

    def heads(x):
      return x.reshape(branches, tokens, -1, config.head_dim)

    q_GTND, k_GTND, v_GTND = heads(query), heads(key), heads(value)
    if config.qk_norm:
      q_GTND = norm(config, "query_norm")(q_GTND, config.query_factor)
      k_GTND = norm(config, "key_norm")(k_GTND)
    theta, scaling = self.rope or (config.rope_theta, config.rope_scaling)
    turn = dict(theta=theta, scaling=scaling, dim=config.rotary_dim)
    q_GTND = rope.rotate(q_GTND, positions_GT, **turn)
    k_GTND = rope.rotate(k_GTND, positions_GT, **turn)
    q_GTKRD = q_GTND.reshape(
        branches, tokens, config.num_kv_heads, config.queries_per_kv, -1
    )
    return (
        q_GTKRD.transpose(2, 0, 3, 1, 4),
        k_GTND.transpose(2, 0, 1, 3),
        v_GTND.transpose(2, 0, 1, 3),
    )


class Join(nn.Module):
  """Residual stream plus the projected, optionally gated attention output."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM, out_KGRTD, gate_NA=None):
    out_GTKRD = out_KGRTD.transpose(1, 3, 0, 2, 4)
    flat_NA = out_GTKRD.reshape(x_GTM.shape[0] * x_GTM.shape[1], -1)
    if gate_NA is not None:
      flat_NA *= nn.sigmoid(gate_NA)
    joined_NM = linear(self.config, self.config.width, "output")(flat_NA)
    return added(self.config, x_GTM, joined_NM)


class Expand(nn.Module):
  """h_GTM ↦ gate and up projections of the feed-forward, [G·T, F]."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, h_GTM):
    config = self.config
    normed_NM = rows(norm(config, "norm")(h_GTM))
    return (
        linear(config, config.ffn_width, "gate")(normed_NM),
        linear(config, config.ffn_width, "up")(normed_NM),
    )


class Contract(nn.Module):
  """h + (act(gate) · up) W_down, https://arxiv.org/abs/2002.05202."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, h_GTM, gate_NF, up_NF):
    down = linear(self.config, self.config.width, "down")
    y_NM = down(activation(self.config, gate_NF) * up_NF)
    return added(self.config, h_GTM, y_NM)
