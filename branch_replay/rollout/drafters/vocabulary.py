# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The reduced vocabulary of a drafter: a map from its indices to token ids."""

from collections.abc import Sequence

import numpy as np


def most_frequent(
    tokens: Sequence[int], size: int, vocab_size: int
) -> np.ndarray:
  """The `size` most frequent ids, in ascending order, i32[U].

  If fewer ids occur, the lowest of the others are added.

  Args:
    tokens: ids of answers that the model gave.
    size: U.
    vocab_size: V of the model.

  Raises:
    ValueError: a size above V, or ids outside the vocabulary.
  """
  if not 1 <= size <= vocab_size:
    raise ValueError(f"size={size} must lie in [1, {vocab_size}].")
  tokens = np.asarray(tokens, np.int64)
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
        f"Ids from {tokens.min()} to {tokens.max()} of a vocabulary of "
        f"{vocab_size}."
    )
  counts_V = np.bincount(tokens, minlength=vocab_size)
  order_V = np.argsort(-counts_V, kind="stable")
  return np.sort(order_V[:size]).astype(np.int32)


def check(vocabulary, vocab_size: int):
  """Raises ValueError if these ids are not a draft vocabulary of V ids."""
  ids_U = np.asarray(vocabulary, np.int64)
  if (
      not ids_U.size
      or (np.diff(ids_U) <= 0).any()
      or ids_U[0] < 0
      or ids_U[-1] >= vocab_size
  ):
    raise ValueError(
        "A draft vocabulary is one or more ids in ascending order, below "
        f"{vocab_size}; make it with vocabulary.most_frequent."
    )


def check_same(mine, theirs):
  """Raises ValueError if two draft vocabularies differ."""
  mine, theirs = np.asarray(mine), np.asarray(theirs)
  if mine.size != theirs.size:
    raise ValueError(
        f"A drafter of {mine.size} ids, parameters that were trained for "
        f"{theirs.size}: create it with the vocabulary of the parameters."
    )
  differ = np.flatnonzero(mine != theirs)
  if differ.size:
    at = differ[0]
    raise ValueError(
        f"Another draft vocabulary of the same size: {differ.size} of "
        f"{mine.size} indices mean other ids, index {at} {mine[at]} here and "
        f"{theirs[at]} where the parameters were trained. Create the drafter "
        "with the vocabulary of the parameters."
    )
