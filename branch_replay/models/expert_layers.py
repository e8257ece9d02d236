# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The stages of a mixture-of-experts feed-forward.

`choose` picks the k experts of a token from the router's logits. `expand` makes
one row for each token and choice, sorted by expert, and applies the experts'
gate and up projections. `contract` multiplies each row by its weight, applies
the down projection, and adds the k rows, and the shared expert's, for each
token. As in any layer a stage is an elementwise prologue and linear maps: the
weight is applied before the down projection, so its gradient does not need that
projection's output. Choices are passed in, newly made or kept from an earlier
run, and are not differentiated.
"""

import flax.linen as nn

from branch_replay import config as config_lib
from branch_replay.models import layers
from branch_replay.ops import experts as ops
from branch_replay.ops import experts_reference as reference
from branch_replay.ops import grouped_dot


class Router(nn.Module):
  """x_NM ↦ one logit per expert, at least float32, and the score correction."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_NM):
    experts, dtype = self.config.experts, self.config.param_dtype
    kernel_ME = self.param(
        "kernel", nn.initializers.lecun_normal(),
        (x_NM.shape[1], experts.count), dtype,
    )
    correction_E = None
    if experts.correction:
      correction_E = self.param(
          "correction", nn.initializers.zeros, (experts.count,), dtype
      )
    wide = config_lib.at_least_float32(x_NM.dtype)
    return x_NM.astype(wide) @ kernel_ME.astype(wide), correction_E


class Matrices(nn.Module):
  """One matrix per expert, [E, in, out] in the compute dtype."""

  config: config_lib.ModelConfig
  rows: int
  columns: int

  @nn.compact
  def __call__(self):
    config = self.config
    shape = config.experts.count, self.rows, self.columns
    initializer = nn.initializers.lecun_normal(batch_axis=0)
    kernel_EAB = self.param("kernel", initializer, shape, config.param_dtype)
    return kernel_EAB.astype(config.compute_dtype)


class ExpertExpand(nn.Module):
  """h_GTM and choices ↦ logits, gate and up rows, and shared projections."""

  config: config_lib.ModelConfig

  def setup(self):
    config, experts = self.config, self.config.experts
    self.norm = layers.norm(config)
    self.router = Router(config)
    self.expert_gate = Matrices(config, config.width, experts.width)
    self.expert_up = Matrices(config, config.width, experts.width)
    if experts.shared_width:
      self.shared_gate = layers.Linear(config, experts.shared_width)
      self.shared_up = layers.Linear(config, experts.shared_width)
    if experts.shared_gate:
      self.shared_scale = layers.Linear(config, 1)

  def choose(self, h_GTM):
    """i32[G·T, k]: the experts of every token, see `ops.experts.choose`."""
    logits_NE, correction_E = self.router(layers.rows(self.norm(h_GTM)))
    return ops.choose(self.config.experts, logits_NE, correction_E)

  def __call__(self, h_GTM, choices_Nk):
    normed_NM = layers.rows(self.norm(h_GTM))
    logits_NE, _ = self.router(normed_NM)
    rows = ops.order(choices_Nk, self.config.experts.count)
    x_RM = ops.to_experts(normed_NM, rows)
    return (
        logits_NE,
        grouped_dot.grouped_dot(x_RM, self.expert_gate(), rows.sizes_E),
        grouped_dot.grouped_dot(x_RM, self.expert_up(), rows.sizes_E),
        *self.shared(normed_NM),
    )

  def shared(self, normed_NM):
    """The shared expert's projections for `ExpertContract.join`, if any."""
    experts, projections = self.config.experts, ()
    if experts.shared_width:
      projections = self.shared_gate(normed_NM), self.shared_up(normed_NM)
    if experts.shared_gate:
      projections += (self.shared_scale(normed_NM),)
    return projections

  def readable(self, h_GTM):
    """Inputs and matrices for the reference, and the shared projections."""
    normed_NM = layers.rows(self.norm(h_GTM))
    logits_NE, _ = self.router(normed_NM)
    matrices = self.expert_gate(), self.expert_up()
    return normed_NM, logits_NE, matrices, self.shared(normed_NM)


class ExpertContract(nn.Module):
  """h + Σ_j w_j (silu(gate_j) ∘ up_j) D_j, plus the shared expert's output."""

  config: config_lib.ModelConfig

  def setup(self):
    config, experts = self.config, self.config.experts
    self.expert_down = Matrices(config, experts.width, config.width)
    if experts.shared_width:
      self.shared_down = layers.Linear(config, config.width)

  def __call__(self, h_GTM, choices_Nk, logits_NE, gate_RF, up_RF, *shared):
    experts, tokens = self.config.experts, choices_Nk.shape[0]
    rows = ops.order(choices_Nk, experts.count)
    weights_Nk = ops.weights(experts, logits_NE, choices_Nk)
    weights_R1 = ops.take(weights_Nk.reshape(-1, 1), rows.to_R)
    hidden_RF = scaled(nn.silu(gate_RF) * up_RF, weights_R1)
    out_RM = grouped_dot.grouped_dot(
        hidden_RF, self.expert_down(), rows.sizes_E
    )
    return self.join(h_GTM, ops.to_tokens(out_RM, rows, tokens), *shared)

  def join(self, h_GTM, y_NM, gate_NF=None, up_NF=None, scale_N1=None):
    """The sum of residual stream, chosen experts and shared expert."""
    if gate_NF is not None:
      hidden_NF = nn.silu(gate_NF) * up_NF
      if scale_N1 is not None:
        wide = config_lib.at_least_float32(scale_N1.dtype)
        hidden_NF = scaled(hidden_NF, nn.sigmoid(scale_N1.astype(wide)))
      y_NM += self.shared_down(hidden_NF)
    return h_GTM + y_NM.reshape(h_GTM.shape)


def scaled(x_RF, factor_R1):
  """Rows times factors of at least float32, rounded once."""
  return (x_RF.astype(factor_R1.dtype) * factor_R1).astype(x_RF.dtype)


def readable(expand: ExpertExpand, contract: ExpertContract, h_GTM):
  """The feed-forward with every expert run on every token."""
  experts = expand.config.experts
  normed_NM, logits_NE, matrices, shared = expand.readable(h_GTM)
  choices_Nk = expand.choose(h_GTM)
  y_NM = reference.mix(
      normed_NM, ops.weights(experts, logits_NE, choices_Nk), choices_Nk,
      *matrices, contract.expert_down(),
  )
  return contract.join(h_GTM, y_NM, *shared)


def choose(config: config_lib.ModelConfig, params, h_GTM):
  """The experts of every token in a layer; `params` are those of `expand`."""
  module = ExpertExpand(config)
  return module.apply({"params": params}, h_GTM, method="choose")
