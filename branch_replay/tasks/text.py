# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two ways to turn a task's text into ids: characters, and a chat model's.

Both classes have the same members: `name`, `vocab_size`, `stop_ids`; `prompt`
(a question, after an optional document), `plain` (a prompt without a frame),
`conversation` (a prompt of messages), `bound` (on the ids of a prompt),
`answer` (to a prompt), `encode` and `decode` (of a text alone), `fingerprint`;
and `longest`, the most characters of ordinary text in one token.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import datetime
import functools
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
    self._check(text)
    return [4 + _CHARACTERS.index(character) for character in text]

  def _check(self, text: str) -> None:
    lacking = sorted(set(text) - set(_CHARACTERS))
    if lacking:
      raise ValueError(
          f"The character vocabulary has no {lacking[:5]}: only newline and "
          "printable ASCII. Use a pretrained model's tokenizer for this text."
      )

  def decode(self, ids: list[int]) -> str:
    """Text of ids; each special id becomes U+FFFD, so none disappears."""
    return "".join(
        _CHARACTERS[id_ - 4] if 4 <= id_ < self.vocab_size else "\ufffd"
        for id_ in ids
    )

  def prompt(self, question: str, document: str = "") -> Prompt:
    """A prompt: a question, after a document if there is one."""
    ids = [
        self.bos_id, *self.encode(document), self.ask_id,
        *self.encode(question),
    ]
    return Prompt(ids, list(range(len(ids))))

  def plain(self, text: str) -> Prompt:
    """A prompt that is only a text, after the id that begins prompts."""
    ids = [self.bos_id, *self.encode(text)]
    return Prompt(ids, list(range(len(ids))))

  def conversation(self, messages: Sequence[Mapping]) -> Prompt:
    """Raises ValueError: characters have no ids for the roles of messages."""
    raise ValueError(
        f"{len(messages)} messages need the chat template of a pretrained "
        "model, and the character vocabulary has none: write the prompt as "
        "text."
    )

  def bound(self, prompt: str | Sequence[Mapping]) -> int:
    """No prompt of this text has more ids; see `Chat.bound`."""
    if not isinstance(prompt, str):
      self.conversation(prompt)
    self._check(prompt)
    return 2 + len(prompt)

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

  def plain(self, text: str) -> Prompt:
    """A prompt without the template: the first token, if any, and a text."""
    return plain_of(self.pretrained, text)

  def conversation(self, messages: Sequence[Mapping]) -> Prompt:
    """A prompt of messages, up to the header of the assistant's answer.

    Args:
      messages: {"role": ..., "content": ...}, in order.

    Raises:
      ValueError: there is no template, or it refuses the messages.
    """
    source = chat.encode_chat(self.pretrained, messages, date=self.date)
    return Prompt(source.ids, [0] * len(source.ids), source)

  def bound(self, prompt: str | Sequence[Mapping]) -> int:
    """A number of ids that a prompt does not exceed, found without encoding it.

    A tokenizer makes at most one id of a byte, unless it rewrites characters
    before it divides them, as few do and to few characters.

    Args:
      prompt: a text or messages.

    Raises:
      ValueError: the template refuses the messages.
    """
    if isinstance(prompt, str):
      return self._frame + len(prompt.encode())
    rendered = chat.render_chat(self.pretrained, prompt, date=self.date)
    return self._frame + len(rendered.encode())

  @functools.cached_property
  def _frame(self) -> int:
    """Ids of a prompt with next to no text."""
    return len(self.prompt("?").ids)

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
    source = chat.encode_chat(pretrained, messages, date=date)
    whole = Prompt(source.ids, [0] * len(source.ids), source)
  else:
    whole = plain_of(pretrained, content)
  if not document:
    return whole
  source = whole.source
  stripped = content.strip()  # because some templates do
  start = source.text.rfind(stripped)
  if start < 0:
    raise ValueError(
        "The chat template writes another text than the document of "
        f"{len(document)} characters and its question."
    )
  start -= content.find(stripped)
  first = len(whole.ids) - len(source.ids)
  ends = [0] * first + [end - start for end in source.ends]
  return Prompt(whole.ids, ends, source)


def plain_of(pretrained: pretrained_lib.Pretrained, text: str) -> Prompt:
  """A prompt without a template: the tokenizer's first token, and a text."""
  source = chat.encode_text(pretrained, text)
  ids = [*tokenizer_lib.first_ids(pretrained.tokenizer), *source.ids]
  return Prompt(ids, [0] * len(ids), source)


Text = Characters | Chat
