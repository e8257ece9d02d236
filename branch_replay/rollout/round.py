# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One round of sampling: draft tokens, run them, draw, and accept.

A row that ends in token x, with drafts y₁ … yₖ, runs the inputs x, y₁ … yₖ at
once and draws a token after each. yⱼ is accepted if it equals the jᵗʰ token
drawn and all drafts before it were accepted; the token drawn after the last
accepted draft is then valid too. So a round gives 1 to 1 + k tokens of each
row, and they are those that k = 0 gives one by one (coupling: Daliri et al.
2024, https://arxiv.org/abs/2408.07978).
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay.rollout import decode
from branch_replay.rollout import law as law_lib
from branch_replay.rollout.drafters import drafter as drafter_lib
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from branch_replay.rollout.result import Finish
from branch_replay.rollout.result import Rollout


class RunningRows(NamedTuple):
  """The N rows in the current batch; all other rows are finished.

  Attributes:
    ids_N: i32, which of the G rows they are.
    cache: cache of `decode`, with all tokens of each row but the last.
    memory: what the drafter remembers; None without a drafter.
  """

  ids_N: jax.Array
  cache: tuple[jax.Array, jax.Array]
  memory: Any = None


def accept(draft_Nk, tokens_NT):
  """i32[N]: how many drafts of each row are accepted.

  Args:
    draft_Nk: i32, drafted tokens.
    tokens_NT: i32[N, k + 1], tokens drawn in their places, and one more.
  """
  same_Nk = draft_Nk == tokens_NT[:, : draft_Nk.shape[1]]
  held_Nk = jnp.cumprod(same_Nk.astype(jnp.int32), axis=1)
  return jnp.sum(held_Nk, axis=1, dtype=jnp.int32)


def end(tokens_NT, held_N, lengths_N, inputs: RolloutInputs):
  """How many new tokens each row takes, and whether it ends with them.

  Args:
    tokens_NT: i32, tokens that were drawn.
    held_N: i32, how many of these are valid, from the first on.
    lengths_N: i32, tokens of each row before.
    inputs: their stop ids and limit end a row.

  Returns:
    i32 emitted_N, how many of the tokens the row takes, and i32 finish_N, its
    `Finish`.
  """
  stops_NT = jnp.isin(tokens_NT, inputs.stop_ids)
  through_stop_N = jnp.where(
      jnp.any(stops_NT, axis=1),
      jnp.argmax(stops_NT, axis=1) + 1,
      tokens_NT.shape[1] + 1,
  )
  room_N = inputs.limit - lengths_N
  emitted_N = jnp.minimum(jnp.minimum(through_stop_N, room_N), held_N)
  finish_N = jnp.where(emitted_N == room_N, Finish.LENGTH, Finish.RUNNING)
  finish_N = jnp.where(emitted_N == through_stop_N, Finish.STOP, finish_N)
  return emitted_N.astype(jnp.int32), finish_N.astype(jnp.int32)


def advance(
    settings: RoundSettings, inputs: RolloutInputs, drafter, answers: Rollout,
    rows: RunningRows,
):
  """Runs one round of N rows.

  Args:
    settings: static settings.
    inputs: arrays that do not change.
    drafter: see `drafters.drafter`; None if settings.draft_length is 0.
    answers: answers of all G rows so far.
    rows: the rows to run. A finished row among them is run and takes no token.

  Returns:
    The answers and the rows after the round.
  """
  view = look(settings, inputs, answers, rows.ids_N)
  memory = rows.memory
  draft_Nk = jnp.zeros((rows.ids_N.size, 0), jnp.int32)
  if drafter is not None:
    draft_Nk, memory = drafter.propose(settings, memory, view)
  hidden_NTM, cache, pending = decode.run(
      settings.model, inputs.params, inputs.state, rows.cache, view.lengths_N,
      jnp.concatenate([view.last_N[:, None], draft_Nk], axis=1),
      layers=inputs.layers,
  )
  tokens_NT, log_probs_NT = _draw(settings, inputs, hidden_NTM, view.noise_NTV)
  accepted_N = accept(draft_Nk, tokens_NT)
  emitted_N, finish_N = end(tokens_NT, accepted_N + 1, view.lengths_N, inputs)
  finish_before_N = answers.finish[rows.ids_N]
  running_N = finish_before_N == Finish.RUNNING
  emitted_N = jnp.where(running_N, emitted_N, 0)
  cache = decode.settle(
      settings.model, inputs.params, cache, pending, emitted_N
  )
  ran_N = running_N.astype(jnp.int32)
  answers = dataclasses.replace(
      _append(answers, rows.ids_N, tokens_NT, log_probs_NT, emitted_N),
      finish=answers.finish.at[rows.ids_N].set(
          jnp.where(running_N, finish_N, finish_before_N)
      ),
      rounds=answers.rounds.at[rows.ids_N].add(ran_N),
      drafted=answers.drafted.at[rows.ids_N].add(settings.draft_length * ran_N),
      accepted=answers.accepted.at[rows.ids_N].add(
          jnp.minimum(accepted_N, emitted_N)
      ),
  )
  if drafter is not None:
    outcome = drafter_lib.RoundOutcome(hidden_NTM, tokens_NT, emitted_N)
    memory = drafter.observe(settings, memory, view, outcome)
  return answers, RunningRows(rows.ids_N, cache, memory)


def look(
    settings: RoundSettings, inputs: RolloutInputs, answers: Rollout, ids_N
):
  """Makes the drafter's view of a round, with the noise of its draws.

  Args:
    settings: static settings.
    inputs: arrays that do not change.
    answers: answers of all G rows so far.
    ids_N: i32, which of the rows are in the batch.
  """
  lengths_N = answers.lengths[ids_N]
  last_N = answers.tokens[ids_N, jnp.maximum(lengths_N - 1, 0)]
  slots_NT = decode.slots(lengths_N, 1 + settings.draft_length)
  noise_NTV = law_lib.noise_of_rows(
      settings.law, inputs.key, ids_N, inputs.state.length + 1 + slots_NT,
      settings.model.config.vocab_size, answers.log_probs.dtype,
  )
  return drafter_lib.View(
      inputs, answers, ids_N, lengths_N,
      jnp.where(lengths_N > 0, last_N, inputs.boundary), noise_NTV,
  )


def _draw(
    settings: RoundSettings, inputs: RolloutInputs, hidden_NTM, noise_NTV
):
  """The token after each of the inputs, and its log-prob, both [N, T]."""
  shape = hidden_NTM.shape[:2]
  logits_NV = decode.logits(
      hidden_NTM.reshape(-1, hidden_NTM.shape[-1]),
      decode.head_table(settings.model, inputs.params),
  )
  noise_NV = None
  if noise_NTV is not None:
    noise_NV = noise_NTV.reshape(logits_NV.shape)
  tokens_N, log_probs_N = law_lib.draw(settings.law, logits_NV, noise_NV)
  return tokens_N.reshape(shape), log_probs_N.reshape(shape)


def _append(answers: Rollout, ids_N, tokens_NT, log_probs_NT, emitted_N):
  """The answers, each with its first `emitted_N` new tokens appended."""
  room, size = answers.tokens.shape[1], tokens_NT.shape[1]
  slots_NT = decode.slots(answers.lengths[ids_N], size)
  emitted_NT = jnp.arange(size)[None] < emitted_N[:, None]
  at = ids_N[:, None], jnp.where(emitted_NT, slots_NT, room)
  return dataclasses.replace(
      answers,
      tokens=answers.tokens.at[at].set(tokens_NT, mode="drop"),
      log_probs=answers.log_probs.at[at].set(log_probs_NT, mode="drop"),
      lengths=answers.lengths.at[ids_N].add(emitted_N),
  )
