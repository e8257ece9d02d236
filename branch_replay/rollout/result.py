# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a rollout returns."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.data import group as group_lib
from branch_replay.engine import state as state_lib


class Finish(enum.IntEnum):
  """Why a row ended. In a returned rollout no row is RUNNING."""

  RUNNING = 0
  STOP = 1  # with a stop id
  LENGTH = 2  # truncated at the most tokens allowed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
  """What each batch bucket did, the largest first; for logs and the tuner.

  Attributes:
    buckets: i64[B], batch sizes.
    draft_lengths: i64[B], tokens drafted per row in a round.
    rounds: i64[B], forward passes at this batch size; 0 for a skipped bucket.
    tokens: i64[B], tokens that these rounds gave.
    seconds: f64[B], wall time.
    compiled: bool[B], whether that time includes a compilation.
  """

  buckets: np.ndarray
  draft_lengths: np.ndarray
  rounds: np.ndarray
  tokens: np.ndarray
  seconds: np.ndarray
  compiled: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
  """Sampled answers to one prompt.

  Attributes:
    tokens: i32[G, T], 0 after a row's end; a stop id is part of its row.
    lengths: i32[G], number of sampled tokens of each row.
    log_probs: f32[G, T], log-probs of the sampled tokens at the temperature τ
      but before truncation: what `log_probs(..., temperature=τ)` returns.
      Greedy rows are scored at temperature 1.
    finish: i32[G], a `Finish` for each row.
    rounds: i32[G], forward passes each row took part in.
    drafted: i32[G], tokens drafted for each row.
    accepted: i32[G], drafted tokens that each row accepted.
    state: captured state of the prompt, which learning can replay.
    work: what each batch bucket did.
  """

  tokens: jax.Array
  lengths: jax.Array
  log_probs: jax.Array
  finish: jax.Array
  rounds: jax.Array
  drafted: jax.Array
  accepted: jax.Array
  state: state_lib.PrefixState | None = None
  work: Work | None = None

  @property
  def finished(self) -> jax.Array:
    """bool[G], whether a row ended with a stop id; others were truncated."""
    return self.finish == Finish.STOP

  @property
  def accept_lengths(self) -> jax.Array:
    """f32[G], tokens of a row per forward pass; 1 where nothing is drafted."""
    return self.lengths / self.rounds

  def tails(self) -> list[list[int]]:
    """The sampled ids of each row, without padding."""
    tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
    return [
        row[:length].tolist()
        for row, length in zip(tokens, lengths, strict=True)
    ]


  def log_probs_of(self, group: group_lib.Group) -> jax.Array:
    """The sampler's log-probs, padded like the tails of a group, f[G, T'].

    `Group.create` pads answers to another length than the rollout does. Use
    this as an objective's `old_log_probs` beside `group.mask()`.

    Args:
      group: a group whose tails are the rollout's answers, in their order.
        Empty branches that pad the group get 0.

    Raises:
      ValueError: the group has other answers.
    """
    mine, theirs = self.tails(), _tails(group)
    if theirs[: len(mine)] != mine or any(theirs[len(mine) :]):
      raise ValueError(
          f"The group has {len(theirs)} tails of lengths {[*map(len, theirs)]} "
          f"and the rollout {len(mine)} answers of {[*map(len, mine)]}: they "
          "must be the same ids in the same order, as in Group.create(prompt, "
          "rollout.tails(), config=model.config)."
      )
    (rows, width), room = group.tails.shape, self.log_probs.shape[1]
    padded_GT = jnp.pad(
        self.log_probs, ((0, rows - len(mine)), (0, max(0, width - room)))
    )[:, :width]
    return jnp.where(group.mask(), padded_GT, 0)


def _tails(group: group_lib.Group) -> list[list[int]]:
  tails, lengths = np.asarray(group.tails), np.asarray(group.tail_lengths)
  return [
      row[:length].tolist() for row, length in zip(tails, lengths, strict=True)
  ]


def empty(branches: int, room: int, dtype) -> Rollout:
  """A rollout of G rows without tokens, with room for `room` of them."""
  def zeros():
    return jnp.zeros(branches, jnp.int32)

  return Rollout(
      tokens=jnp.zeros((branches, room), jnp.int32),
      lengths=zeros(),
      log_probs=jnp.zeros((branches, room), dtype),
      finish=jnp.full(branches, Finish.RUNNING, jnp.int32),
      rounds=zeros(),
      drafted=zeros(),
      accepted=zeros(),
  )
