# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of the package reasoning-gym, with its own scorers.

The package is optional: pip install -c constraints.txt -e ".[reasoning]".
"""

from collections.abc import Iterator
import dataclasses
import functools
import importlib.metadata
import json
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from branch_replay import checks
from branch_replay.tasks import builder
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

# Candidates per row, because reasoning-gym repeats questions.
_SPARE = 20


class ReasoningGymRows(builder.RowsBuilder, skip_registration=True):
  """Rows of `ReasoningGym`."""

  name = "reasoning_gym"
  VERSION = tfds.core.Version("1.0.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym(builder.Recipe):
  """One data set of reasoning-gym.

  The reward is 1 if the data set's scorer gives full marks, and 0 otherwise.
  Partial marks are ignored, because many scorers give one half to any text that
  contains the answer, and a hundredth to any text at all. A scorer that raises
  an error could not parse the answer, which counts as 0.

  No question is in two splits. A data set without a single right answer, or
  whose scorer needs data that JSON cannot hold, is refused when it is prepared.

  Attributes:
    dataset: name of the data set in reasoning-gym.
    parameters: settings of the data set as JSON; seed and size are set here.
    shots: how many solved questions stand before every question, as turns of
      the user and the assistant. They are the same for all questions, and in no
      split. A scorer wants the bare answer, which a chat model gives when it
      has seen it done. Needs a model with a chat template.
  """

  name: ClassVar[str] = "reasoning_gym"
  rows_builder: ClassVar[type[builder.RowsBuilder]] = ReasoningGymRows

  dataset: str = "leg_counting"
  parameters: str = "{}"
  shots: int = 0

  def ingredients(self) -> str:
    """The version of reasoning-gym."""
    package()
    return importlib.metadata.version("reasoning-gym")

  def rows(
      self, text: text_lib.Text, split: str
  ) -> Iterator[task_lib.Example]:
    """Yields the rows of a split.

    Raises:
      ValueError: the data set has too few questions, or one without an answer.
    """
    made = 0
    # reasoning-gym seeds item i with seed + i, so data sets of neighbouring
    # seeds are almost equal. Therefore all splits share one data set, and the
    # text of a question decides which split it belongs to.
    rows = sum(getattr(self, name) for name in splits.SPLITS)
    data = self._data(_SPARE * rows)
    shots = self._shots(data)
    seen = {shot["content"] for shot in shots if shot["role"] == "user"}
    for index in range(len(data)):
      entry = data[index]
      question = entry["question"].strip()
      if question in seen or splits.part_of(self.seed, question) != split:
        continue
      seen.add(question)
      yield self._row(text, self.row_id(split, made), entry, shots)
      made += 1
      if made == getattr(self, split):
        return
    raise ValueError(
        f"reasoning-gym's {self.dataset!r} gave {made} different questions to "
        f"the {split!r} split among {len(data)}; {getattr(self, split)} were "
        "asked for. Ask for fewer, or make it harder with parameters."
    )

  def scorer(self, text: text_lib.Text):
    """1 for full marks by the data set's own scorer."""
    data = self._data(1)

    def score(example, ids):
      try:
        marks = data.score_answer(text.decode(ids).strip(), example.details)
      except Exception:  # of any kind: it parses arbitrary text
        return 0.0
      return float(marks == 1)

    return score

  def _shots(self, data) -> list[dict[str, str]]:
    """The messages of the first different questions and their answers."""
    checks.integer(self.shots, "shots", 0)
    found = {}
    for index in range(len(data)):
      if len(found) == self.shots:
        break
      entry = data[index]
      found.setdefault(entry["question"].strip(), str(entry["answer"]))
    return [
        {"role": role, "content": content} for pair in found.items()
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]

  def _row(self, text, row_id, entry, shots):
    answer = entry["answer"]
    if not isinstance(answer, str):
      raise ValueError(
          f"reasoning-gym's {self.dataset!r} has no single answer to learn "
          "from. Choose another data set."
      )
    try:
      details = json.loads(json.dumps(entry))
    except TypeError as error:
      raise ValueError(
          f"reasoning-gym's {self.dataset!r} gives its scorer what JSON cannot "
          f"hold: {error}. Choose another data set."
      ) from error
    question = entry["question"].strip()
    prompt = text.prompt(question)
    if shots:
      asked = {"role": "user", "content": question}
      prompt = text.conversation([*shots, asked])
    return task_lib.Example(
        id=row_id,
        prompt_ids=np.asarray(prompt.ids, np.int32),
        answer_ids=np.asarray(text.answer(prompt, answer), np.int32),
        answer=answer,
        details=details,
    )

  def _data(self, size):
    gym = package()
    if self.dataset not in gym.factory.DATASETS:
      raise task_lib.unknown(
          "data set of reasoning-gym", self.dataset, gym.factory.DATASETS
      )
    try:
      parameters = json.loads(self.parameters)
      return gym.create_dataset(
          self.dataset, **parameters, seed=self.seed, size=size
      )
    except (TypeError, ValueError, AssertionError) as error:
      raise ValueError(
          f"reasoning-gym refused parameters={self.parameters!r} of "
          f"{self.dataset!r}: {error}"
      ) from error


@functools.cache
def package():
  """The module reasoning_gym; raises ValueError if it is not installed."""
  try:
    import reasoning_gym
    import reasoning_gym.factory
  except ImportError as error:
    raise ValueError(
        "The task 'reasoning_gym' needs a package of that name: "
        'pip install -c constraints.txt -e ".[reasoning]"'
    ) from error
  return reasoning_gym
