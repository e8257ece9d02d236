# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs rounds until every row is finished, in smaller and smaller batches.

The G rows run together until the unfinished ones fit the next smaller batch
size, a power of two (a *bucket*); then these continue alone. One loop is
compiled for every bucket that is reached, and the host decides when to go from
one to the next.
"""

from collections.abc import Mapping
import dataclasses
import functools
import time

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib
from branch_replay.engine import state as state_lib
from branch_replay.models import decoder
from branch_replay.rollout import decode
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import result
from branch_replay.rollout import round as round_lib
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from branch_replay.rollout.result import Finish
from branch_replay.rollout.result import Rollout


def buckets(branches: int) -> tuple[int, ...]:
  """Batch sizes for a group: G, then every power of two below it.

  Example:
    >>> buckets(12)
    (12, 8, 4, 2, 1)
  """
  below = (1 << i for i in reversed(range((branches - 1).bit_length())))
  return branches, *below


def start(
    model: decoder.Decoder, inputs: RolloutInputs, drafter, branches: int,
    room: int,
):
  """Makes what a group has before its first round.

  Args:
    model: the decoder.
    inputs: parameters, and the prompt with its captured state.
    drafter: see `drafters.drafter`, or None.
    branches: G.
    room: tokens that each answer has room for.

  Returns:
    A `Rollout` of G empty answers, and the `RunningRows`.
  """
  config = model.config
  memory = None
  if drafter is not None:
    memory = drafter.init(model, inputs, branches, room)
  rows = round_lib.RunningRows(
      jnp.arange(branches, dtype=jnp.int32),
      state_lib.caches(config, inputs.state.mixer, branches, room),
      memory,
  )
  dtype = config_lib.at_least_float32(config.compute_dtype)
  return result.empty(branches, room, dtype), rows


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def rounds(
    settings: RoundSettings, inputs: RolloutInputs, drafter, answers: Rollout,
    rows: round_lib.RunningRows, most_running,
):
  """Runs rounds until at most `most_running` of the rows are unfinished.

  Args:
    settings: static settings of a round.
    inputs: arrays that no round changes.
    drafter: see `drafters.drafter`; None if nothing is drafted.
    answers: answers of all G rows so far; donated.
    rows: the rows in the batch; donated.
    most_running: i32, how many rows may still be unfinished at the end.

  Returns:
    Answers, rows, and the number of rounds.
  """
  def unfinished(carry):
    answers, rows, _ = carry
    running_N = answers.finish[rows.ids_N] == Finish.RUNNING
    return jnp.sum(running_N, dtype=jnp.int32) > most_running

  def one(carry):
    answers, rows, count = carry
    answers, rows = round_lib.advance(settings, inputs, drafter, answers, rows)
    return answers, rows, count + 1

  return lax.while_loop(unfinished, one, (answers, rows, jnp.int32(0)))


@jax.jit
def select_rows(
    drafter, rows: round_lib.RunningRows, index
) -> round_lib.RunningRows:
  """Selects rows of the batch, with their caches and the drafter's memory.

  Args:
    drafter: the drafter, or None.
    rows: the rows in the batch.
    index: i32, places in the batch, in the order in which they are wanted.
  """
  memory = rows.memory
  if drafter is not None:
    memory = drafter.select(memory, index)
  return round_lib.RunningRows(
      rows.ids_N[index], decode.select_rows(rows.cache, index), memory
  )


def _programs() -> int:
  """How many programs of this module have been compiled so far."""
  return rounds._cache_size() + select_rows._cache_size()


def run(
    model: decoder.Decoder, law: law_lib.Law, inputs: RolloutInputs, drafter,
    draft_lengths: Mapping[int, int], *, branches: int, room: int,
) -> Rollout:
  """Samples a whole group.

  Args:
    model: the decoder.
    law: temperature and truncation.
    inputs: parameters, prompt, key and what ends a row.
    drafter: see `drafters.drafter`, or None.
    draft_lengths: tokens to draft in each bucket, by bucket, the largest first.
      A bucket that is left out is skipped: finished rows stay in the batch.
    branches: G, the first bucket.
    room: tokens there is memory for, at least the limit of `inputs`.

  Returns:
    The rollout, without its state.
  """
  answers, rows = start(model, inputs, drafter, branches, room)
  finished_N = np.zeros(branches, bool)
  work, tokens = [], 0
  sizes = tuple(draft_lengths)
  for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
    count, before, began = 0, tokens, time.perf_counter()
    programs = _programs()
    if np.sum(~finished_N) > smaller:  # otherwise the rows fit the next bucket
      if finished_N.size > size:
        # Unfinished rows first; finished ones fill the bucket up.
        order = np.argsort(finished_N, kind="stable")[:size]
        rows = select_rows(drafter, rows, order.astype(np.int32))
      answers, rows, count = rounds(
          RoundSettings(model, law, draft_lengths[size]), inputs, drafter,
          answers, rows, np.int32(smaller),
      )
      finish_G, ids_N = np.asarray(answers.finish), np.asarray(rows.ids_N)
      finished_N = finish_G[ids_N] != Finish.RUNNING
      tokens = int(np.sum(answers.lengths))
    seconds = time.perf_counter() - began
    work.append((
        size, draft_lengths[size], int(count), tokens - before, seconds,
        _programs() > programs,
    ))
  columns = map(np.asarray, zip(*work, strict=True))
  return dataclasses.replace(answers, work=result.Work(*columns))
