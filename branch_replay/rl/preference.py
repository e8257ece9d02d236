# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs of answers to one prompt: a chosen and a rejected one.

Rows 2i and 2i + 1 of a group are pair i, the chosen answer first. The loss of a
pair needs both, so `branches_at_once` must be even under
`branch_replay.value_and_grad`. If that is impossible, run twice: first the
log-probs, then `objectives.linear` with jax.grad(loss)(log_probs_GT, pairs).

Log-probs here are at temperature 1, whatever temperature answers were sampled
at.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay.rl import checks
from branch_replay.rl import divergences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pairs:
  """The constants of a preference loss, all with the leading axis G.

  Attributes:
    mask: bool[..., G, T], the tokens of the answers.
    reference_log_probs: [..., G, T], log π_ref.
    weights: [..., G], weight of the pair that a row is in: 1 / number of pairs,
      or 0 for a pair that is dropped.
  """

  mask: jax.Array
  reference_log_probs: jax.Array
  weights: jax.Array

  @classmethod
  def create(cls, mask_GT, reference_log_probs_GT) -> "Pairs":
    """Computes the weights for all pairs at once, before they are split.

    A pair with an empty answer is dropped, and not counted.

    Args:
      mask_GT: bool[..., G, T], the tokens of the answers.
      reference_log_probs_GT: log π_ref.

    Returns:
      The pairs.

    Raises:
      ValueError: an odd number of rows, or shapes that do not fit.
    """
    checks.check_mask(mask_GT, reference_log_probs=reference_log_probs_GT)
    real_G = jnp.any(mask_GT, axis=-1)
    real_N2 = _by_pair(real_G)
    whole_N = real_N2[..., 0] & real_N2[..., 1]
    weight_N = whole_N / jnp.maximum(jnp.sum(whole_N), 1)
    weights_G = jnp.repeat(weight_N, 2, axis=-1)
    return cls(jnp.asarray(mask_GT), reference_log_probs_GT, weights_G)


@dataclasses.dataclass(frozen=True)
class Dpo:
  """Σ w · `dpo`, a sum over pairs, of log-probs and `Pairs`.

  Attributes:
    beta: β > 0.
    label_smoothing: ε in [0, 1/2).
  """

  beta: float = 0.1
  label_smoothing: float = 0.0

  def __post_init__(self):
    _check_beta(self.beta)
    if not 0 <= self.label_smoothing < 0.5:
      raise ValueError(
          f"label_smoothing must lie in [0, 0.5), not {self.label_smoothing}."
      )

  def __call__(self, log_probs_GT, pairs: Pairs) -> jax.Array:
    """The sum over the given pairs, a scalar; rows must come in pairs."""
    loss_N = dpo(
        margins(log_probs_GT, pairs), beta=self.beta,
        label_smoothing=self.label_smoothing,
    )
    return _weighted(loss_N, pairs)


@dataclasses.dataclass(frozen=True)
class Ipo:
  """Σ w · `ipo`, a sum over pairs, of log-probs and `Pairs`.

  Attributes:
    beta: β > 0, called τ in the paper.
  """

  beta: float = 0.1

  def __post_init__(self):
    _check_beta(self.beta)

  def __call__(self, log_probs_GT, pairs: Pairs) -> jax.Array:
    """The sum over the given pairs, a scalar; rows must come in pairs."""
    return _weighted(ipo(margins(log_probs_GT, pairs), beta=self.beta), pairs)


def margins(log_probs_GT, pairs: Pairs) -> jax.Array:
  """h = log π_θ(y_w)/π_ref(y_w) − log π_θ(y_l)/π_ref(y_l) of each pair.

  y_w is the chosen answer and y_l the rejected one; the log-prob of an answer
  is the sum over its tokens.

  Args:
    log_probs_GT: log π_θ of the tokens, rows in pairs.
    pairs: the constants of the same rows.

  Returns:
    [..., G / 2].

  Raises:
    ValueError: an odd number of rows, or shapes that do not fit.
  """
  log_ratio_GT = divergences.log_ratio(
      log_probs_GT, pairs.reference_log_probs, pairs.mask
  )
  chosen_first_N2 = _by_pair(jnp.sum(log_ratio_GT, axis=-1))
  return chosen_first_N2[..., 0] - chosen_first_N2[..., 1]


def dpo(margin_N, *, beta: float, label_smoothing: float = 0.0) -> jax.Array:
  """−(1 − ε) log σ(β h) − ε log σ(−β h), arXiv 2305.18290, equation 7.

  Args:
    margin_N: h, computed by `margins`.
    beta: β.
    label_smoothing: ε, the probability that a label is the wrong way round, as
      in the conservative DPO that arXiv 2403.00409 compares with.

  Returns:
    The loss of each pair, [N].
  """
  right_N = jax.nn.log_sigmoid(beta * margin_N)
  wrong_N = jax.nn.log_sigmoid(-beta * margin_N)
  return -(1 - label_smoothing) * right_N - label_smoothing * wrong_N


def ipo(margin_N, *, beta: float) -> jax.Array:
  """(h − 1/(2β))², arXiv 2310.12036, equation 17.

  Args:
    margin_N: h, computed by `margins`.
    beta: β, the paper's τ.

  Returns:
    The loss of each pair, [N].
  """
  return jnp.square(margin_N - 1 / (2 * beta))


def _weighted(loss_N, pairs: Pairs):
  return jnp.sum(_by_pair(pairs.weights)[..., 0] * loss_N)


def _by_pair(rows_G):
  """[..., G] as [..., G / 2, 2]."""
  if rows_G.shape[-1] % 2:
    raise ValueError(
        f"{rows_G.shape[-1]} rows do not make pairs: rows 2i and 2i + 1 are a "
        "chosen and a rejected answer, and an even branches_at_once keeps "
        "them together."
    )
  return rows_G.reshape(*rows_G.shape[:-1], -1, 2)


def _check_beta(beta: float):
  if not beta > 0:
    raise ValueError(f"beta must be > 0, not {beta}.")
