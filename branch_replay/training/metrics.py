# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run as JSON lines, one object per step, and for TensorBoard."""

import pathlib

import tensorboardX

from branch_replay.training import json_lines

FILE = "metrics.jsonl"


class Log:
  """Writes scalars. A run that resumes has every step once.

  Args:
    directory: folder of metrics.jsonl and TensorBoard's event files.
    start: last step that is done. Lines of later steps are dropped, because
      these steps will run again; −1 drops every line.

  Raises:
    ValueError: a damaged line, see `read`.
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
    """Logs the scalars of one step.

    Args:
      step: number of the step, counted from 1 over all phases.
      phase: name of the phase.
      scalars: numbers by name; a "/" in a name groups it in TensorBoard. A
        number that is not finite is written as null, see `json_lines`.
    """
    with self._file.open("a") as file:
      row = {"step": step, "phase": phase, **scalars}
      file.write(json_lines.dumps(row) + "\n")
    for name, value in scalars.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()  # a checkpoint must not get ahead of the log


def read(directory: pathlib.Path) -> list[dict]:
  """Reads all complete lines of metrics.jsonl; an absent file has none.

  Half a line at the end, as a kill may leave it, is dropped.

  Raises:
    ValueError: a damaged line; the message names file and number.
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
