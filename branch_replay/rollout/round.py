# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One round: every row runs its last token and draws what follows."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.rollout import block
from branch_replay.rollout import law as law_lib
from branch_replay.rollout.result import Finish
from branch_replay.rollout.result import Rollout


@dataclasses.dataclass(frozen=True)
class Task:
  """The static half of a rollout: what a compilation depends on."""

  model: decoder.Decoder
  law: law_lib.Law


class Inputs(NamedTuple):
  """What a rollout is a function of; no round changes it.

  Attributes:
    params: of the model.
    state: the captured prefix: the prompt without its last token.
    boundary: i32[], the last token of the prompt.
    key: of the noise.
    stop_ids: i32[any], ids that end a row.
    limit: i32[], the most tokens of a row.
  """

  params: dict
  state: state_lib.PrefixState
  boundary: jax.Array
  key: jax.Array
  stop_ids: jax.Array
  limit: jax.Array


class Rows(NamedTuple):
  """The N rows that are run; the others are finished.

  Attributes:
    ids_N: i32, which of the G rows.
    cache: of `block`, all tokens of the row so far but the last.
  """

  ids_N: jax.Array
  cache: tuple[jax.Array, jax.Array]


def end(tokens_NT, lengths_N, inputs: Inputs):
  """Where rows end within a block of tokens that all hold.

  Args:
    tokens_NT: i32, what follows each row.
    lengths_N: i32, tokens of each row before.
    inputs: with the stop ids and the limit.

  Returns:
    i32 emitted_N, how many of the tokens the row takes, and finish_N.
  """
  size = tokens_NT.shape[1]
  stops_NT = jnp.isin(tokens_NT, inputs.stop_ids)
  through_stop_N = jnp.where(
      jnp.any(stops_NT, axis=1), jnp.argmax(stops_NT, axis=1) + 1, size + 1
  )
  room_N = inputs.limit - lengths_N
  emitted_N = jnp.minimum(jnp.minimum(through_stop_N, room_N), size)
  finish_N = jnp.where(
      emitted_N == room_N, Finish.LENGTH, Finish.RUNNING
  )
  finish_N = jnp.where(emitted_N == through_stop_N, Finish.STOP, finish_N)
  return emitted_N.astype(jnp.int32), finish_N.astype(jnp.int32)


def advance(task: Task, inputs: Inputs, answers: Rollout, rows: Rows):
  """One round.

  Args:
    task: the static half.
    inputs: what does not change.
    answers: of all G rows, so far.
    rows: those that are run. A finished one may be among them: it is run and
      takes nothing.

  Returns:
    The answers and the rows after the round.
  """
  ids_N = rows.ids_N
  lengths_N = answers.lengths[ids_N]
  last_N = jnp.where(
      lengths_N > 0,
      answers.tokens[ids_N, jnp.maximum(lengths_N - 1, 0)],
      inputs.boundary,
  )
  hidden_NTM, cache = block.run(
      task.model, inputs.params, inputs.state, rows.cache, lengths_N,
      last_N[:, None],
  )
  table_VM = block.head_table(task.model, inputs.params)
  logits_NV = block.logits(hidden_NTM[:, 0], table_VM)
  positions_NT = inputs.state.length + 1 + block.slots(lengths_N, 1)
  noise_NTV = law_lib.block_noise(
      task.law, inputs.key, ids_N, positions_NT, *logits_NV.shape[1:],
      logits_NV.dtype,
  )
  token_N, log_prob_N = law_lib.draw(
      task.law, logits_NV, None if noise_NTV is None else noise_NTV[:, 0]
  )
  emitted_N, finish_N = end(token_N[:, None], lengths_N, inputs)
  running_N = answers.finish[ids_N] == Finish.RUNNING
  answers = take(
      answers, ids_N, token_N[:, None], log_prob_N[:, None],
      jnp.where(running_N, emitted_N, 0),
      jnp.where(running_N, finish_N, answers.finish[ids_N]),
  )
  return answers, rows._replace(cache=cache)


def take(
    answers: Rollout, ids_N, tokens_NT, log_probs_NT, emitted_N, finish_N
) -> Rollout:
  """Answers with the first `emitted_N` tokens of a block appended."""
  room, size = answers.tokens.shape[1], tokens_NT.shape[1]
  slots_NT = block.slots(answers.lengths[ids_N], size)
  emitted_NT = jnp.arange(size)[None] < emitted_N[:, None]
  at = ids_N[:, None], jnp.where(emitted_NT, slots_NT, room)
  return dataclasses.replace(
      answers,
      tokens=answers.tokens.at[at].set(tokens_NT, mode="drop"),
      log_probs=answers.log_probs.at[at].set(log_probs_NT, mode="drop"),
      lengths=answers.lengths.at[ids_N].add(emitted_N),
      finish=answers.finish.at[ids_N].set(finish_N),
      rounds=answers.rounds.at[ids_N].add((emitted_N > 0).astype(jnp.int32)),
  )
