# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes text of which only some parts may become control tokens.

A control token ends a turn, begins a role, and so on. A rendered chat spells
it as text, and a document may spell it too. The template's must become one id;
the document's must stay text. So text is passed as pieces, each of which is one
control token or plain text. They are encoded together, because tokens may span
pieces of text, and because sentencepiece puts a space in front of whatever it
encodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
import json
import re
from typing import TYPE_CHECKING
from typing import NamedTuple
import weakref

if TYPE_CHECKING:
  import tokenizers
  import transformers

# Private-use characters, most of which occur in no text.
_MARKS = tuple(map(chr, range(0x10FFFD, 0x10FF00, -1)))
# Caches by tokenizer.
_CONTROLS = weakref.WeakKeyDictionary()
_TWINS = weakref.WeakKeyDictionary()


class Piece(NamedTuple):
  """A part of a text: a control token, or plain text."""

  text: str
  control: bool = False


class Encoded(NamedTuple):
  """Ids, and where they end in the text.

  Attributes:
    ids: ids of all pieces.
    ends: for every id, the index in the joined text of the character after it.
    pieces: what was encoded.
  """

  ids: list[int]
  ends: list[int]
  pieces: tuple[Piece, ...]

  @property
  def text(self) -> str:
    """All pieces, joined."""
    return "".join(piece.text for piece in self.pieces)

  def position(self, character: int) -> int:
    """Index of the id that contains a character of the text."""
    return bisect.bisect_right(self.ends, character)


