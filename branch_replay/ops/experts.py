# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Routing: which experts a token gets, their weights, and rows by expert.

For a token with router logits z and scores s (softmax or sigmoid of z):

  choice    the k experts with the largest s + b, within the best groups,
  weights   w_j = α s_j / Σ s for j in the choice (divided if `normalised`).

The choice is an array of integers without a gradient. Once made, it can be
passed back whenever the token is run again. Weights are always computed from
the current logits. Settings and sources: `config.Experts`.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib


def scores(experts: config_lib.Experts, logits_NE):
  """s, in the dtype of the logits."""
  if experts.scores == "sigmoid":
    return jax.nn.sigmoid(logits_NE)
  return jax.nn.softmax(logits_NE)


def choose(experts: config_lib.Experts, logits_NE, correction_E=None):
  """i32[N, k]: the experts of every token, the best first.

  Args:
    experts: settings of the routing.
    logits_NE: logits of the router, at least float32.
    correction_E: b; None for 0.
  """
  score_NE = scores(experts, logits_NE)
  if correction_E is not None:
    score_NE += correction_E.astype(score_NE.dtype)[None]
  if experts.groups > 1:
    size = experts.count // experts.groups
    groups_NAB = score_NE.reshape(-1, experts.groups, size)
    of_group_NA = lax.top_k(groups_NAB, experts.group_top)[0].sum(axis=-1)
    _, best_NA = lax.top_k(of_group_NA, experts.top_groups)
    open_NA = jax.nn.one_hot(best_NA, experts.groups, dtype=bool).any(axis=1)
    open_NE = jnp.repeat(open_NA, size, axis=1)
    score_NE = jnp.where(open_NE, score_NE, -jnp.inf)
  return lax.top_k(score_NE, experts.top_k)[1]


def weights(experts: config_lib.Experts, logits_NE, choices_Nk):
  """w of the chosen experts, [N, k], in the dtype of the logits."""
  score_NE = scores(experts, logits_NE)
  taken_Nk = jnp.take_along_axis(score_NE, choices_Nk, axis=1)
  if experts.normalised:  # k sigmoids may all be 0 in float32
    taken_Nk /= taken_Nk.sum(axis=1, keepdims=True) + 1e-20
  return experts.scaling * taken_Nk


def probabilities(experts: config_lib.Experts, logits_NE):
  """Scores of all experts divided by their sum, [N, E]."""
  score_NE = scores(experts, logits_NE)
  return score_NE / (score_NE.sum(axis=1, keepdims=True) + 1e-20)


def pull_probabilities(experts: config_lib.Experts, logits_NE, dp_NE):
  """The cotangent of the logits, from that of `probabilities`."""
  _, pull = jax.vjp(lambda z: probabilities(experts, z), logits_NE)
  return pull(dp_NE.astype(logits_NE.dtype))[0]


class Order(NamedTuple):
  """N·k rows, one for each token and choice, sorted by expert.

  Attributes:
    to_R: for every place in that order, the row k·n + j.
    back_R: for every row, its place.
    sizes_E: number of rows of every expert.
  """

  to_R: jax.Array
  back_R: jax.Array
  sizes_E: jax.Array


def order(choices_Nk, count: int) -> Order:
  """The order of all rows, by the experts chosen."""
  flat_R = choices_Nk.reshape(-1)
  to_R = jnp.argsort(flat_R, stable=True)
  places_R = jnp.arange(flat_R.size, dtype=to_R.dtype)
  back_R = jnp.zeros_like(to_R).at[to_R].set(places_R, unique_indices=True)
  return Order(to_R, back_R, jnp.bincount(flat_R, length=count))


def take(x_RM, places_R):
  """Permutes rows, and tells XLA that it is a permutation."""
  return x_RM.at[places_R].get(unique_indices=True, mode="clip")


def to_experts(x_NM, rows: Order):
  """Repeats every token for each of its k experts, in their order: [N·k, M]."""
  each = rows.to_R.shape[0] // x_NM.shape[0]
  return take(jnp.repeat(x_NM, each, axis=0), rows.to_R)


def to_tokens(y_RM, rows: Order, tokens: int):
  """Sums the rows of each token, which are in the order of experts: [N, M]."""
  return take(y_RM, rows.back_R).reshape(tokens, -1, y_RM.shape[1]).sum(axis=1)
