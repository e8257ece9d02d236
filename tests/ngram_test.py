# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The n-gram drafter against a search written with lists."""

import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import state as state_lib
from branch_replay.rollout import result
from branch_replay.rollout.drafters import NGram
from branch_replay.rollout.drafters.drafter import View
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings


def propose(prompt, tails, ids, *, longest=4, length=3, room=12, capacity=16):
  """Drafts for the rows `ids`, from padded arrays."""
  tokens_P = np.zeros(capacity, np.int32)
  tokens_P[: len(prompt) - 1] = prompt[:-1]
  tokens_P[len(prompt) - 1 :] = 7  # what a longer prompt might have left
  state = state_lib.PrefixState(
      (), jnp.asarray(tokens_P), jnp.int32(len(prompt) - 1), jnp.uint32(0)
  )
  tokens_GT = np.zeros((len(tails), room), np.int32)
  for row, tail in zip(tokens_GT, tails, strict=True):
    row[: len(tail)] = tail
  answers = result.empty(len(tails), room, jnp.float32)
  answers = result.Rollout(**vars(answers) | dict(
      tokens=jnp.asarray(tokens_GT),
      lengths=jnp.asarray([len(tail) for tail in tails], jnp.int32),
  ))
  ids_N = jnp.asarray(ids, jnp.int32)
  inputs = RolloutInputs(None, state, jnp.int32(prompt[-1]), None, None, None)
  view = View(inputs, answers, ids_N, answers.lengths[ids_N], None, None)
  draft_Nk, _ = NGram(longest).propose(
      RoundSettings(None, br.Law(), length), (), view
  )
  assert draft_Nk.shape == (len(ids), length)
  return draft_Nk.tolist()


def searched(prompt, tails, row, longest):
  """(length of the match, what follows it) of the last longest match."""
  before = ([None] * longest + prompt)[-longest:]
  texts = [prompt] + [before + tail for tail in tails]
  mine = (before + tails[row])[-longest:]
  best, after = 0, None
  for index, text in enumerate(texts):
    for end in range(longest if index else 1, len(text)):
      past = text[:end]
      size = 0
      while (
          size < min(longest, len(past))
          and past[-1 - size] == mine[-1 - size]
      ):
        size += 1
      if size >= best:
        best, after = size, text[end:]
  return best, after


@pytest.mark.parametrize("prompt, tails, draft", (
    # In the prompt: … 3 4 [9 8 7] … 3 4 →
    ([1, 3, 4, 9, 8, 7, 6, 3, 4], [[]], [9, 8, 7]),
    # Across the end of the prompt into the row itself.
    ([1, 2, 3, 4, 5, 6], [[2, 3]], [4, 5, 6]),
    # A longer match in the prompt goes before a shorter one in the row.
    ([4, 1, 2, 3, 9, 8, 6, 6], [[3, 5, 5, 1, 2, 3]], [9, 8, 6]),
    # Of two of one length the later one.
    ([1, 2, 5, 5, 5, 0, 1, 2, 8, 8, 8, 0, 1, 2], [[]], [8, 8, 8]),
))
def test_what_followed_the_longest_match_is_drafted(prompt, tails, draft):
  assert propose(prompt, tails, [0]) == [draft]


def test_siblings_are_looked_through_from_their_first_token_on():
  prompt, tails = [1, 2, 3], [[], [9, 8, 7, 6], [9, 8]]
  assert propose(prompt, tails, [0, 2], length=2) == [[9, 8], [7, 6]]


@pytest.mark.parametrize("longest", (1, 2, 4))
def test_drafts_are_those_of_a_search_through_lists(longest):
  rng = np.random.default_rng(longest)
  matched = 0
  for _ in range(40):
    prompt = rng.integers(0, 3, rng.integers(1, 12)).tolist()
    tails = [rng.integers(0, 3, n).tolist() for n in rng.integers(0, 12, 3)]
    ids = rng.permutation(3)[:2].tolist()
    for row, draft in zip(
        ids, propose(prompt, tails, ids, longest=longest), strict=True
    ):
      size, after = searched(prompt, tails, row, longest)
      if size:
        matched += 1
        assert draft[: len(after)] == after[:3], (prompt, tails, row)
  assert matched > 60


def test_without_any_text_the_draft_is_a_token_all_the_same():
  assert propose([5], [[]], [0], capacity=0)[0][0] >= 0


def test_a_match_of_no_tokens_is_refused():
  with pytest.raises(ValueError, match="longest.*0"):
    NGram(0)