def control_tokens(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> tuple[dict[str, int], re.Pattern]:
  """A tokenizer's control tokens with their ids, and a pattern that finds them.

  They are the special tokens, and other added tokens that the chat template
  writes, unless they are white space; `transformers` does the same. The pattern
  finds the longest one that fits.
  """
  template = tokenizer.chat_template or ""
  written = "\0".join(template.values()) if isinstance(
      template, dict
  ) else template
  key = len(tokenizer), written
  if _CONTROLS.get(tokenizer, (None,))[0] != key:
    controls = {
        token.content: id_
        for id_, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or (token.content in written and not token.content.isspace())
    }
    # As a tree: some tokenizers have thousands of control tokens.
    found = re.compile(_alternatives(controls) or "(?!)")
    _CONTROLS[tokenizer] = key, controls, found
  return _CONTROLS[tokenizer][1:]


def special_pattern(tokenizer) -> re.Pattern:
  """A pattern that finds only those control tokens that are special tokens."""
  return re.compile(_alternatives([
      token.content for token in tokenizer.added_tokens_decoder.values()
      if token.special
  ]) or "(?!)")


def _alternatives(tokens) -> str:
  """A pattern that matches the longest token that fits."""
  rests = {}
  for token in sorted(filter(None, tokens)):
    rests.setdefault(token[0], []).append(token[1:])
  if not rests:
    return ""
  branches = [re.escape(x) + _alternatives(rest) for x, rest in rests.items()]
  return f"(?:{'|'.join(branches)}){'?' if '' in tokens else ''}"


def marks(texts: Sequence[str], count: int) -> str:
  """Returns `count` characters that occur in none of the texts.

  Raises:
    ValueError: all characters that are tried occur.
  """
  found = "".join(
      mark for mark in _MARKS if not any(mark in text for text in texts)
  )[:count]
  if len(found) < count:
    raise ValueError(
        "The text holds all characters of the last private-use area, which are "
        "needed to mark control tokens: remove them."
    )
  return found


def split(rendered: str, found: re.Pattern) -> list[Piece]:
  """Divides a text into pieces, taking every control token in it as one."""
  pieces, at = [], 0
  for match in found.finditer(rendered):
    pieces += [Piece(rendered[at : match.start()]), Piece(match.group(), True)]
    at = match.end()
  return [*pieces, Piece(rendered[at:])]


def encode(
    tokenizer: transformers.PreTrainedTokenizerFast,
    pieces: Sequence[Piece],
    *,
    vocab_size: int | None = None,
) -> Encoded:
  """Encodes pieces together; nothing is added in front or behind.

  Args:
    tokenizer: tokenizer of `transformers`.
    pieces: pieces of the text.
    vocab_size: number of rows of the embedding; None to allow all ids.

  Returns:
    Ids, and where they end in the text.

  Raises:
    ValueError: an id without a row in the embedding, or plain text that became
      a control token after all.
  """
  controls, found = control_tokens(tokenizer)
  pieces = tuple(_joined(pieces))
  if any(not one.control and found.search(one.text) for one in pieces):
    encoding, ends = _in_twin(tokenizer, controls, pieces)
  else:
    encoding = tokenizer.backend_tokenizer.encode(
        "".join(piece.text for piece in pieces), add_special_tokens=False
    )
    ends = [end for _, end in encoding.offsets]
  _check_controls(tokenizer, controls, pieces, encoding.ids)
  check_ids(tokenizer, encoding.ids, vocab_size)
  return Encoded(encoding.ids, ends, pieces)


def check_ids(tokenizer, ids: Sequence[int], vocab_size: int | None):
  """Raises ValueError for an id without a row in the embedding."""
  largest = max(ids, default=0)
  if vocab_size is not None and largest >= vocab_size:
    token = tokenizer.convert_ids_to_tokens(int(largest))
    raise ValueError(
        f"The text holds {token!r}, whose id {largest} is outside the "
        f"vocabulary of {vocab_size} rows: these weights have no embedding of "
        "it. Leave it out of the text."
    )


def _joined(pieces):
  """Joins neighbouring pieces of plain text."""
  text = []
  for piece in pieces:
    if piece.control:
      if text:
        yield Piece("".join(text))
        text = []
      yield piece
    else:
      text.append(piece.text)
  if text:
    yield Piece("".join(text))


def _check_controls(tokenizer, controls, pieces, ids):
  """Raises ValueError if plain text became a control token."""
  known = set(controls.values()) - {tokenizer.unk_token_id}
  meant = [controls[x.text] for x in pieces if x.control]
  got = [id_ for id_ in ids if id_ in known]
  if len(got) > sum(id_ in known for id_ in meant):
    surplus = list(got)
    for id_ in meant:
      if id_ in surplus:
        surplus.remove(id_)
    tokens = tokenizer.convert_ids_to_tokens(surplus)
    raise ValueError(
        f"Plain text gave the control tokens {sorted(set(tokens))} in this "
        "tokenizer: remove them from the text."
    )


def _in_twin(tokenizer, controls, pieces):
  """Encodes with a copy of the tokenizer that spells control tokens otherwise.
  """
  letters = {token for token in controls if len(token) == 1}
  if found := sorted(
      letters & {x for one in pieces if not one.control for x in one.text}
  ):
    raise ValueError(
        f"The text spells {found}, control tokens of this tokenizer for which "
        "no other tokens could stand: remove them from the text."
    )
  (mark,) = marks([piece.text for piece in pieces], 1)
  twin = _twin(tokenizer, controls, mark)
  names = _names(controls, mark)
  spelt = [
      names.get(piece.text, piece.text) if piece.control else piece.text
      for piece in pieces
  ]
  encoding = twin.encode("".join(spelt), add_special_tokens=False)
  # Where pieces end in the twin's text and in ours.
  theirs, ours = [0], [0]
  for piece, other in zip(pieces, spelt, strict=True):
    theirs.append(theirs[-1] + len(other))
    ours.append(ours[-1] + len(piece.text))
  ends = []
  for _, end in encoding.offsets:
    at = bisect.bisect_left(theirs, end)
    if at and pieces[at - 1].control:
      ends.append(ours[at])
    else:
      ends.append(ours[at] - (theirs[at] - end))
  return encoding, ends


def _names(controls, mark):
  """How the twin spells control tokens; single letters stay as they are."""
  return {
      token: f"{mark}{id_}{mark}" for token, id_ in controls.items()
      if len(token) > 1
  }


def _twin(tokenizer, controls, mark) -> tokenizers.Tokenizer:
  """The tokenizer with other spellings of its control tokens, cached."""
  key = (mark, tuple(controls.items()), len(tokenizer))
  known = _TWINS.get(tokenizer)
  if known is None or known[0] != key:
    known = key, _make_twin(tokenizer, controls, mark)
    _TWINS[tokenizer] = known
  return known[1]


def _make_twin(tokenizer, controls, mark):
  import tokenizers

  backend = tokenizer.backend_tokenizer
  names = _names(controls, mark)
  content = json.loads(backend.to_str())
  for added in content["added_tokens"]:
    if added["content"] in names:
      added["content"] = names[added["content"]]
      added["normalized"] = False
  model = content["model"]
  if isinstance(model["vocab"], dict):
    model["vocab"] = {names.get(x, x): id_ for x, id_ in model["vocab"].items()}
  else:
    model["vocab"] = [[names.get(x, x), score] for x, score in model["vocab"]]
  if model.get("unk_token") in names:
    model["unk_token"] = names[model["unk_token"]]
  if "merges" in model:
    model["merges"] = [
        pair for pair in map(_pair, model["merges"])
        if not {*pair, "".join(pair)} & names.keys()
    ]
  content |= dict(truncation=None, padding=None, post_processor=None)
  twin = tokenizers.Tokenizer.from_str(json.dumps(content))
  vocabulary = twin.get_vocab(with_added_tokens=True)
  expected = {
      names.get(token, token): id_
      for token, id_ in backend.get_vocab(with_added_tokens=True).items()
  }
  if vocabulary != expected:
    raise ValueError(
        "The text spells control tokens of a tokenizer whose ids depend on how "
        "they are spelt: remove them from the text."
    )
  return twin


def _pair(merge):
  return tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge)
