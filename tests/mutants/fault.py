# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A fault to put into the code, and the tests that have to notice it."""

from typing import NamedTuple


class Fault(NamedTuple):
  """One wrong change.

  Attributes:
    name: of the fault.
    file: below branch_replay/.
    old: a string that occurs once in the file.
    new: what stands there instead.
    tests: node ids below tests/, the quickest that should fail.
  """

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


def faults(*rows) -> list[Fault]:
  """Rows of (name, file, old, new, test, test, …)."""
  return [Fault(*row[:4], tuple(row[4:])) for row in rows]
