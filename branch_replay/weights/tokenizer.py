# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads, makes and writes tokenizers of `transformers`.

`transformers` is imported inside functions, because it takes a second and only
text needs it. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
import shutil
import tempfile
from typing import TYPE_CHECKING
import warnings

if TYPE_CHECKING:
  import tokenizers
  import transformers

FILE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# Other files of a tokenizer, of this or older versions of transformers.
_BESIDE = (
    _CONFIG, "chat_template.jinja", "chat_template.json", "added_tokens.json",
    "special_tokens_map.json",
)
_TEMPLATES = "additional_chat_templates"
# Settings of tokenizer.json that are switched off.
_SETTINGS = ("truncation", "padding")
# The same settings in tokenizer_config.json.
_LENGTHS = (
    "max_length", "stride", "truncation_strategy", "pad_to_multiple_of",
)
_SIDES = ("padding_side", "truncation_side")


def library():
  """The module transformers, without its warning about missing frameworks."""
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  return transformers


def load(
    directory: pathlib.Path,
) -> transformers.PreTrainedTokenizerFast | None:
  """The tokenizer of a directory, as transformers loads it.

  Truncation and padding saved with the files are switched off, because they
  would silently cut or fill prompts. Code that the files name is never run. If
  transformers' class splits text differently than a byte-level tokenizer.json
  says (it forgets that SmolLM2 splits numbers into digits), the file is
  followed, with a warning.

  Args:
    directory: a directory with tokenizer.json and usually
      tokenizer_config.json.

  Returns:
    The tokenizer with its chat template; None without a tokenizer.json.

  Raises:
    ValueError: the files are damaged, or need code of their own.
  """
  if not (directory / FILE).is_file():
    return None
  content, said = _json(directory / FILE), {}
  if (directory / _CONFIG).is_file():
    said = _json(directory / _CONFIG)
  with contextlib.ExitStack() as stack:
    source = directory
    if any(content.get(setting) for setting in _SETTINGS):
      source = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
      _copy_without(_SETTINGS, content, directory, source)
    try:
      tokenizer = _loaded(source, content, said)
    except Exception as error:  # The library raises a bare Exception, too.
      raise ValueError(
          f"{directory / FILE} is not a tokenizer that transformers can load: "
          f"{error}"
      ) from error
  if not isinstance(tokenizer, library().PreTrainedTokenizerFast):
    raise ValueError(
        f"{directory} names a tokenizer of class {type(tokenizer).__name__}, "
        f"which does not use {FILE}: only those that do are supported."
    )
  tokenizer.name_or_path = str(directory)
  _without_lengths(tokenizer, said)
  return tokenizer


def _copy_without(settings, content, directory, target):
  """Copies the files of a tokenizer, without some settings."""
  for name in (*_BESIDE, "config.json"):
    if (directory / name).is_file():
      shutil.copy(directory / name, target / name)
  if (directory / _TEMPLATES).is_dir():
    shutil.copytree(directory / _TEMPLATES, target / _TEMPLATES)
  (target / FILE).write_text(
      json.dumps(content | dict.fromkeys(settings)), encoding="utf-8"
  )


def _loaded(directory, content, said):
  options = dict(local_files_only=True, trust_remote_code=False)
  plain = library().PreTrainedTokenizerFast
  if not said.get("tokenizer_class"):
    # transformers would guess a class from the model, and some classes rebuild
    # what tokenizer.json says.
    return plain.from_pretrained(str(directory), **options)
  tokenizer = library().AutoTokenizer.from_pretrained(str(directory), **options)
  if not isinstance(tokenizer, plain) or not _splits_otherwise(
      tokenizer, content
  ):
    return tokenizer
  warnings.warn(
      f"The class {type(tokenizer).__name__} of transformers splits text "
      f"otherwise than {FILE}, which is followed.", stacklevel=4,
  )
  return plain.from_pretrained(str(directory), **options)


def _splits_otherwise(tokenizer, of_file) -> bool:
  """Whether a byte-level file splits text differently than a tokenizer."""

  def plain(value):
    if isinstance(value, dict):
      # trim_offsets changes offsets and no ids.
      return {k: plain(v) for k, v in value.items() if k != "trim_offsets"}
    return list(map(plain, value)) if isinstance(value, list) else value

  if '"ByteLevel"' not in json.dumps(of_file.get("pre_tokenizer")):
    return False  # the configuration says how sentencepiece treats spaces
  made = json.loads(tokenizer.backend_tokenizer.to_str())
  return any(
      plain(made.get(part)) != plain(of_file.get(part))
      for part in ("normalizer", "pre_tokenizer")
  )


def _json(path):
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error


