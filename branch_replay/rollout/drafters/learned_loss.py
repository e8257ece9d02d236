# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a learned drafter; `learned` defines items and symbols.

For every item the model's own next hidden state h_{t+1} is known, and so is the
distribution that x_{t+2} was drawn from. The target is this distribution and
not the one token that was drawn: the gradient has the same mean and less
variance.

Sources: soft targets as in Hinton et al. 2015,
https://arxiv.org/abs/1503.02531; the regression on hidden states, which later
drafts are computed from, as in Li et al. 2024 (EAGLE),
https://arxiv.org/abs/2401.15077.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops.attention import packed as attention_packed
from branch_replay.rollout import decode
from branch_replay.rollout.drafters import learned


class PackedAnswers(NamedTuple):
  """Answers in N rows of T tokens, several of them in one row.

  Attributes:
    hidden_NTM: the model's hidden states after the final norm, as the readout
      `Hidden` gives them; [n, t] is the one token [n, t] was drawn from.
    tokens_NT: i32, the tokens of the answers.
    segments_NT: i32, a number for each answer, 0 where there is no token.
      Answers in the same row do not see each other.
  """

  hidden_NTM: jax.Array
  tokens_NT: jax.Array
  segments_NT: jax.Array


def losses(
    drafter_params, vocabulary_U, model: decoder.Decoder, params,
    answers: PackedAnswers, *,
    state: state_lib.PrefixState | None = None, temperature: float = 1.0,
    regression: float = 1.0,
):
  """KL(p(· | h_{t+1}) ‖ p(· | ĥ_{t+1})) + regression·|ĥ − h|²/|h|² per item.

  ĥ_{t+1} is what the layer predicts from h_t, x_{t+1} and earlier items. Both
  distributions are restricted to the draft vocabulary. Only `drafter_params`
  gets a gradient, so training the drafter cannot change the model. Holds
  several f32[N, T, U] in memory.

  Args:
    drafter_params: `Learned.params`.
    vocabulary_U: `Learned.vocabulary`.
    model: the decoder that is drafted for.
    params: its parameters.
    answers: answers to learn from, packed into rows.
    state: captured state of the prompt these answers share, of all layers or of
      the last alone (`learned.last_layer`); None for answers without a prompt.
    temperature: temperature the answers were sampled at.
    regression: weight of the second term.

  Returns:
    losses_NT, and f32 weights_NT: 1 where the next token is of the same answer
    and in the draft vocabulary, 0 elsewhere. Sums of both over batches add up.
  """
  hidden_NTM, tokens_NT, segments_NT = answers
  vocabulary_U = jnp.asarray(vocabulary_U)
  next_NT = jnp.roll(tokens_NT, -1, axis=1)
  index_NT = jnp.searchsorted(vocabulary_U, next_NT)
  index_NT = jnp.minimum(index_NT, vocabulary_U.size - 1)
  counts_NT = (vocabulary_U[index_NT] == next_NT) & (segments_NT != 0)
  follows_NT = jnp.roll(segments_NT, -1, axis=1) == segments_NT
  counts_NT &= follows_NT.at[:, -1].set(False)
  predicted_NTM = predict(
      drafter_params, model, params, answers, state=state
  )
  target_NTM = jnp.roll(lax.stop_gradient(hidden_NTM), -1, axis=1)
  table_UM = lax.stop_gradient(decode.head_table(model, params))[vocabulary_U]

  def log_law(hidden_NTM):
    logits_NU = decode.logits(
        hidden_NTM.reshape(-1, hidden_NTM.shape[-1]), table_UM
    )
    return jax.nn.log_softmax(logits_NU / temperature)

  wanted_NU, found_NU = log_law(target_NTM), log_law(predicted_NTM)
  divergence_N = jnp.sum(jnp.exp(wanted_NU) * (wanted_NU - found_NU), axis=-1)
  wide = config_lib.at_least_float32(target_NTM.dtype)
  target_NTM = target_NTM.astype(wide)
  error_NT = jnp.sum((predicted_NTM - target_NTM) ** 2, axis=-1)
  size_NT = jnp.sum(target_NTM**2, axis=-1)
  relative_NT = error_NT / jnp.where(counts_NT, size_NT, 1)
  losses_NT = divergence_N.reshape(counts_NT.shape) + regression * relative_NT
  losses_NT = jnp.where(counts_NT, losses_NT, 0)
  return losses_NT, counts_NT.astype(losses_NT.dtype)


def predict(
    drafter_params, model: decoder.Decoder, params, answers: PackedAnswers, *,
    state: state_lib.PrefixState | None = None,
):
  """Hidden states predicted from every item, [N, T, M]; arguments as `losses`.

  Only `drafter_params` gets a gradient.
  """
  hidden_NTM, tokens_NT, segments_NT = answers
  if state is None:
    state = state_lib.empty(model.config, 0)
  params, hidden_NTM, state = lax.stop_gradient((params, hidden_NTM, state))
  place_T = jnp.arange(tokens_NT.shape[1])
  before_NT = jnp.roll(segments_NT, 1, axis=1)
  begins_NT = (segments_NT != before_NT).at[:, 0].set(True)
  first_NT = lax.cummax(jnp.where(begins_NT, place_T[None], 0), axis=1)

  def attend(q, k, v):
    out = attention_packed.attend(
        q, k, v, segments_NT, state.mixer,
        layer=state.mixer[0].shape[0] - 1, prefix_length=state.length,
    )
    return out, None

  predicted_NTM, _ = learned.layer(
      model, params, drafter_params, hidden_NTM, tokens_NT,
      positions_NT=state.length + place_T[None] - first_NT, attend=attend,
  )
  return predicted_NTM
