# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a drafter: four pure functions of a frozen pytree.

A drafter guesses the next k tokens of every row. The sampler runs the guesses
in one forward pass and accepts those that equal what it draws anyway. So a
drafter changes how many forward passes there are and no token. Nothing it
returns has to be a probability, or even a valid token.

To write one, make a frozen dataclass with the methods of `Drafter`, and
register it as a pytree (`jax.tree_util.register_dataclass`) with its arrays as
data and its settings as static metadata.
"""

from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax

from branch_replay.models import decoder
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from branch_replay.rollout.result import Rollout


class View(NamedTuple):
  """What a drafter may read before the model runs.

  Attributes:
    inputs: parameters of the model, and the prompt with its captured state.
    answers: all G rows so far, finished ones included.
    ids_N: i32, which rows are in the batch; finished ones may be among them.
    lengths_N: i32, number of tokens of each row in the batch.
    last_N: i32, the last token of each of these rows, or of the prompt if the
      row is empty.
    noise_NTV: Gumbel noise that the next 1 + k tokens are drawn with; None if
      the law is greedy.
  """

  inputs: RolloutInputs
  answers: Rollout
  ids_N: jax.Array
  lengths_N: jax.Array
  last_N: jax.Array
  noise_NTV: jax.Array | None


class RoundOutcome(NamedTuple):
  """What the model made of the drafts of one round.

  Attributes:
    hidden_NTM: the model's hidden states after the final norm. The first is
      that of the row's last token, the others are those of the drafted tokens.
    tokens_NT: i32, the token drawn from each hidden state.
    emitted_N: i32, how many of these tokens the row takes: one more than the
      drafts accepted, fewer where the row ends, 0 if it had finished before.
  """

  hidden_NTM: jax.Array
  tokens_NT: jax.Array
  emitted_N: jax.Array


class Drafter(Protocol):
  """The methods of a drafter; see the module."""

  def init(
      self, model: decoder.Decoder, inputs: RolloutInputs, branches: int,
      room: int,
  ) -> Any:
    """Makes the drafter's memory before the first round of G rows.

    Called outside of `jit`.

    Args:
      model: the decoder that is sampled from.
      inputs: its parameters, and the prompt with its captured state.
      branches: G.
      room: the most tokens of a row.

    Returns:
      The memory, any pytree; the other methods take it and return it.

    Raises:
      ValueError: the drafter does not fit the model or the prompt.
    """

  def propose(
      self, settings: RoundSettings, memory, view: View
  ) -> tuple[jax.Array, Any]:
    """Drafts tokens; called in every round, also with k = 0.

    Returns:
      i32 draft_Nk with k = settings.draft_length, and the memory after it.
    """

  def observe(
      self, settings: RoundSettings, memory, view: View, outcome: RoundOutcome
  ) -> Any:
    """Returns the memory after a round.

    Args:
      settings: static settings of the round.
      memory: the memory that `propose` returned.
      view: the view that `propose` was given.
      outcome: what the model made of the drafts.
    """

  def select(self, memory, index) -> Any:
    """Returns the memory of some of the rows, in the order of `index`."""
