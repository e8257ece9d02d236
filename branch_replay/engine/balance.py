# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The load-balance term of mixtures of experts.

Take the W tokens n of a group's G whole sequences, and the L layers with E
experts of which each token chooses k. In layer l let f_le be the fraction of
all choices that fell on expert e, and p̄_le the mean over tokens of the
router's probability p_nle (`ops.experts.probabilities`). One group's term is

  B = 1/L Σ_l E Σ_e f_le p̄_le,      ∂B/∂p_nle = E f_le / (L W).

B is 1 if experts share the tokens evenly, and E/k if all tokens choose the same
k. f counts integers and has no gradient. The cotangent of a token's
probabilities is the same E numbers a layer for every token: the *seeds*. A
position of the shared prefix is part of G sequences, so it counts G times and
gets G times the seeds. Padding does not count, nor an empty tail and its
prefix, nor a stacked group whose tails are all empty.

The term of several groups is the *mean* of theirs, so it does not grow with
their number. Stacked groups are divided by their number; who adds up gradients
of N groups one by one passes `balance_share=1/N`, or the term is N times too
large. f is known only after all tails have run, so tails are run once more, for
their counts alone, before the first of them is pulled back.

Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961.
"""

import jax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.models import pattern


def check(balance: float, config: config_lib.ModelConfig):
  """Raises ValueError for a negative coefficient, or one without experts."""
  checks.number(balance, "balance", 0)
  if balance and config.experts is None:
    raise ValueError(
        f"balance={balance}, but the model has no experts: leave it 0."
    )


def zeros(config: config_lib.ModelConfig):
  """Makes zero counts, [L, E] by stack, at least float32."""
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
  """Adds the choices of some tokens to counts.

  Args:
    counts: how often each expert was chosen so far, [L, E] by stack.
    choices: the experts each token chose, i32[L, 1, G, T, k] by stack.
    weights_GT: how often each token counts: the sequences it is part of.

  Returns:
    The updated counts.
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
  """How many groups have a tail that is not empty, at least 1.

  `tail_lengths` is [G] of one group or [groups, G] of stacked ones.
  """
  return jnp.maximum(jnp.sum(jnp.any(tail_lengths > 0, axis=-1)), 1)


def seeds(config: config_lib.ModelConfig, balance, counts):
  """Computes the seeds, balance · ∂B/∂p of a token that is in one sequence.

  Args:
    config: geometry of the model.
    balance: the coefficient, times the group's share.
    counts: how often each expert was chosen, [L, E] by stack.

  Returns:
    [L, E] by stack.
  """
  layers = config.num_layers - config.experts.first_dense
  factor = balance * config.experts.count * config.experts.top_k / layers

  def of_stack(counts_LE):
    choices_L1 = counts_LE.sum(axis=1, keepdims=True)  # k W
    return factor * counts_LE / jnp.maximum(choices_L1, 1) ** 2

  return jax.tree.map(of_stack, counts)


def load(config: config_lib.ModelConfig, counts):
  """Computes f, the share of choices on each expert, [L, E] in layer order."""
  found = [
      jnp.stack(stacks, axis=1).reshape(-1, config.experts.count)
      for part, stacks in zip(
          pattern.parts(config), pattern.split(config, counts), strict=True
      )
      if part.experts
  ]
  counts_LE = jnp.concatenate(found)
  return counts_LE / jnp.maximum(counts_LE.sum(axis=1, keepdims=True), 1)
