# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns chat messages into text and ids with a model's own template.

Templates are rendered by `transformers`, as they were when the model was tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import re
import string
from typing import TYPE_CHECKING
import warnings

import jinja2

from branch_replay.weights import encoding

if TYPE_CHECKING:
  import transformers

  from branch_replay.weights import pretrained as pretrained_lib

# Some templates write the date. It is fixed, so that rows do not depend on the
# day they are made; this is the default of Llama 3 templates.
DATE = datetime.date(2024, 7, 26)
_ANSWER = "Yes"
# Shadows the function of that name, which reads the clock. Jinja drops the line
# break after the last tag.
_CLOCK = (
    "{% macro strftime_now(format) %}{% set now = namespace(text=format) %}"
    "{% for directive, value in clock_directives.items() %}"
    "{% set now.text = now.text.replace(directive, value) %}{% endfor %}"
    "{{ now.text }}{% endmacro %}\n"
)


def render_chat(
    pretrained: pretrained_lib.Pretrained,
    messages: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    date: datetime.date = DATE,
    **options,
) -> str:
  """The text a model's template makes of messages.

  For ids use `encode_chat`, which distinguishes the template's control tokens
  from those that a message spells.

  Args:
    pretrained: a model whose tokenizer has a chat template.
    messages: {"role": ..., "content": ...}, in order.
    add_generation_prompt: whether the text ends with the header of the
      assistant's answer.
    date: today's date for templates that write it.
    **options: further options of the template, e.g. `enable_thinking`, `tools`.

  Returns:
    Text with special tokens spelt out.

  Raises:
    ValueError: there is no template, or it refuses the messages.
  """
  tokenizer = pretrained.tokenizer
  if tokenizer is None or not tokenizer.chat_template:
    raise ValueError("The model's files hold no chat template.")
  return _rendered(tokenizer, messages, add_generation_prompt, date, options)


def encode_chat(
    pretrained: pretrained_lib.Pretrained,
    messages: Sequence[Mapping],
    *,
    add_generation_prompt: bool = True,
    date: datetime.date = DATE,
    **options,
) -> encoding.Encoded:
  """The ids of `render_chat`, where messages cannot contain control tokens.

  They are those of `apply_chat_template`, unless a message spells a control
  token such as "<|im_end|>", which here stays text.

  Args:
    pretrained: a model whose tokenizer has a chat template.
    messages: {"role": ..., "content": ...}, in order.
    add_generation_prompt: whether the text ends with the header of the
      assistant's answer.
    date: today's date for templates that write it.
    **options: further options of the template.

  Returns:
    Ids, and where they end in the text.

  Raises:
    ValueError: there is no template, it refuses the messages, or the embedding
      has no row for an id.
  """
  tokenizer = pretrained.tokenizer
  if tokenizer is None or not tokenizer.chat_template:
    raise ValueError("The model's files hold no chat template.")
  pieces = _pieces(tokenizer, messages, add_generation_prompt, date, options)
  return encoding.encode(
      tokenizer, pieces, vocab_size=pretrained.config.vocab_size
  )


def encode_text(
    pretrained: pretrained_lib.Pretrained, text: str
) -> encoding.Encoded:
  """The ids of a text alone; control tokens that it spells stay text.

  Nothing is added in front: the prompt of a base model also needs
  `tokenizer.first_ids`.
  """
  return encoding.encode(
      pretrained.tokenizer, [encoding.Piece(text)],
      vocab_size=pretrained.config.vocab_size,
  )


