# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The distribution of a token, and drawing from it with fixed noise.

The token at position t of row b is argmax(log pₜ / τ + Gumbel(key, b, t)). The
noise depends on key, row and position alone. So a token does not depend on the
rows beside it, on the device, or on the round it is drawn in.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay import checks


@dataclasses.dataclass(frozen=True)
class Law:
  """Temperature and truncation of the distribution that tokens are drawn from.

  Attributes:
    temperature: τ ≥ 0; 0 is greedy.
    top_k: only the k most likely ids are drawn; None for all.
    top_p: only the smallest set of most likely ids whose probabilities sum to
      at least p is drawn; None for all.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self):
    checks.number(self.temperature, "temperature", 0)
    if self.top_k is not None:
      checks.integer(self.top_k, "top_k", 1)
    if self.top_p is not None:
      checks.number(self.top_p, "top_p", above=0, most=1)


def noise(key, row, position, size: int, dtype) -> jax.Array:
  """Gumbel noise for one row and position.

  Args:
    key: PRNG key of the rollout.
    row: i32, number of the branch, not its place in a batch.
    position: i32, absolute position of the token that is drawn.
    size: V.
    dtype: dtype of the noise.

  Returns:
    [size]; a function of key, row and position alone.
  """
  key = jax.random.fold_in(jax.random.fold_in(key, row), position)
  return jax.random.gumbel(key, (size,), dtype)


def noise_of_rows(law: Law, key, rows_N, positions_NT, size: int, dtype):
  """`noise` of several rows and positions, [N, T, size]; None if greedy."""
  if not law.temperature:
    return None
  return jax.vmap(
      lambda row, positions_T: jax.vmap(
          lambda position: noise(key, row, position, size, dtype)
      )(positions_T)
  )(rows_N, positions_NT)


def truncate(log_probs_NV, law: Law):
  """Replaces by −∞ the log-probs of ids that top-k or top-p excludes.

  Both look at the distribution that is passed in; an id must pass both.
  """
  if law.top_k is None and law.top_p in (None, 1.0):
    return log_probs_NV
  order_NV = jnp.argsort(-log_probs_NV, axis=-1)
  sorted_NV = jnp.take_along_axis(log_probs_NV, order_NV, axis=-1)
  keep_NV = jnp.ones(sorted_NV.shape, bool)
  if law.top_k is not None:
    keep_NV &= (jnp.arange(sorted_NV.shape[-1]) < law.top_k)[None]
  if law.top_p is not None and law.top_p < 1:  # 1 keeps all despite rounding
    probs_NV = jnp.exp(sorted_NV)
    # By the mass of the ids before it: the id that reaches p is kept.
    keep_NV &= jnp.cumsum(probs_NV, axis=-1) - probs_NV < law.top_p
  rank_NV = jnp.argsort(order_NV, axis=-1)
  keep_NV = jnp.take_along_axis(keep_NV, rank_NV, axis=-1)
  return jnp.where(keep_NV, log_probs_NV, -jnp.inf)


def draw(law: Law, logits_NV, noise_NV):
  """Draws a token for each row: argmax(truncated log p / τ + noise).

  Args:
    law: temperature and truncation.
    logits_NV: logits, at least float32.
    noise_NV: Gumbel noise of `noise`; not read if the law is greedy.

  Returns:
    i32 tokens_N, and their log-probs at the temperature but before truncation;
    greedy tokens are scored at temperature 1.
  """
  tempered_NV = logits_NV / (law.temperature or 1.0)
  log_probs_NV = jax.nn.log_softmax(tempered_NV, axis=-1)
  score_NV = truncate(log_probs_NV, law)
  if law.temperature:
    score_NV += noise_NV
  token_N = jnp.argmax(score_NV, axis=-1).astype(jnp.int32)
  log_prob_N = jnp.take_along_axis(log_probs_NV, token_N[:, None], axis=-1)
  return token_N, log_prob_N[:, 0]
