# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON that every reader of JSON reads, and files with an object a line.

JSON has no NaN and no infinity. A number that is not finite is written as null,
and what it was is noted beside it:

  {"step": 3, "loss": null, "not_finite": {"loss": "nan"}}
"""

import json
import math
import pathlib
from typing import Any

NOTE = "not_finite"


def plain(value: Any) -> tuple[Any, dict[str, str]]:
  """The value with null for numbers that are not finite, and what they were.

  Args:
    value: what JSON can hold, but for such numbers.

  Returns:
    The value, and "nan", "inf" or "-inf" by the number's path, as in
    "runs[2].loss".
  """
  found = {}

  def walk(value, path):
    if isinstance(value, float) and not math.isfinite(value):
      found[path] = str(float(value))
      return None
    if isinstance(value, dict):
      return {
          key: walk(child, f"{path}.{key}" if path else str(key))
          for key, child in value.items()
      }
    if isinstance(value, (list, tuple)):
      return [walk(child, f"{path}[{at}]") for at, child in enumerate(value)]
    return value

  return walk(value, ""), found


def dumps(value: Any, **options) -> str:
  """`json.dumps`, with a note in an object that had a number not finite."""
  value, found = plain(value)
  if found and isinstance(value, dict):
    value = {**value, NOTE: found}
  return json.dumps(value, allow_nan=False, **options)


def restored(row: dict) -> dict:
  """An object as it was before `dumps`, as far as its own numbers go."""
  found = row.get(NOTE)
  if not isinstance(found, dict):
    return row
  mine = {name: float(found[name]) for name in found if name in row}
  row = {name: value for name, value in row.items() if name != NOTE}
  deeper = {path: what for path, what in found.items() if path not in mine}
  return row | mine | ({NOTE: deeper} if deeper else {})


def read(file: pathlib.Path) -> list[dict]:
  """All complete lines of a file; none if there is no file.

  A line is complete with its line break: half a line at the end is what a
  process leaves that is killed while it writes, and is dropped.

  Args:
    file: with one JSON object a line.

  Returns:
    The objects, numbers that are not finite among them.

  Raises:
    ValueError: a complete line that is no JSON object.
  """
  if not file.exists():
    return []
  rows = []
  lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
  for number, line in enumerate(lines[:-1], 1):
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError("no object")
    except ValueError as error:
      raise ValueError(
          f"Line {number} of {file} is damaged ({error}): {line[:60]!r}. Mend "
          "it or take it out."
      ) from error
    rows.append(restored(row))
  return rows


def mend(file: pathlib.Path) -> None:
  """Drops half a line at the end of a file, so that lines can be appended."""
  if not file.exists():
    return
  data = file.read_bytes()
  whole = data[: data.rfind(b"\n") + 1]
  if len(whole) < len(data):
    with file.open("r+b") as opened:
      opened.truncate(len(whole))
