# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts what followed the same tokens before; needs no model and no memory.

In this file C counts places in the searched text, and B the tokens back from
the end of a row.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay.rollout.drafters.drafter import View
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NGram:
  """Copies what followed the longest earlier match of a row's last tokens.

  The prompt and all rows of the group are searched, finished rows and the row
  itself included. Among matches of the same length the last one is taken, where
  later rows come after earlier ones and after the prompt. Without a match the
  draft is arbitrary. Costs N · (P + G·T) · `longest` comparisons of integers
  per round.

  Attributes:
    longest: the most tokens that are compared.

  Source: copying from a reference text is due to Yang et al. 2023,
  https://arxiv.org/abs/2304.04487; here sibling rows are searched too.
  """

  longest: int = dataclasses.field(default=4, metadata=dict(static=True))

  def __post_init__(self):
    if self.longest < 1:
      raise ValueError(f"longest must be at least 1, not {self.longest}.")

  def init(self, model, inputs, branches: int, room: int):
    del model, inputs, branches, room
    return ()

  def propose(self, settings: RoundSettings, memory, view: View):
    text_C, follows_C, suffix_NB = _text(self.longest, view)
    matched_NC = jnp.ones((suffix_NB.shape[0], text_C.size), bool)
    lengths_NC = jnp.zeros(matched_NC.shape, jnp.int32)
    for back in range(self.longest):
      # Places that wrap around are padding, which `follows_C` excludes.
      same_NC = jnp.roll(text_C, back)[None] == suffix_NB[:, back, None]
      matched_NC &= same_NC
      lengths_NC += matched_NC
    lengths_NC = jnp.where(follows_C[None], lengths_NC, -1)
    from_end_N = jnp.argmax(lengths_NC[:, ::-1], axis=1)
    best_N = text_C.size - 1 - from_end_N
    at_Nk = best_N[:, None] + 1 + jnp.arange(settings.draft_length)[None]
    draft_Nk = text_C[jnp.minimum(at_Nk, text_C.size - 1)]
    return jnp.maximum(draft_Nk, 0), memory

  def observe(self, settings, memory, view, outcome):
    del settings, view, outcome
    return memory

  def select(self, memory, index):
    del index
    return memory


def _prompt(inputs: RolloutInputs):
  """All tokens of the prompt, padded, and their number."""
  tokens_P = jnp.pad(inputs.state.tokens, (0, 1))
  length = inputs.state.length
  return tokens_P.at[length].set(inputs.boundary), length + 1


def _text(longest: int, view: View):
  """Prompt and rows as one text, and the last tokens of the running rows.

  Every row is preceded by the last `longest` tokens of the prompt, so that a
  match may begin there.

  Returns:
    i32 text_C; bool follows_C, whether a match may end at a place, that is, a
    token of the same row follows and `longest` places precede; and i32
    suffix_NB, the last token first. A prompt shorter than `longest` is filled
    up in front with −2, as if −2 were a token.
  """
  prompt_P, end = _prompt(view.inputs)
  tokens_GT = view.answers.tokens
  back = end - longest + jnp.arange(longest)
  before = jnp.where(back >= 0, prompt_P[jnp.maximum(back, 0)], -2)
  rows_GS = jnp.concatenate(
      [jnp.tile(before, (tokens_GT.shape[0], 1)), tokens_GT], axis=1
  )
  ends_G = longest + view.answers.lengths
  place_S = jnp.arange(rows_GS.shape[1])
  follows_GS = (place_S >= longest - 1)[None] & (
      place_S[None] + 1 < ends_G[:, None]
  )
  pad = longest - 1
  text_C = jnp.concatenate(
      [jnp.full(pad, -1, jnp.int32), prompt_P, rows_GS.reshape(-1)]
  )
  follows_C = jnp.concatenate([
      jnp.zeros(pad, bool),
      jnp.arange(prompt_P.size) + 1 < end,
      follows_GS.reshape(-1),
  ])
  at_NB = ends_G[view.ids_N][:, None] - 1 - jnp.arange(longest)[None]
  return text_C, follows_C, rows_GS[view.ids_N[:, None], at_NB]
