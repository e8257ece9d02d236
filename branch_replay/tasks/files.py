# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A task of one's own: prompts from files, and a reward from a function.

Rows are read from JSONL or Parquet files and become ids when they are needed;
nothing is written. docs/data.md says what a row may hold.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from typing import ClassVar
from typing import Literal
from typing import get_args
import warnings

import numpy as np

from branch_replay import checks
from branch_replay.tasks import rewards
from branch_replay.tasks import row_files
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

TooLong = Literal["error", "skip"]
_HELD_OUT = 256  # most rows of `train` that become the split "validation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
  """Where the rows of a task are, and how answers to them are scored.

  Attributes:
    train: path of a .jsonl or .parquet file.
    validation: path of another; "" takes rows out of `train`, a tenth of them
      and at most 256, chosen by a hash of their prompts. Rows with the same
      prompt stay together.
    test: path of another; "" for no such split.
    reward: "FILE.py:FUNCTION", or several of these separated by commas; or a
      function (text of an answer, fields of the row) -> number; or a sequence
      of functions and such names. "" for none: then phases and evaluations that
      sample answers are refused.
    weights: a factor for each reward; () for 1 each.
    workers: processes that score answers side by side; 0 for none.
    timeout: most seconds that a reward may take for one answer; 0 for no limit.
    timeout_reward: what a reward that took longer is; None for an error.
    prompt_field: field of the prompt.
    raw: whether prompts are encoded as they are, without the chat template, as
      base models need them.
    max_prompt_tokens: most ids of a prompt; 0 for as many as the model has
      positions, if it is a pretrained one.
    max_answer_tokens: most ids of a known answer, its stop id included; 0 for
      any number.
    too_long: what becomes of a row with a longer prompt or answer: "error" or
      "skip". Rows that were skipped are counted in a warning.
  """

  name: ClassVar[str] = "file"

  train: str = ""
  validation: str = ""
  test: str = ""
  reward: str | rewards.Function | Sequence[str | rewards.Function] = ""
  weights: Sequence[float] = ()
  workers: int = 0
  timeout: float = 0.0
  timeout_reward: float | None = None
  prompt_field: str = "prompt"
  raw: bool = False
  max_prompt_tokens: int = 0
  max_answer_tokens: int = 0
  too_long: TooLong = "error"

  def __post_init__(self):
    for split in splits.SPLITS:
      checks.instance(getattr(self, split), split, (str, os.PathLike))
    if not self.train:
      raise ValueError(
          "Task 'file' needs rows: name a file, as in train='prompts.jsonl'."
      )
    for field in ("max_prompt_tokens", "max_answer_tokens"):
      checks.integer(getattr(self, field), field, 0)
    checks.flag(self.raw, "raw")
    if self.too_long not in get_args(TooLong):
      raise task_lib.unknown("too_long", self.too_long, get_args(TooLong))
    if not self.reward and (
        self.workers or self.timeout or self.timeout_reward is not None
        or len(self.weights)
    ):
      raise ValueError(
          f"weights={self.weights}, workers={self.workers}, timeout="
          f"{self.timeout}, timeout_reward={self.timeout_reward} without a "
          "reward: name one, or leave them out."
      )

  def task(self, text: text_lib.Text) -> task_lib.Task:
    """Reads the files and loads the reward.

    Args:
      text: how text becomes ids.

    Returns:
      The task, checked.

    Raises:
      ValueError: a file or row that cannot be read, a row that is too long, a
        reward that cannot be loaded, or `tasks.check` fails.
    """
    score = None
    if self.reward:
      score = rewards.create(
          self.reward, text=text, weights=self.weights, workers=self.workers,
          timeout=self.timeout, timeout_reward=self.timeout_reward,
      )
    task = task_lib.Task(
        self.name, text.vocab_size, tuple(text.stop_ids), score,
        self._rows(text),
    )
    task_lib.check(task)
    return task

  def _rows(self, text) -> dict[str, "Rows"]:
    room = self.max_prompt_tokens
    if not room and isinstance(text, text_lib.Chat):
      room = text.pretrained.config.max_positions - 1
    reader = Reader(text, self.raw, room, self.max_answer_tokens)
    tables = {}
    for split in splits.SPLITS:
      if getattr(self, split):
        table = row_files.read(
            getattr(self, split), split=split, prompt_field=self.prompt_field
        )
        tables[split] = dataclasses.replace(
            table, rows=self._that_fit(table, reader)
        )
    if "validation" not in tables:
      train = tables["train"]
      kept, held_out = hold_out(train)
      tables["train"] = dataclasses.replace(train, rows=kept)
      tables["validation"] = dataclasses.replace(train, rows=held_out)
    return {
        split: Rows(tables[split], reader) for split in splits.SPLITS
        if split in tables
    }

  def _that_fit(self, table, reader) -> list[row_files.Row]:
    """The rows of a table that are not too long."""
    kept = []
    for row in table.rows:
      why = reader.too_long(row)
      if not why:
        kept.append(row)
      elif self.too_long == "error":
        raise ValueError(
            f"{row.where}: {why}. Shorten it, raise the limit, or leave such "
            "rows out, too_long='skip'."
        )
    left_out = len(table.rows) - len(kept)
    if not kept:
      raise ValueError(f"All {left_out} rows of {table.path} are too long.")
    if left_out:
      warnings.warn(
          f"Left out {left_out} of the {len(table.rows)} rows of {table.path}: "
          f"their prompts have more than {reader.max_prompt} ids or, if there "
          f"is a limit, their answers more than {reader.max_answer or 'any'}.",
          stacklevel=2,
      )
    return kept


