# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two ways to turn a task's text into ids: characters, and a chat model's.

Both classes have the same members: `name`, `vocab_size`, `stop_ids`; `prompt`
(a question, after an optional document), `answer` (to a prompt), `encode` and
`decode` (of a text alone), `fingerprint`; and `longest`, the most characters of
ordinary text in one token.
"""

import bisect
import dataclasses
import datetime
import hashlib
import json
from typing import Any
from typing import ClassVar

from branch_replay.weights import chat
from branch_replay.weights import encoding
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib

_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A question, after an optional document, as ids.

  Attributes:
    ids: ids of the whole prompt.
    ends: for every id, the index in the document of the character after it: 0
      or less before the document, more than its length after it.
    source: what `answer` needs to continue the prompt.
  """

  ids: list[int]
  ends: list[int]
  source: Any = None

  def position(self, character: int) -> int:
    """Index of the id that contains this character of the document."""
    return bisect.bisect_right(self.ends, character)


@dataclasses.dataclass(frozen=True)
class Characters:
  """One id per ASCII character, for small models trained from scratch.

  0 is padding, 1 begins a prompt, 2 ends an answer, 3 precedes the question;
  then newline and the printable characters follow, 100 ids in all.
  """

  name: ClassVar[str] = "characters"
  pad_id: ClassVar[int] = 0
  bos_id: ClassVar[int] = 1
  ask_id: ClassVar[int] = 3
  stop_ids: ClassVar[tuple[int, ...]] = (2,)
  longest: ClassVar[int] = 1
  vocab_size: ClassVar[int] = 4 + len(_CHARACTERS)

  def encode(self, text: str) -> list[int]:
    """Ids of a text.

    Raises:
      ValueError: the text has a character without an id.
    """
    lacking = sorted(set(text) - set(_CHARACTERS))
    if lacking:
      raise ValueError(
          f"The character vocabulary has no {lacking[:5]}: only newline and "
          "printable ASCII. Use a pretrained model's tokenizer for this text."
      )
    return [4 + _CHARACTERS.index(character) for character in text]

  def decode(self, ids: list[int]) -> str:
    """Text of ids; each special id becomes U+FFFD, so none disappears."""
    return "".join(
        _CHARACTERS[id_ - 4] if id_ >= 4 else "\ufffd" for id_ in ids
    )

  def prompt(self, question: str, document: str = "") -> Prompt:
    """A prompt: a question, after a document if there is one."""
    ids = [
        self.bos_id, *self.encode(document), self.ask_id,
        *self.encode(question),
    ]
    return Prompt(ids, list(range(len(ids))))

  def answer(self, prompt: Prompt, answer: str) -> list[int]:
    """Ids of an answer, with the stop id."""
    del prompt  # characters are written in the same way everywhere
    return [*self.encode(answer), self.stop_ids[0]]

  def fingerprint(self) -> str:
    """Text that differs if the same text would get other ids."""
    return _CHARACTERS


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
  """A pretrained model's tokenizer and chat template.

  A prompt is encoded as a whole, so that tokens may span its parts, as they did
  when the model was trained. If a document, a question or an answer spells a
  control token, it stays text. A model without a template gets plain text,
  preceded by the first token of its tokenizer if it has one.

  Attributes:
    pretrained: a model with a tokenizer and stop ids. Its `end_of_turn` ends
      the answers that are learnt from; any stop id ends a sampled answer.
    date: today's date for templates that write it.

  Raises:
    ValueError: no tokenizer or no stop ids.
  """

  name: ClassVar[str] = "chat"
  longest: ClassVar[int] = 10
  # Raise it when the same text gets other ids.
  version: ClassVar[int] = 2
  pretrained: pretrained_lib.Pretrained
  date: datetime.date = chat.DATE

  def __post_init__(self):
    if self.pretrained.tokenizer is None or not self.pretrained.stop_ids:
      raise ValueError(
          "The model's files hold no tokenizer or no stop ids: a task needs "
          "both. Use the character vocabulary with a model of your own."
      )

  @property
  def vocab_size(self) -> int:
    return self.pretrained.config.vocab_size

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return self.pretrained.stop_ids

  def encode(self, text: str) -> list[int]:
    """Ids of a text alone, without added tokens."""
    return chat.encode_text(self.pretrained, text).ids

  def decode(self, ids: list[int]) -> str:
    """Text of ids, with special tokens spelt out.

    If they were left out, "48<|x|>21" would become the number 4821. For the
    same reason an id without a token turns the whole text into U+FFFD.
    """
    backend = self.pretrained.tokenizer.backend_tokenizer
    if any(backend.id_to_token(id_) is None for id_ in ids):
      return "\ufffd"
    return backend.decode(ids, skip_special_tokens=False)

  def prompt(self, question: str, document: str = "") -> Prompt:
    """A prompt: a question, after a document if there is one; see `prompt_of`.
    """
    return prompt_of(self.pretrained, question, document, date=self.date)

  def answer(self, prompt: Prompt, answer: str) -> list[int]:
    """Ids of an answer to a prompt, with the end of the turn.

    The answer is encoded after its prompt. If that changes the prompt's last
    tokens, which are given, it is encoded at the start of a line instead.

    Raises:
      ValueError: the answer has a token without an embedding.
    """
    return [*self._after(prompt.source, answer), self.pretrained.end_of_turn]

  def _after(self, source, answer):
    line = chat.encode_text(self.pretrained, "\n")
    for context in (source, line):
      joined = encoding.encode(
          self.pretrained.tokenizer,
          [*context.pieces, encoding.Piece(answer)],
          vocab_size=self.vocab_size,
      )
      if joined.ids[: len(context.ids)] == context.ids:
        return joined.ids[len(context.ids) :]
    return self.encode(answer)

  def fingerprint(self) -> str:
    """Text that differs if the same text would get other ids."""
    parts = (
        self.version, self.pretrained.tokenizer.backend_tokenizer.to_str(),
        self.pretrained.tokenizer.special_tokens_map,
        self.pretrained.chat_template, self.stop_ids,
        self.pretrained.end_of_turn, self.date.isoformat(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def prompt_of(
    pretrained: pretrained_lib.Pretrained,
    question: str,
    document: str = "",
    *,
    date: datetime.date = chat.DATE,
) -> Prompt:
  """The prompt of a chat model: a question, after a document if there is one.

  Args:
    pretrained: a model with a tokenizer.
    question: any text.
    document: any text, or "".
    date: today's date for templates that write it.

  Returns:
    The prompt, encoded as a whole.

  Raises:
    ValueError: the template refuses the question or changes the document, or
      the embedding has no row for an id.
  """
  content = f"{document}\n\n{question}" if document else question
  if pretrained.chat_template is not None:
    messages = [{"role": "user", "content": content}]
    before, source = [], chat.encode_chat(pretrained, messages, date=date)
  else:
    before = tokenizer_lib.first_ids(pretrained.tokenizer)
    source = chat.encode_text(pretrained, content)
  ids = [*before, *source.ids]
  if not document:
    return Prompt(ids, [0] * len(ids), source)
  stripped = content.strip()  # because some templates do
  start = source.text.rfind(stripped)
  if start < 0:
    raise ValueError(
        "The chat template writes another text than the document of "
        f"{len(document)} characters and its question."
    )
  start -= content.find(stripped)
  ends = [0] * len(before) + [end - start for end in source.ends]
  return Prompt(ids, ends, source)


Text = Characters | Chat
