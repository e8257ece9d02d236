# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics as JSON lines, one object a step, and for TensorBoard."""

import pathlib

import tensorboardX

from branch_replay.training import json_lines

FILE = "metrics.jsonl"


class Log:
  """Writes scalars; a run that is resumed has every step once.

  Args:
    directory: of metrics.jsonl and TensorBoard's event files.
    start: the last step that is done; what was logged of later ones is
      dropped, because they are run again. −1 drops everything.

  Raises:
    ValueError: see `read`.
  """

  def __init__(self, directory: pathlib.Path, *, start: int = -1):
    self._file = pathlib.Path(directory) / FILE
    self._file.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in read(directory) if row["step"] <= start]
    text = "".join(json_lines.dumps(row) + "\n" for row in rows)
    partial = self._file.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(self._file)
    self._board = tensorboardX.SummaryWriter(
        str(self._file.parent / "tensorboard"), purge_step=start + 1
    )

  def __enter__(self) -> "Log":
    return self

  def __exit__(self, *_) -> None:
    self._board.close()

  def write(self, step: int, phase: str, scalars: dict[str, float]) -> None:
    """Logs one step.

    Args:
      step: from 1 on, of all phases.
      phase: its name.
      scalars: by name; a "/" in one groups it in TensorBoard. One that is not
        finite is written as null, see `json_lines`.
    """
    with self._file.open("a") as file:
      row = {"step": step, "phase": phase, **scalars}
      file.write(json_lines.dumps(row) + "\n")
    for name, value in scalars.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()  # a checkpoint must not be ahead of it


def read(directory: pathlib.Path) -> list[dict]:
  """All complete lines of a metrics file; none if there is no file.

  Raises:
    ValueError: a line that is damaged, named by file and number; half a line at
      the end, as a kill may leave it, is dropped.
  """
  file = pathlib.Path(directory) / FILE
  rows = json_lines.read(file)
  for number, row in enumerate(rows, 1):
    if not isinstance(row.get("step"), int):
      raise ValueError(
          f"Line {number} of {file} is damaged: it has no step. Mend it or "
          "take it out."
      )
  return rows