@dataclasses.dataclass(frozen=True)
class Reader:
  """Turns rows into examples.

  Attributes:
    text: how text becomes ids.
    raw: whether prompts are encoded without a template.
    max_prompt: most ids of a prompt; 0 for any number.
    max_answer: most ids of an answer; 0 for any number.
  """

  text: text_lib.Text
  raw: bool
  max_prompt: int
  max_answer: int

  def example(self, row: row_files.Row) -> task_lib.Example:
    """The example of a row; raises ValueError that names the row."""
    try:
      prompt = self._prompt(row.prompt)
      answer, rejected = (
          None if said is None
          else np.asarray(self.text.answer(prompt, said), np.int32)
          for said in (row.answer, row.rejected)
      )
    except ValueError as error:
      raise ValueError(f"{row.where}: {error}") from error
    return task_lib.Example(
        row.id, np.asarray(prompt.ids, np.int32), answer, row.answer,
        row.fields, rejected,
    )

  def too_long(self, row: row_files.Row) -> str:
    """Says what of a row is too long; "" if nothing is.

    A row is only encoded if a bound on its ids says that it may be too long.

    Raises:
      ValueError: a prompt that cannot be encoded; the message names the row.
    """
    try:
      if self.raw and not isinstance(row.prompt, str):
        raise ValueError(
            f"raw=True encodes prompts as they are, and these are "
            f"{len(row.prompt)} messages: write the prompt as text."
        )
      bound = self.text.bound(row.prompt)
    except ValueError as error:
      raise ValueError(f"{row.where}: {error}") from error
    answers = [said for said in (row.answer, row.rejected) if said is not None]
    longest = max((len(said.encode()) for said in answers), default=0) + 2
    short = not self.max_answer or longest <= self.max_answer
    if short and (not self.max_prompt or bound <= self.max_prompt):
      return ""
    example = self.example(row)
    size = example.prompt_ids.size
    if self.max_prompt and size > self.max_prompt:
      return f"the prompt has {size} ids, more than {self.max_prompt}"
    for ids in (example.answer_ids, example.rejected_ids):
      if self.max_answer and ids is not None and ids.size > self.max_answer:
        return f"an answer has {ids.size} ids, more than {self.max_answer}"
    return ""

  def _prompt(self, prompt) -> text_lib.Prompt:
    if not isinstance(prompt, str):
      return self.text.conversation(prompt)
    return self.text.plain(prompt) if self.raw else self.text.prompt(prompt)


class Rows(Sequence):
  """The rows of a split as examples, each encoded when it is read.

  Attributes:
    digest: differs if the file has another content, or if its rows become other
      ids or are divided among the splits otherwise.
  """

  def __init__(self, table: row_files.Table, reader: Reader):
    self._rows, self._reader = table.rows, reader
    # The file has fields for the reward; prompts also depend on settings.
    found = hashlib.sha256(
        _bytes(table.digest, reader.raw, reader.text.fingerprint())
    )
    for row in table.rows:
      found.update(_bytes(row.id, row.prompt, row.answer, row.rejected))
    self.digest = found.hexdigest()[:16]

  def __len__(self):
    return len(self._rows)

  def __getitem__(self, index: int) -> task_lib.Example:
    return self._reader.example(self._rows[range(len(self))[index]])


def hold_out(
    table: row_files.Table,
) -> tuple[list[row_files.Row], list[row_files.Row]]:
  """Divides rows into those to train on and those held out.

  A tenth is held out, at least one row and at most 256: the rows whose prompts
  have the smallest hashes. Rows with the same prompt stay together, in training
  if they are more than may be held out.

  Returns:
    The rows to train on and the held-out rows, both in the order of the file.

  Raises:
    ValueError: fewer than two rows that differ in their prompts.
  """
  most = min(_HELD_OUT, max(1, len(table.rows) // 10))
  places: dict[bytes, list[int]] = {}
  for at, row in enumerate(table.rows):
    key = hashlib.blake2b(_bytes(row.prompt), digest_size=8).digest()
    places.setdefault(key, []).append(at)
  chosen: set[int] = set()
  for key in sorted(places):
    if len(chosen) + len(places[key]) <= most:
      chosen.update(places[key])
  if not chosen or len(chosen) == len(table.rows):
    raise ValueError(
        f"The {len(table.rows)} rows of {table.path} cannot be divided: some "
        "are held out of training to evaluate on, none of which may have a "
        "prompt that is trained on. Name a file, validation=..."
    )
  kept, held_out = [], []
  for at, row in enumerate(table.rows):
    (held_out if at in chosen else kept).append(row)
  return kept, held_out


def _bytes(*values) -> bytes:
  return json.dumps(values, sort_keys=True, default=str).encode()


def from_files(
    train: str,
    *,
    text: text_lib.Text = text_lib.Characters(),
    **settings,
) -> task_lib.Task:
  """A task whose rows are in files.

  Args:
    train: path of a .jsonl or .parquet file; see `Files`.
    text: how text becomes ids.
    **settings: further attributes of `Files`.

  Returns:
    The task, checked.

  Raises:
    ValueError: an unknown setting, or what `Files.task` raises.
  """
  known = [field.name for field in dataclasses.fields(Files)]
  for setting in settings:
    if setting not in known:
      raise task_lib.unknown("setting of task 'file'", setting, known)
  return Files(train=train, **settings).task(text)
