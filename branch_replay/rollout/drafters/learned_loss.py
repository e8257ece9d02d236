# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a learned drafter is trained on; see `learned` for items and symbols."""

from jax import lax
import jax.numpy as jnp

from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import attention_packed
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.rollout import block
from branch_replay.rollout.drafters import learned


def losses(
    drafter_params, vocabulary_U, model: decoder.Decoder, params,
    hidden_NTM, tokens_NT, segments_NT, *,
    state: state_lib.PrefixState | None = None, temperature: float = 1.0,
):
  """−log p(x_{t+2} | h_t, x_{t+1}, earlier items) of every item.

  The probability is that among the draft vocabulary. Differentiable in
  `drafter_params` alone: all else is a constant, so that nothing the drafter
  learns reaches the model.

  Args:
    drafter_params: `Learned.params`.
    vocabulary_U: `Learned.vocabulary`.
    model: the decoder.
    params: its parameters.
    hidden_NTM: its hidden states after the final norm, as a readout of `replay`
      gives them; [n, t] is what token [n, t] was drawn from.
    tokens_NT: i32, the tokens of the answers.
    segments_NT: i32, which answer a token belongs to, 0 for none. Answers that
      are packed into one row do not see each other.
    state: the prompt of all these answers, of all layers or of the last alone
      (`learned.last_layer`); None for answers without one.
    temperature: that the answers were sampled at.

  Returns:
    losses_NT, and f32 weights_NT: 1 where item t has a next token in its own
    answer and in the draft vocabulary, 0 elsewhere. Sums over both compose.
  """
  vocabulary_U = jnp.asarray(vocabulary_U)
  next_NT = jnp.roll(tokens_NT, -1, axis=1)
  index_NT = jnp.searchsorted(vocabulary_U, next_NT)
  index_NT = jnp.minimum(index_NT, vocabulary_U.size - 1)
  counts_NT = (vocabulary_U[index_NT] == next_NT) & (segments_NT != 0)
  follows_NT = jnp.roll(segments_NT, -1, axis=1) == segments_NT
  counts_NT &= follows_NT.at[:, -1].set(False)
  predicted_NTM = predict(
      drafter_params, model, params, hidden_NTM, tokens_NT, segments_NT,
      state=state,
  )
  table_UM = lax.stop_gradient(block.head_table(model, params))[vocabulary_U]
  log_probs_N = log_probs_lib.chunked(
      predicted_NTM.reshape(-1, predicted_NTM.shape[-1]), table_UM,
      index_NT.reshape(-1), temperature=temperature,
  )
  losses_NT = jnp.where(counts_NT, -log_probs_N.reshape(counts_NT.shape), 0)
  return losses_NT, counts_NT.astype(losses_NT.dtype)


def predict(
    drafter_params, model: decoder.Decoder, params, hidden_NTM, tokens_NT,
    segments_NT, *, state: state_lib.PrefixState | None = None,
):
  """What the layer predicts from every item, [N, T, M]; see `losses`.

  Differentiable in `drafter_params` alone.
  """
  if state is None:
    state = state_lib.empty(model.config, 0)
  params, hidden_NTM, state = lax.stop_gradient((params, hidden_NTM, state))
  place_T = jnp.arange(tokens_NT.shape[1])
  before_NT = jnp.roll(segments_NT, 1, axis=1)
  begins_NT = (segments_NT != before_NT).at[:, 0].set(True)
  first_NT = lax.cummax(jnp.where(begins_NT, place_T[None], 0), axis=1)

  def attend(q, k, v):
    out = attention_packed.attend(
        q, k, v, segments_NT, state.mixer, state.mixer[0].shape[0] - 1,
        state.length,
    )
    return out, None

  predicted_NTM, _ = learned.layer(
      model, params, drafter_params, hidden_NTM, tokens_NT,
      state.length + place_T[None] - first_NT, attend,
  )
  return predicted_NTM
