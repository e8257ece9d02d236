# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The load-balance term of mixtures of experts.

Over the tokens n of a group's G whole sequences, W of them, in each of the L
layers with experts: f_e, the fraction of all choices that fell on expert e, and
p̄_e, the mean of its probability p_ne (`ops.experts.probabilities`). The term is

  B = 1/L Σ_l E Σ_e f_le p̄_le,      ∂B/∂p_nle = E f_le / (L W),

of one group; of several it is the *mean* of theirs, so that it does not grow
with their number, as a task's loss with weights settled for the whole batch
does not. Stacked groups are divided by their number; who adds up gradients of
groups one by one gives each its share, `balance_share=1/N`, or they are N times
as large. Padding counts nowhere: nor do an empty tail and its prefix, nor a
stacked group of empty tails. B is
1 where experts share the tokens evenly and E/k where all go to the same k. f
counts integers and has no gradient. What every token's probabilities are sent
is the same E numbers a layer, the seeds; a position of the shared prefix stands
in G sequences and counts, and is sent, G times as much. f is known when the
prefix was captured and all tails have run, so tails run once more, for their
counts alone, before the first of them is pulled back.

Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961.
"""

import jax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.models import pattern


def check(balance: float, config: config_lib.ModelConfig):
  """Raises ValueError for a coefficient that means nothing here."""
  checks.number(balance, "balance", 0)
  if balance and config.experts is None:
    raise ValueError(
        f"balance={balance}, but the model has no experts: leave it 0."
    )


def zeros(config: config_lib.ModelConfig):
  """Counts of nothing, [L, E] by stack, at least float32."""
  dtype = config_lib.at_least_float32(config.compute_dtype)
  return pattern.join(config, [
      [
          jnp.zeros((part.count, config.experts.count), dtype)
          if part.experts else {}
          for _ in part.kinds
      ]
      for part in pattern.parts(config)
  ])


def add(counts, choices, weights_GT):
  """Counts with more choices.

  Args:
    counts: [L, E] by stack.
    choices: i32[L, 1, G, T, k] by stack.
    weights_GT: how much each of their tokens counts.
  """
  def of_stack(counts_LE, choices_L1GTk):
    layers, k = choices_L1GTk.shape[0], choices_L1GTk.shape[-1]
    shape = layers, k * weights_GT.size
    weights_N = jnp.repeat(weights_GT.reshape(-1), k)
    return counts_LE.at[
        jnp.arange(layers)[:, None], choices_L1GTk.reshape(shape)
    ].add(jnp.broadcast_to(weights_N[None], shape).astype(counts_LE.dtype))

  return jax.tree.map(of_stack, counts, choices)


def answered(tail_lengths_G):
  """How many sequences of a group count: those whose tail is not empty."""
  return jnp.sum(tail_lengths_G > 0)


def groups(tail_lengths):
  """How many of [G] or [groups, G] have such a sequence, at least 1."""
  return jnp.maximum(jnp.sum(jnp.any(tail_lengths > 0, axis=-1)), 1)


def seeds(config: config_lib.ModelConfig, balance, counts):
  """balance · ∂B/∂p of a token that stands in one sequence, by stack.

  Args:
    config: geometry.
    balance: the coefficient, times the group's share.
    counts: how often each expert was chosen.
  """
  layers = config.num_layers - config.experts.first_dense
  factor = balance * config.experts.count * config.experts.top_k / layers

  def of_stack(counts_LE):
    choices_L1 = counts_LE.sum(axis=1, keepdims=True)  # k W
    return factor * counts_LE / jnp.maximum(choices_L1, 1) ** 2

  return jax.tree.map(of_stack, counts)


def load(config: config_lib.ModelConfig, counts):
  """f of every layer with experts, [L, E]."""
  found = [
      jnp.stack(stacks, axis=1).reshape(-1, config.experts.count)
      for part, stacks in zip(
          pattern.parts(config), pattern.split(config, counts), strict=True
      )
      if part.experts
  ]
  counts_LE = jnp.concatenate(found)
  return counts_LE / jnp.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