def _without_lengths(tokenizer, said):
  tokenizer.backend_tokenizer.no_truncation()
  tokenizer.backend_tokenizer.no_padding()
  for key in (*_LENGTHS, "local_files_only", "is_local"):
    tokenizer.init_kwargs.pop(key, None)
  for key in _SIDES:
    if key not in said:
      tokenizer.init_kwargs.pop(key, None)
      setattr(tokenizer, key, getattr(type(tokenizer), key))


def wrapped(
    backend: tokenizers.Tokenizer,
    *,
    chat_template: str | None = None,
    **special: str | None,
) -> transformers.PreTrainedTokenizerFast:
  """A tokenizer of transformers around a copy of one of `tokenizers`.

  Args:
    backend: the tokenizer; its post-processor says which first and last tokens
      are added.
    chat_template: jinja source, or None.
    **special: bos_token, eos_token, unk_token and pad_token, as text.

  Returns:
    The tokenizer, without truncation and padding.

  Raises:
    ValueError: a special token is not in the vocabulary.
  """
  special = {name: token for name, token in special.items() if token}
  for name, token in special.items():
    if backend.token_to_id(token) is None:
      raise ValueError(f"{name}={token!r} is not in the vocabulary.")
  tokenizer = library().PreTrainedTokenizerFast(
      tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
  )
  _without_lengths(tokenizer, {})
  if chat_template is not None:
    tokenizer.chat_template = chat_template
  return tokenizer


def first_ids(tokenizer: transformers.PreTrainedTokenizerFast) -> list[int]:
  """The ids a tokenizer puts before a text: its first token, or none."""
  encoding = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True)
  count = 0
  while count < len(encoding.ids) and encoding.special_tokens_mask[count]:
    count += 1
  return encoding.ids[:count]


def check_kind(tokenizer):
  """Raises TypeError for anything but a tokenizer of transformers or None."""
  if tokenizer is None or isinstance(
      tokenizer, library().PreTrainedTokenizerFast
  ):
    return
  raise TypeError(
      "tokenizer must be a transformers.PreTrainedTokenizerFast or None, not "
      f"{type(tokenizer).__module__}.{type(tokenizer).__name__}: "
      "branch_replay.weights.tokenizer.wrapped makes one of a "
      "tokenizers.Tokenizer."
  )


def save(
    folder: pathlib.Path,
    tokenizer: transformers.PreTrainedTokenizerFast,
    *,
    end_of_turn: int | None,
    stop_ids: tuple[int, ...],
    vocab_size: int,
) -> int | None:
  """Writes the files of a tokenizer, for transformers 4 and 5.

  The `eos_token` is set to the end of a turn, unless the chat template itself
  writes `eos_token`. If there is no pad token, the unknown token or a stop id
  that does not end turns becomes one, with a warning: trainers leave padding
  out of their losses, so with the end of a turn as padding they would never
  learn to end a turn.

  Args:
    folder: an existing folder.
    tokenizer: the tokenizer; it is not changed.
    end_of_turn: id that ends a turn, or None.
    stop_ids: ids that end a response.
    vocab_size: number of rows of the embedding.

  Returns:
    The id of the pad token; None if there is no candidate.
  """
  tokenizer = copy.deepcopy(tokenizer)
  _without_lengths(tokenizer, tokenizer.init_kwargs)
  written = json.dumps(tokenizer.chat_template) if (
      tokenizer.chat_template
  ) else ""
  if end_of_turn is not None and (
      tokenizer.eos_token is None
      or not ("eos_token" in written or tokenizer.add_eos_token)
  ):
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_turn)
  if tokenizer.pad_token is None or tokenizer.pad_token_id >= vocab_size:
    choices = [tokenizer.unk_token_id, *stop_ids, tokenizer.eos_token_id]
    ranked = sorted(
        (id_ for id_ in choices if id_ is not None and id_ < vocab_size),
        key=lambda id_: id_ in (end_of_turn, tokenizer.eos_token_id),
    )
    if ranked:
      tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ranked[0])
      warnings.warn(
          f"The tokenizer has no pad token: {tokenizer.pad_token!r} is written "
          "as one. Set tokenizer.pad_token for another.",
          stacklevel=3,
      )
  tokenizer.save_pretrained(str(folder))
  path = folder / _CONFIG
  fields = _json(path)
  if fields.get("tokenizer_class") == "TokenizersBackend":
    # Version 4 knows this name too.
    fields["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
  return tokenizer.pad_token_id


def stale(directory: pathlib.Path, written: set[str]) -> list[pathlib.Path]:
  """Files of an earlier tokenizer that would be read with those written now."""
  names = [*_BESIDE, *(
      str(path.relative_to(directory))
      for path in (directory / _TEMPLATES).glob("*")
  )]
  return [
      directory / name for name in names
      if name not in written and (directory / name).is_file()
  ]
