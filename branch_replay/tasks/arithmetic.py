# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Addition, subtraction and multiplication after worked examples.

Problems are divided among the splits, and the examples in a prompt are from its
own split. So a test problem does not occur in training: not as a question, not
as an example, and not with its operands exchanged.
"""

from collections.abc import Iterator
import dataclasses
import operator
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from branch_replay.tasks import builder
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_QUESTION = "Continue in the same way, with the result alone: "
_TRIES = 1000


class ArithmeticRows(builder.RowsBuilder, skip_registration=True):
  """Rows of `Arithmetic`."""

  name = "arithmetic"
  VERSION = tfds.core.Version("1.0.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic(builder.Recipe):
  """Solve a problem after examples of the same kind.

  The reward is 1 if the answer is the result as the examples write it, apart
  from white space around it, and 0 otherwise. A negative result begins with
  "-".

  Attributes:
    operations: some of "+-*", each at most once.
    min_digits: fewest digits of an operand. Operands have no leading zeros.
    max_digits: most digits of an operand.
    examples: worked examples in every prompt.
  """

  name: ClassVar[str] = "arithmetic"
  rows_builder: ClassVar[type[builder.RowsBuilder]] = ArithmeticRows

  operations: str = "+-"
  min_digits: int = 1
  max_digits: int = 2
  examples: int = 8

  def __post_init__(self):
    super().__post_init__()
    given = list(self.operations)
    if not given or len(set(given)) < len(given) or set(given) - set("+-*"):
      raise ValueError(
          f"operations={self.operations!r} must name some of '+-*' once each."
      )
    if not 1 <= self.min_digits <= self.max_digits or self.examples < 0:
      raise ValueError(
          f"min_digits={self.min_digits}, max_digits={self.max_digits} and "
          f"examples={self.examples} must be at least 1, that, and 0."
      )

  def rows(
      self, text: text_lib.Text, split: str
  ) -> Iterator[task_lib.Example]:
    """Yields rows; raises ValueError if the split has too few problems."""
    for index in range(getattr(self, split)):
      row_id = self.row_id(split, index)
      random = splits.generator(self.seed, row_id)
      drawn = {}
      while len(drawn) <= self.examples:
        problem = self._problem(random, split, drawn)
        drawn[canonical(*problem)] = problem
      *shown, (a, sign, b) = drawn.values()
      worked = "".join(f"{x}{s}{y}={solve(x, s, y)}\n" for x, s, y in shown)
      asked = f"{a}{sign}{b}="
      if isinstance(text, text_lib.Chat):
        asked = _QUESTION + asked
      prompt = text.prompt(asked, worked)
      answer = solve(a, sign, b)
      yield task_lib.Example(
          id=row_id,
          prompt_ids=np.asarray(prompt.ids, np.int32),
          answer_ids=np.asarray(text.answer(prompt, answer), np.int32),
          answer=answer,
          details={
              "problem": [a, sign, b],
              "examples": [list(problem) for problem in shown],
          },
      )

  def scorer(self, text: text_lib.Text):
    """1 for the exact answer, apart from white space around it."""
    return lambda example, ids: float(
        text.decode(ids).strip() == example.answer
    )

  def _problem(self, random, split, drawn):
    """A problem of the split that has not been drawn yet."""
    for _ in range(_TRIES):
      sign = random.choice(self.operations)
      a, b = self._operand(random), self._operand(random)
      key = canonical(a, sign, b)
      if key not in drawn and splits.part_of(self.seed, key) == split:
        return a, sign, b
    raise ValueError(
        f"The {split!r} split has too few problems of max_digits="
        f"{self.max_digits} for examples={self.examples}: raise max_digits or "
        "show fewer examples."
    )

  def _operand(self, random):
    digits = random.randint(self.min_digits, self.max_digits)
    least = 10 ** (digits - 1) if digits > 1 else 0
    return random.randrange(least, 10**digits)


def solve(a: int, sign: str, b: int) -> str:
  """The result as text."""
  return str(_OPERATIONS[sign](a, b))


def canonical(a: int, sign: str, b: int) -> str:
  """A name for a problem that does not depend on the order of its operands."""
  if sign != "-":
    a, b = sorted((a, b))
  return f"{a}{sign}{b}"
