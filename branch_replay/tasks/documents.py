# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has, divided among the splits."""

import functools
import pathlib
import pydoc_data.topics
import random
import re

from branch_replay.tasks import splits


def language_reference() -> tuple[str, ...]:
  """The topics of the Python language reference, which Python ships with."""
  topics = pydoc_data.topics.topics
  return tuple(topics[name] for name in sorted(topics))


@functools.cache
def standard_library() -> tuple[str, ...]:
  """The Python language reference and the source of the standard library.

  These are a few million characters, which differ between versions of Python.
  """
  folder = pathlib.Path(random.__file__).parent
  sources = sorted(folder.glob("[a-z]*.py"))
  return (
      *language_reference(),
      *(path.read_text(encoding="utf-8") for path in sources),
  )


def read(path: str, otherwise=standard_library) -> tuple[str, ...]:
  """The document in a file; for an empty path what `otherwise` returns.

  Raises:
    ValueError: no such file.
  """
  if not path:
    return otherwise()
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise ValueError(f"document={path!r} is not a file.")
  return (file.read_text(encoding="utf-8"),)


def divide(documents: tuple[str, ...], *, seed: int, split: str) -> str:
  """The text of one split; no paragraph is in two splits.

  Documents are shuffled by the seed, so every split has some of each kind.
  Paragraphs that occur several times, such as licences, are kept once. Tabs
  become spaces, and characters outside printable ASCII question marks.

  Raises:
    ValueError: too little text for three splits.
  """
  order = list(documents)
  splits.generator(seed, "documents").shuffle(order)
  plain = re.sub(r"[^\n -~]", "?", "\n\n".join(order).expandtabs(4))
  paragraphs = {}
  for paragraph in plain.split("\n\n"):
    if paragraph.strip():
      paragraphs.setdefault(paragraph.strip(), paragraph)
  kept = list(paragraphs.values())
  # By length and not by number: a split might get only short paragraphs.
  total = sum(map(len, kept))
  part = splits.bounds(total)[split]
  chosen, at = [], 0
  for paragraph in kept:
    if part.start <= at < part.stop:
      chosen.append(paragraph)
    at += len(paragraph)
  if not chosen:
    raise ValueError(
        f"{len(kept)} paragraphs of {total} characters leave none for the "
        f"{split!r} split. Name a longer text, document=FILE."
    )
  return "\n\n".join(chosen)
