# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers and sampled answers of a run as JSON lines, and to other writers."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib

from branch_replay.training import json_lines
from branch_replay.training import writers as writers_lib

FILE = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"


class Log:
  """Writes the two files. A run that resumes has every step once.

  Args:
    directory: folder of metrics.jsonl, one object a step, and
      completions.jsonl, one object for each prompt that was picked.
    start: last step that is done. Lines of later steps are dropped, because
      these steps will run again; −1 drops every line.
    steps: all steps of the run, which other writers may show.
    writers: functions that open other writers. They are told all that the files
      are.

  Raises:
    ValueError: a damaged line, see `read`.
  """

  def __init__(
      self, directory: pathlib.Path, *, start: int = -1, steps: int = 0,
      writers: Sequence[writers_lib.Open] = (),
  ):
    self._directory = pathlib.Path(directory)
    self._directory.mkdir(parents=True, exist_ok=True)
    for name in (FILE, COMPLETIONS):
      self._drop(name, start)
    place = writers_lib.Place(self._directory, start, steps)
    self._open = contextlib.ExitStack()
    self._others = [
        self._open.enter_context(contextlib.closing(make(place)))
        for make in writers
    ]

  def __enter__(self) -> "Log":
    return self

  def __exit__(self, *_) -> None:
    self._open.close()

  def _drop(self, name: str, start: int) -> None:
    rows = [
        row for row in read(self._directory, name) if row["step"] <= start
    ]
    text = "".join(json_lines.dumps(row) + "\n" for row in rows)
    file = self._directory / name
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)

  def write(self, step: int, phase: str, scalars: Mapping[str, float]) -> None:
    """Logs the scalars of one step; see `writers.Writer`.

    A number that is not finite is written as null, see `json_lines`.
    """
    self._append(FILE, [{"step": step, "phase": phase, **scalars}])
    for other in self._others:
      other.write(step, phase, scalars)

  def completions(self, step: int, rows: Sequence[dict]) -> None:
    """Logs sampled answers of one step, before its scalars."""
    self._append(COMPLETIONS, rows)
    for other in self._others:
      other.completions(step, rows)

  def _append(self, name: str, rows: Sequence[dict]) -> None:
    with (self._directory / name).open("a", encoding="utf-8") as file:
      file.write("".join(json_lines.dumps(row) + "\n" for row in rows))


def read(directory: pathlib.Path, name: str = FILE) -> list[dict]:
  """Reads all complete lines of one of the files; an absent file has none.

  Half a line at the end, as a kill may leave it, is dropped.

  Args:
    directory: the run's folder.
    name: `FILE` or `COMPLETIONS`.

  Raises:
    ValueError: a damaged line; the message names file and number.
  """
  file = pathlib.Path(directory) / name
  rows = json_lines.read(file)
  for number, row in enumerate(rows, 1):
    if not isinstance(row.get("step"), int):
      raise ValueError(
          f"Line {number} of {file} is damaged: it has no step. Mend it or "
          "take it out."
      )
  return rows
