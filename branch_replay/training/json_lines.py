# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""JSON files with one object per line, in which NaN and infinity survive.

JSON has no NaN and no infinity. A number that is not finite is written as null,
and its value is noted beside it:

  {"step": 3, "loss": null, "not_finite": {"loss": "nan"}}
"""

import json
import math
import pathlib
from typing import Any

NOTE = "not_finite"


def plain(value: Any) -> tuple[Any, dict[str, str]]:
  """Replaces numbers that are not finite by None.

  Args:
    value: dicts, lists, numbers and text, as JSON has them.

  Returns:
    The value, and a dict from the path of each replaced number, as in
    "runs[2].loss", to "nan", "inf" or "-inf".
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
  """`json.dumps`, with the note for an object with numbers that are not finite.
  """
  value, found = plain(value)
  if found and isinstance(value, dict):
    value = {**value, NOTE: found}
  return json.dumps(value, allow_nan=False, **options)


def restored(row: dict) -> dict:
  """Puts an object's own noted numbers back; deeper ones stay null."""
  found = row.get(NOTE)
  if not isinstance(found, dict):
    return row
  mine = {name: float(found[name]) for name in found if name in row}
  row = {name: value for name, value in row.items() if name != NOTE}
  deeper = {path: what for path, what in found.items() if path not in mine}
  return row | mine | ({NOTE: deeper} if deeper else {})


def read(file: pathlib.Path) -> list[dict]:
  """Reads all complete lines of a file; an absent file has none.

  A line is complete if it ends with a line break. A process that is killed
  while it writes leaves half a line at the end, which is dropped.

  Args:
    file: a file with one JSON object per line.

  Returns:
    The objects, with their numbers restored.

  Raises:
    ValueError: a complete line that is not a JSON object.
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
  """Cuts off half a line at the end of a file, so that lines can be appended.
  """
  if not file.exists():
    return
  data = file.read_bytes()
  whole = data[: data.rfind(b"\n") + 1]
  if len(whole) < len(data):
    with file.open("r+b") as opened:
      opened.truncate(len(whole))
