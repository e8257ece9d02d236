# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A fact hidden in a long document, and a question about it.

Codes are divided among the splits, so no fact of one split occurs in another,
whether it is asked for or not. So are the paragraphs of the document. Names are
shared: they are the vocabulary of the task, and a model may learn them.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import hashlib
import itertools
import json
import re
import string
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from branch_replay.tasks import builder
from branch_replay.tasks import documents
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

_WORDS = (
    "kestrel heron falcon osprey curlew plover lapwing magpie jackdaw raven "
    "bullfinch linnet siskin wagtail dipper wren nuthatch treecreeper goshawk "
    "merlin harrier bittern egret grebe fulmar gannet petrel puffin razorbill "
    "guillemot skua tern avocet dotterel knot sanderling dunlin whimbrel "
    "redshank turnstone phalarope corncrake moorhen coot crane stork ibis "
    "spoonbill flamingo pelican cormorant shag nightjar swift hoopoe bee-eater "
    "roller wryneck woodlark skylark pipit dunnock redstart wheatear"
).split()
_POOLS = {"words": _WORDS, "letters": list(string.ascii_uppercase)}
_MOST_CODES = 10**6
_TRIES = 30
# Limits of `fitting`: estimates of the size, and neighbours tried.
_STEPS = 8
_NEIGHBOURS = 40


