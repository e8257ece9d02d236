# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Real text that is on every machine, as prompts of an exact length."""

import importlib.util
import pathlib

from branch_replay.tasks import documents
from branch_replay.tasks import retrieval
from branch_replay.tasks import text as text_lib
from branch_replay.weights import pretrained as pretrained_lib

_QUESTION = "In two sentences: what is this text about, and whom is it for?"


def document(path: str) -> str:
  """The text of a file; of an empty path the Python language reference.

  Raises:
    ValueError: no such file.
  """
  return "\n\n".join(documents.read(path, documents.language_reference))


def texts() -> list[str]:
  """Five long texts: the reference, and modules mostly of prose or of code."""
  return [document("")] + [
      pathlib.Path(importlib.util.find_spec(name).origin)
      .read_text(encoding="utf-8")
      for name in ("_pydecimal", "argparse", "tarfile", "statistics")
  ]


def bytes_of(pretrained: pretrained_lib.Pretrained, text: str) -> list[int]:
  """Ids for a model without a tokenizer."""
  return [byte % pretrained.config.vocab_size for byte in text.encode()]


def about_document(
    pretrained: pretrained_lib.Pretrained, text: str, tokens: int, *,
    question: str = _QUESTION, needle: str = "", depth: float = 0.5,
) -> list[int]:
  """A prompt of exactly `tokens` ids: a document and a question on it.

  The whole prompt is encoded at once, so the document's end is searched for at
  which it has the length.

  Args:
    pretrained: the model; one without a tokenizer reads the document's bytes.
    text: the document, of which as much is used as fits.
    tokens: length of the whole prompt.
    question: asked after the document.
    needle: a sentence to hide in the document.
    depth: where to hide it, 0 at the start and 1 at the end.

  Returns:
    Ids.

  Raises:
    ValueError: the document is too short, the prompt too short for the
      question, or no end of the document gives exactly this length.
  """
  if pretrained.tokenizer is None:
    ids = bytes_of(pretrained, text[:tokens])[:tokens]
    if len(ids) < tokens:
      raise ValueError(
          f"The document has {len(ids)} bytes; prompt_tokens={tokens} needs as "
          "many."
      )
    return ids

  def prompt(size):
    document, cut = text[:size], int(depth * size)
    if needle:
      document = f"{text[:cut]}\n\n{needle}\n\n{text[cut:size]}"
    return text_lib.prompt_of(pretrained, question, document).ids

  least = len(prompt(0))
  room = tokens - least
  if room < 1:
    raise ValueError(
        f"prompt_tokens={tokens} leaves no room for a document: the question "
        f"and the chat template alone take {least}."
    )
  # Four characters a token are more than this kind of text needs; ten suffice
  # for any.
  most = min(len(text), 10 * room)
  size = retrieval.fitting(
      lambda size: len(prompt(size)), tokens, most=most, guess=4 * room
  )
  if size is None:
    found = len(prompt(most))
    if found < tokens:
      raise ValueError(
          f"The document has {found - least} tokens; prompt_tokens={tokens} "
          f"needs {room}. Name a longer one with --config.document=FILE."
      )
    raise ValueError(
        f"No part of the document gives exactly prompt_tokens={tokens}: ask "
        "for one more or less."
    )
  return prompt(size)