def end_of_turn(
    tokenizer: transformers.PreTrainedTokenizerFast,
) -> int | None:
  """The control token that the template writes after an assistant's message.

  White space before it is skipped.

  Returns:
    Its id. Without a template, or if there is no such token, the id of the
    tokenizer's `eos_token`, which may be None.
  """
  if not tokenizer.chat_template:
    return tokenizer.eos_token_id
  messages = [
      {"role": "user", "content": "Is it?"},
      {"role": "assistant", "content": _ANSWER},
  ]
  try:
    pieces = _pieces(tokenizer, messages, False, DATE, {})
  except ValueError as error:
    warnings.warn(
        "The chat template refused a question and its answer, so that turns "
        f"are taken to end with eos_token={tokenizer.eos_token!r}: {error}",
        stacklevel=2,
    )
    return tokenizer.eos_token_id
  last = max(
      (at for at, piece in enumerate(pieces)
       if not piece.control and _ANSWER in piece.text),
      default=None,
  )
  if last is None:
    return tokenizer.eos_token_id
  between = pieces[last].text.rpartition(_ANSWER)[2]
  for piece in pieces[last + 1 :]:
    if between.strip():
      break
    if piece.control:
      return encoding.control_tokens(tokenizer)[0][piece.text]
    between = piece.text
  return tokenizer.eos_token_id


def _pieces(tokenizer, messages, add_generation_prompt, date, options):
  """The rendered text, divided into the template's control tokens and text."""
  _, found = encoding.control_tokens(tokenizer)
  texts = list(_strings(messages))
  if not any(map(found.search, texts)):
    return encoding.split(
        _rendered(tokenizer, messages, add_generation_prompt, date, options),
        found,
    )
  # As in transformers: control tokens that messages spell are put between two
  # marks, so those without marks are the template's own.
  start, end = encoding.marks(texts, 2)
  plain = _rendered(tokenizer, messages, add_generation_prompt, date, options)
  for of_answers in (found, encoding.special_pattern(tokenizer)):
    marked = []
    for message in messages:
      of_answer = message.get("role") == "assistant"
      spelt = of_answers if of_answer else found
      marked.append(_mapped(
          message,
          lambda text, spelt=spelt: spelt.sub(rf"{start}\g<0>{end}", text),
      ))
    rendered = _rendered(
        tokenizer, marked, add_generation_prompt, date, options
    )
    # A template that splits answers at its own tags, such as </think>, does not
    # find them between marks. They are not special tokens, so the second try
    # leaves them unmarked.
    if rendered.replace(start, "").replace(end, "") == plain:
      break
  else:
    raise ValueError(
        "The chat template changes messages where they spell its control "
        "tokens, so that theirs cannot be told from its own: remove them."
    )
  pieces = []
  for piece in encoding.split(
      rendered, re.compile(f"{start}(?:{found.pattern}){end}|{found.pattern}")
  ):
    text = piece.text.replace(start, "").replace(end, "")
    own = piece.control and not piece.text.startswith(start)
    pieces.append(encoding.Piece(text, own))
  return pieces


def _strings(value):
  """All strings in messages except the names of roles."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for key, item in value.items():
      if key != "role":
        yield from _strings(item)
  elif isinstance(value, Sequence):
    for item in value:
      yield from _strings(item)


def _mapped(value, change):
  """Messages with `change` applied to the strings that `_strings` yields."""
  if isinstance(value, str):
    return change(value)
  if isinstance(value, Mapping):
    return {
        key: item if key == "role" else _mapped(item, change)
        for key, item in value.items()
    }
  if isinstance(value, Sequence):
    return [_mapped(item, change) for item in value]
  return value


def _rendered(tokenizer, messages, add_generation_prompt, date, options):
  template = tokenizer.get_chat_template(tools=options.get("tools"))
  if "strftime_now" in template:
    template = _CLOCK + template
    options = options | {"clock_directives": _directives(date)}
  try:
    return tokenizer.apply_chat_template(
        list(messages), chat_template=template, tokenize=False,
        add_generation_prompt=add_generation_prompt, **options,
    )
  except (jinja2.TemplateError, TypeError, ValueError) as error:
    raise ValueError(
        f"The chat template refused {len(messages)} messages: {error}"
    ) from error


def _directives(date):
  """The value of each directive of strftime, the longer directives first."""
  if not isinstance(date, datetime.datetime):
    date = datetime.datetime.combine(date, datetime.time())
  letters = string.ascii_letters
  directives = [f"%{flag}{x}" for flag in ("-", "") for x in letters]
  return {one: date.strftime(one) for one in directives} | {"%%": "%"}


