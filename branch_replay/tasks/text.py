# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two ways to write a task's text as ids.

Both offer the same: `name`, `vocab_size`, `stop_ids`, `encode`, `decode`,
`around` and `alone` (a prompt with and without a document), `fingerprint`, and
`longest`, the most characters of ordinary text that a token stands for.
"""

import dataclasses
import hashlib
import json
from typing import ClassVar

from branch_replay.weights import chat
from branch_replay.weights import pretrained as pretrained_lib

_MARK = "<<the document goes here>>"
_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))


@dataclasses.dataclass(frozen=True)
class Characters:
  """One id per ASCII character, for small models trained from nothing.

  Ids: 0 padding, 1 begins a prompt, 2 ends an answer, 3 stands before the
  question, then newline and the printable characters: 100 in all.
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
      ValueError: a character without an id.
    """
    lacking = sorted(set(text) - set(_CHARACTERS))
    if lacking:
      raise ValueError(
          f"The character vocabulary has no {lacking[:5]}: only newline and "
          "printable ASCII. Use a pretrained model's tokenizer for this text."
      )
    return [4 + _CHARACTERS.index(character) for character in text]

  def decode(self, ids: list[int]) -> str:
    """Text of ids; the special ones show as U+FFFD and never vanish."""
    return "".join(
        _CHARACTERS[id_ - 4] if id_ >= 4 else "\ufffd" for id_ in ids
    )

  def around(self, question: str) -> tuple[list[int], list[int]]:
    """What stands before a document, and after it."""
    return [self.bos_id], [self.ask_id, *self.encode(question)]

  def alone(self, question: str) -> list[int]:
    """A prompt without a document."""
    before, after = self.around(question)
    return before + after

  def fingerprint(self) -> str:
    """Differs when the ids of a text would."""
    return _CHARACTERS


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
  """A pretrained model's tokenizer and chat template.

  A model without a template is asked in plain text.

  Attributes:
    pretrained: with a tokenizer and stop ids. Its first stop id ends the
      answers that are learnt from; all of them end a sampled one.

  Raises:
    ValueError: no tokenizer or no stop ids.
  """

  name: ClassVar[str] = "chat"
  longest: ClassVar[int] = 10
  pretrained: pretrained_lib.Pretrained

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
    """Ids of a text, without added ones."""
    return self.pretrained.tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: list[int]) -> str:
    """Text of ids; special tokens are spelt out.

    Left out, one inside "48<|x|>21" would make the number 4821. For the same
    reason an id without a token turns the whole text into U+FFFD.
    """
    tokenizer = self.pretrained.tokenizer
    if any(tokenizer.id_to_token(id_) is None for id_ in ids):
      return "\ufffd"
    return tokenizer.decode(ids, skip_special_tokens=False)

  def around(self, question: str) -> tuple[list[int], list[int]]:
    """What stands before a document, and after it."""
    before, after = self._render(f"{_MARK}\n\n{question}").split(_MARK)
    return self.encode(before), self.encode(after)

  def alone(self, question: str) -> list[int]:
    """A prompt without a document."""
    return self.encode(self._render(question))

  def fingerprint(self) -> str:
    """Differs when the ids of a text would."""
    parts = (
        self.pretrained.tokenizer.to_str(), self.pretrained.chat_template,
        self.stop_ids,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  def _render(self, content):
    if self.pretrained.chat_template is None:
      return content
    return chat.render_chat(
        self.pretrained, [{"role": "user", "content": content}]
    )


Text = Characters | Chat
