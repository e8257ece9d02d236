# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Assigns things to splits and orders them, as functions of a seed.

Nothing here depends on `hash()` of a string, which differs between processes,
or on the number of rows.
"""

from collections.abc import Sequence
import hashlib
import random

import numpy as np

SPLITS = ("train", "validation", "test")
_TENTHS = {"train": 8, "validation": 1, "test": 1}


def generator(*names) -> random.Random:
  """A random generator that is a function of these names and numbers."""
  return random.Random("/".join(map(str, names)))


def part_of(seed: int, key: str) -> str:
  """The split that `key` belongs to; eight tenths of all keys are in "train".

  Use it for keys that cannot be listed, and `cut` for those that can.
  """
  digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest()
  tenth = int.from_bytes(digest, "big") % 10
  owners = [split for split in SPLITS for _ in range(_TENTHS[split])]
  return owners[tenth]


def bounds(length: int) -> dict[str, slice]:
  """Slices of a sequence: eight tenths, one tenth and one tenth.

  Raises:
    ValueError: a split would be empty.
  """
  tenth = length // 10
  if not tenth:
    raise ValueError(
        f"{length} items cannot be divided among train, validation and test: "
        "there must be at least ten."
    )
  return {
      "train": slice(0, length - 2 * tenth),
      "validation": slice(length - 2 * tenth, length - tenth),
      "test": slice(length - tenth, length),
  }


def cut(seed: int, items: Sequence, split: str) -> list:
  """The items of one split, chosen at random.

  Raises:
    ValueError: fewer than ten items.
  """
  shuffled = list(items)
  generator(seed, "cut").shuffle(shuffled)
  return shuffled[bounds(len(shuffled))[split]]


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  """The order of an epoch, i64[size].

  It sorts raw words of Philox, whose output is fixed for all time; numpy's
  `permutation` may change between versions.
  """
  words = np.random.Philox(np.random.SeedSequence([seed, epoch]))
  return np.argsort(words.random_raw(size), kind="stable")
