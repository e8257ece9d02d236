# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Real text that is on every machine, as prompts of an exact length."""

from branch_replay.tasks import documents
from branch_replay.weights import chat
from branch_replay.weights import pretrained as pretrained_lib

_QUESTION = "In two sentences: what is this text about, and whom is it for?"
_MARK = "<<the document goes here>>"


def document(path: str) -> str:
  """The text of a file; of an empty path the Python language reference.

  Raises:
    ValueError: no such file.
  """
  return "\n\n".join(documents.read(path, documents.language_reference))


def about_document(
    pretrained: pretrained_lib.Pretrained,
    text: str,
    tokens: int,
    *,
    question: str = _QUESTION,
    needle: str = "",
    depth: float = 0.5,
) -> list[int]:
  """A prompt of exactly `tokens` ids: a document and a question on it.

  Args:
    pretrained: model with tokenizer and chat template.
    text: the document, of which as much is used as fits.
    tokens: length of the whole prompt.
    question: asked after the document.
    needle: a sentence to hide in the document.
    depth: where to hide it, 0 at the start and 1 at the end.

  Returns:
    Ids.

  Raises:
    ValueError: the document is too short, or the prompt too short for the
      question.
  """
  def encode(part):
    return pretrained.tokenizer.encode(part, add_special_tokens=False).ids

  content = f"{_MARK}\n\n{question}"
  if pretrained.chat_template is not None:  # else a base model: plain text
    content = chat.render_chat(
        pretrained, [{"role": "user", "content": content}]
    )
  before, after = (encode(part) for part in content.split(_MARK))
  hidden = encode(f"\n\n{needle}\n\n") if needle else []
  room = tokens - len(before) - len(after) - len(hidden)
  if room < 1:
    raise ValueError(
        f"prompt_tokens={tokens} leaves no room for a document: the question "
        f"and the chat template alone take {len(before) + len(after)}."
    )
  # Four characters a token are more than this kind of text needs; ten suffice
  # for any.
  body = encode(text[: 10 * room])[:room]
  if len(body) < room:
    raise ValueError(
        f"The document has {len(body)} tokens; prompt_tokens={tokens} needs "
        f"{room}. Name a longer one with --config.document=FILE."
    )
  cut = int(depth * room)
  return before + body[:cut] + hidden + body[cut:] + after
