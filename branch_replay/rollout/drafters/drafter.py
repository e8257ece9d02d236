# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a drafter is: four pure functions of one frozen pytree.

A drafter guesses the next k tokens of every row. The sampler runs the guesses
as one block and keeps those that equal what it draws anyway, so a drafter
changes how fast rows grow and never what they are; nothing a drafter returns
has to be a probability, or even a token.

To write one, make a frozen dataclass, register it as a pytree
(`jax.tree_util.register_dataclass`) with its arrays as data and its settings as
static metadata, and give it the methods of `Drafter`.
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
  """What a drafter may look at, before the model runs.

  Attributes:
    inputs: parameters of the model, and the prompt with its captured state.
    answers: of all G rows so far, those that finished included.
    ids_N: i32, which of them are run; finished ones may be among them.
    lengths_N: i32, tokens that each of these has.
    last_N: i32, the last of them, or of the prompt.
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
  """What became of the block.

  Attributes:
    hidden_NTM: the model's hidden states after the final norm; the first is of
      the row's last token, the others of the drafted ones.
    tokens_NT: i32, what was drawn from each.
    emitted_N: i32, how many of these the row took: the accepted ones and one
      more, fewer where it ended, 0 if it had finished before.
  """

  hidden_NTM: jax.Array
  tokens_NT: jax.Array
  emitted_N: jax.Array


class Drafter(Protocol):
  """The interface."""

  def init(
      self, model: decoder.Decoder, inputs: RolloutInputs, branches: int,
      room: int,
  ) -> Any:
    """What it remembers of G rows of at most `room` tokens, before the first.

    Called outside of `jit`; raises ValueError for a drafter that does not fit
    the model or the prompt.
    """

  def propose(
      self, settings: RoundSettings, memory, view: View
  ) -> tuple[jax.Array, Any]:
    """i32 draft_Nk with k = settings.draft_length, and the memory after it.

    Called in every round, also with k = 0.
    """

  def observe(
      self, settings: RoundSettings, memory, view: View, outcome: RoundOutcome
  ) -> Any:
    """The memory after the round; `view` is that of its beginning."""

  def select(self, memory, index) -> Any:
    """The memory of some of the rows, in the order of `index`."""
