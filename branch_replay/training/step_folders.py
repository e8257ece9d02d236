# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders of saved steps: which are complete, and moving the others aside.

orbax takes every folder with a number for a name as a saved step, and does not
save a step if there is a folder of it or of a later one. So a folder that is
empty or half copied is moved aside before a run resumes.
"""

from collections.abc import Sequence
import json
import pathlib
import warnings

MARKER = "commit_success.txt"
ASIDE = "unfinished"


def numbered(directory: pathlib.Path) -> list[int]:
  """Steps that have a folder, the newest first."""
  if not directory.is_dir():
    return []
  return sorted(
      (
          int(path.name) for path in directory.iterdir()
          if path.is_dir() and path.name.isdecimal()
      ),
      reverse=True,
  )


def lacks(folder: pathlib.Path, items: Sequence[str]) -> str:
  """What a step's folder lacks to be complete, as text; empty if nothing.

  Args:
    folder: folder of the step.
    items: names of the items that were saved in it.
  """
  if not any(folder.iterdir()):
    return "it is empty"
  for name in (MARKER, "_CHECKPOINT_METADATA"):
    if not (folder / name).is_file():
      return f"it has no {name}"
  for item in items:
    for name in (item, f"{item}/{MARKER}"):
      if not (folder / name).exists():
        return f"it has no {name}"
    if (folder / item / "metadata").is_file():
      try:
        json.loads((folder / item / "metadata").read_text())
      except ValueError:
        return f"{item}/metadata is no JSON"
    elif not (folder / item / "_METADATA").is_file():
      return f"it has no {item}/_METADATA"
  return ""


def complete(directory: pathlib.Path, items: Sequence[str]) -> list[int]:
  """Steps whose folders are complete, the newest first."""
  return [
      step for step in numbered(directory)
      if not lacks(directory / str(step), items)
  ]


def set_aside(directory: pathlib.Path, step: int, why: str) -> None:
  """Moves a step's folder aside, so that the step can be saved, and warns."""
  aside = directory.parent / ASIDE
  aside.mkdir(exist_ok=True)
  number = 0
  while (target := aside / f"{step}-{number}").exists():
    number += 1
  (directory / str(step)).rename(target)
  warnings.warn(
      f"Ignored {directory / str(step)}: {why}. It is now {target}.",
      stacklevel=3,
  )