class RetrievalRows(builder.RowsBuilder, skip_registration=True):
  """Rows of `Retrieval`."""

  name = "retrieval"
  VERSION = tfds.core.Version("1.0.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval(builder.Recipe):
  """Find the code of one name among facts hidden in a document.

  In characters, a prompt is the document, with every fact on a line of its own,
  and then the fact that is asked for again, up to its code. In a chat it is the
  document and the question.

  The reward is 1 or 0. In characters the answer must be the code and nothing
  else. In a chat it must contain the code as a separate number, and no other
  number with as many digits: a sentence around the code is accepted, a list of
  candidates is not. Digits next to a letter, another digit, or a decimal or
  thousands separator followed by digits belong to another number.

  To make the task easy for a small model trained from scratch, use "letters"
  for haystack and naming, the fact "{name}{code}", short codes and few
  distractors.

  Attributes:
    prompt_tokens: exact length of every prompt.
    distractors: number of facts about other names, with other codes.
    min_depth: least depth of the fact that is asked for; 0 is the start of the
      document.
    max_depth: greatest depth of it; 1 is the end. Distractors are anywhere.
    names: number of names.
    naming: "words" (birds) or "letters" (A to Z).
    code_length: digits of a code.
    code_symbols: number of different digits in codes, from 0 on.
    haystack: "text" for the document, or "letters" for random lower-case
      letters and spaces.
    document: a text file; empty for the text of the standard library.
    fact: template with {name} and, after it, {code}.
    question: template with {name}, used in a chat only.
  """

  name: ClassVar[str] = "retrieval"
  rows_builder: ClassVar[type[builder.RowsBuilder]] = RetrievalRows

  prompt_tokens: int = 512
  distractors: int = 3
  min_depth: float = 0.0
  max_depth: float = 1.0
  names: int = 26
  naming: str = "words"
  code_length: int = 4
  code_symbols: int = 10
  haystack: str = "text"
  document: str = ""
  fact: str = "The access code of the {name} is {code}."
  question: str = (
      "What is the access code of the {name}? Answer with the code alone."
  )

  def __post_init__(self):
    super().__post_init__()
    if self.naming not in _POOLS:
      raise task_lib.unknown("naming", self.naming, _POOLS)
    if self.haystack not in ("text", "letters"):
      raise task_lib.unknown("haystack", self.haystack, ("text", "letters"))
    if not 0 <= self.distractors < self.names <= len(_POOLS[self.naming]):
      raise ValueError(
          f"distractors={self.distractors} need more names={self.names}, and "
          f"naming={self.naming!r} has {len(_POOLS[self.naming])} of them."
      )
    if not 0 <= self.min_depth <= self.max_depth <= 1:
      raise ValueError(
          f"min_depth={self.min_depth} and max_depth={self.max_depth} must lie "
          "between 0 and 1, in this order."
      )
    if not 2 <= self.code_symbols <= 10 or self.code_length < 1:
      raise ValueError(
          f"code_symbols={self.code_symbols} must be 2 to 10 and code_length="
          f"{self.code_length} at least 1."
      )
    if not 10 <= self.code_symbols**self.code_length <= _MOST_CODES:
      raise ValueError(
          f"code_symbols={self.code_symbols} and code_length="
          f"{self.code_length} give {self.code_symbols**self.code_length} "
          f"codes; there must be 10 to {_MOST_CODES}."
      )
    before, name, after = self.fact.partition("{name}")
    if not name or before.count("{code}") or after.count("{code}") != 1:
      raise ValueError(f"fact={self.fact!r} needs {{name}} and then {{code}}.")
    if "{name}" not in self.question:
      raise ValueError(f"question={self.question!r} needs {{name}}.")

  def ingredients(self) -> str:
    """A digest of the document, because a file may change under the same name.
    """
    if self.haystack == "letters":
      return ""
    read = json.dumps(documents.read(self.document))
    return hashlib.sha256(read.encode()).hexdigest()

  def rows(
      self, text: text_lib.Text, split: str
  ) -> Iterator[task_lib.Example]:
    """Yields the rows of a split.

    Raises:
      ValueError: too few codes for the distractors, a prompt too short for its
        facts, or a document too short for the prompt.
    """
    codes = splits.cut(self.seed, self._codes(), split)
    if len(codes) <= self.distractors:
      raise ValueError(
          f"The {split!r} split has {len(codes)} codes, too few for a fact and "
          f"{self.distractors} distractors. Raise code_length or code_symbols."
      )
    haystack = ""
    if self.haystack == "text":
      haystack = documents.divide(
          documents.read(self.document), seed=self.seed, split=split
      )
    for index in range(getattr(self, split)):
      yield self._row(text, self.row_id(split, index), haystack, codes)

  def scorer(self, text: text_lib.Text):
    """1 for the exact code; in a chat, for the only number of its length."""

    def score(example, ids):
      said = text.decode(ids)
      if isinstance(text, text_lib.Characters):
        return float(said == example.answer)
      return float(numbers_in(said, len(example.answer)) == {example.answer})

    return score

  def _codes(self):
    digits = string.digits[: self.code_symbols]
    return map("".join, itertools.product(digits, repeat=self.code_length))

  def _lead(self, name):
    return self.fact.partition("{code}")[0].replace("{name}", name)

  def _row(self, text, row_id, haystack, codes):
    random = splits.generator(self.seed, row_id)
    facts = 1 + self.distractors
    names = random.sample(_POOLS[self.naming][: self.names], facts)
    codes = random.sample(codes, facts)
    end = self.fact.partition("{code}")[2]
    hidden = [
        f"\n{self._lead(name)}{code}{end}\n"
        for name, code in zip(names, codes, strict=True)
    ]
    asked = self._lead(names[0])
    if isinstance(text, text_lib.Chat):
      asked = self.question.replace("{name}", names[0])
    leads = [self._lead(name) for name in names]
    found = self._filled(text, random, haystack, asked, hidden, leads)
    prompt, start, passage, cut, position = found
    return task_lib.Example(
        id=row_id,
        prompt_ids=np.asarray(prompt.ids, np.int32),
        answer_ids=np.asarray(text.answer(prompt, codes[0]), np.int32),
        answer=codes[0],
        details={
            "facts": dict(zip(names, codes, strict=True)),
            "name": names[0],
            "depth": cut / len(passage),
            "position": position,
            "passage": [start, start + len(passage)],
        },
    )

  def _filled(self, text, random, haystack, asked, hidden, leads):
    """Fills a prompt up to its length with a passage of the document.

    Returns:
      The prompt; start and text of the passage; the place of the asked fact in
      the passage; and the index of the id in the prompt that holds the line
      break before that fact.
    """
    taken = len(text.prompt(asked, "".join(hidden)).ids)
    room = self.prompt_tokens - taken
    if room < 1:
      raise ValueError(
          f"prompt_tokens={self.prompt_tokens} leave no room for a document: "
          f"the question and {len(hidden)} facts take {taken}."
      )
    most = room * text.longest
    # A token has at least one character.
    starts = max(0, len(haystack) - room)
    for _ in range(_TRIES if starts or self.haystack == "letters" else 0):
      if self.haystack == "letters":
        letters = string.ascii_lowercase + " " * 5
        start, found = 0, "".join(random.choices(letters, k=most))
      else:
        start = haystack.find("\n", random.randrange(starts)) + 1
        found = haystack[start : start + most]
      # Drawn from a copy, so that the number of tries changes nothing else.
      ahead = _copy(random)
      depths = [ahead.uniform(self.min_depth, self.max_depth)]
      depths += [ahead.random() for _ in hidden[1:]]

      def made(size, found=found, depths=depths):
        return text.prompt(asked, _document(found[:size], hidden, depths)[0])

      size = fitting(
          lambda size: len(made(size).ids), self.prompt_tokens,
          most=len(found), guess=room * (1 if text.longest == 1 else 4),
      )
      if size is None or any(lead in found[:size] for lead in leads):
        continue
      passage = found[:size]
      _, cut, at = _document(passage, hidden, depths)
      prompt = made(size)
      return prompt, start, passage, cut, prompt.position(at)
    raise ValueError(
        f"No passage of {room} tokens in {len(haystack)} characters of text "
        f"without a fact of the form {self.fact!r}: shorten prompt_tokens="
        f"{self.prompt_tokens}, name a longer document, or word the fact "
        "otherwise."
    )


def _copy(random):
  other = type(random)()
  other.setstate(random.getstate())
  return other


def _document(passage, hidden, depths):
  """Inserts facts into a passage at their depths.

  Returns:
    The text, and the place of the first fact in the passage and in the text.
  """
  cuts = [word_start(passage, round(depth * len(passage))) for depth in depths]
  parts, at, place, length = [], 0, 0, 0
  for fact in sorted(range(len(hidden)), key=lambda fact: cuts[fact]):
    length += cuts[fact] - at
    place = length if fact == 0 else place
    length += len(hidden[fact])
    parts += [passage[at : cuts[fact]], hidden[fact]]
    at = cuts[fact]
  return "".join([*parts, passage[at:]]), cuts[0], place


def fitting(
    count: Callable[[int], int], wanted: int, *, most: int, guess: int
) -> int | None:
  """A size of text for which a prompt has exactly the wanted number of ids.

  More text gives more ids, except where tokens join. So the search first brings
  the size near, and then tries its neighbours.

  Args:
    count: function from number of characters to number of ids.
    wanted: number of ids.
    most: largest number of characters.
    guess: number of characters to start with.

  Returns:
    The size, at least 1; None if none was found.
  """
  known = {}

  def off(size):
    if size not in known:
      known[size] = count(size) - wanted
    return known[size]

  low, high = 0, most + 1  # too few ids below, too many above
  size = max(1, min(guess, most))
  while high - low > 1:
    found = off(size)
    if not found:
      return size
    if found < 0:
      low = size
    else:
      high = size
    step = low + (high - low) // 2
    if len(known) < _STEPS:
      # A token has about four characters; in some texts only one.
      step = size - found * (4 if found < 0 else 3)
    size = min(max(step, low + 1), high - 1)
  if low == most:
    return None
  for distance in range(1, _NEIGHBOURS):
    for near in (low - distance, low + distance):
      if 1 <= near <= most and not off(near):
        return near
  return None


def numbers_in(text: str, digits: int) -> set[str]:
  """The numbers with this many digits in a text, as they are written."""
  return set(
      re.findall(
          rf"(?<![0-9A-Za-z_])(?<![0-9][.,])[0-9]{{{digits}}}"
          r"(?![0-9A-Za-z_])(?![.,][0-9])",
          text,
      )
  )


def word_start(passage: str, at: int) -> int:
  """The last position up to `at` where a word begins, or 0."""
  while 0 < at < len(passage) and not (
      passage[at].isspace() or passage[at - 1].isspace()
  ):
    at -= 1
  return at
