# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds byte-level BPE tokenizers from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from branch_replay.weights import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  import transformers

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Text is split by each pattern in turn; merges never cross a split. The values
# are llama.cpp's, https://github.com/ggml-org/llama.cpp (src/llama-vocab.cpp).
_PATTERNS = {
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "llama-bpe": (_LLAMA3,),
}


# Role of a special token -> key of its id.
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(
    metadata: Mapping[str, Any],
) -> transformers.PreTrainedTokenizerFast:
  """Builds the tokenizer that a GGUF file describes, with its chat template.

  Control tokens, such as "<|im_start|>", are one id wherever they stand in the
  text. `encode` adds a first or last token only where the file says so. A byte
  that the vocabulary lacks (SmolLM2: a few control characters) is dropped, as
  it is by transformers and llama.cpp.

  Args:
    metadata: plain values by full key, such as "tokenizer.ggml.tokens".

  Returns:
    The tokenizer, with the ids and special tokens of the file.

  Raises:
    ValueError: a key is missing, or the kind of tokenizer or the way it splits
      text is not supported.
  """
  model = _required(metadata, "model")
  if model != "gpt2":
    raise ValueError(
        f"tokenizer.ggml.model={model!r} is not supported: only byte-level BPE "
        "('gpt2'). Pass with_tokenizer=False to load the weights alone."
    )
  pre = _required(metadata, "pre")
  if pre not in _PATTERNS:
    raise ValueError(
        f"tokenizer.ggml.pre={pre!r} is not supported: {', '.join(_PATTERNS)}. "
        "Pass with_tokenizer=False to load the weights alone."
    )
  tokens = _required(metadata, "tokens")
  kinds = _required(metadata, "token_type")
  vocabulary = {token: id_ for id_, token in enumerate(tokens)}
  if not len(vocabulary) == len(tokens) == len(kinds):
    raise ValueError(
        f"The file has {len(tokens)} tokens, {len(vocabulary)} of them "
        f"distinct, and {len(kinds)} token types: it is damaged."
    )
  tokenizer = tokenizers.Tokenizer(
      models.BPE(
          vocab=vocabulary,
          merges=[_merge(merge) for merge in _required(metadata, "merges")],
          # Llama 3's vocabulary has words that its merges do not produce.
          ignore_merges=pre == "llama-bpe",
      )
  )
  if pre == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = _splitter(_PATTERNS[pre])
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_tokens(list(_added(tokens, kinds)))
  tokenizer.post_processor = _ends(metadata, tokens, pre)
  special = {}
  for role, key in _SPECIAL.items():
    if metadata.get(f"tokenizer.ggml.{key}") is not None:
      special[role] = _token(metadata, tokens, key)
  return tokenizer_lib.wrapped(
      tokenizer, chat_template=metadata.get("tokenizer.chat_template"),
      **special,
  )


def _required(metadata, key):
  if (value := metadata.get(f"tokenizer.ggml.{key}")) is None:
    raise ValueError(
        f"The file has no tokenizer.ggml.{key}. Pass with_tokenizer=False to "
        "load the weights alone."
    )
  return value


def _merge(merge):
  left, _, right = merge.partition(" ")
  if not left or not right or " " in right:
    raise ValueError(f"The merge {merge!r} is not two tokens and a space.")
  return left, right


def _splitter(patterns):
  return pre_tokenizers.Sequence(
      [
          pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
          for pattern in patterns
      ]
      + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
  )


def _added(tokens, kinds):
  for token, kind in zip(tokens, kinds, strict=True):
    if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
      yield tokenizers.AddedToken(
          token, normalized=False, special=kind != _USER_DEFINED
      )


def _token(metadata, tokens, key):
  id_ = _required(metadata, key)
  if not 0 <= id_ < len(tokens):
    raise ValueError(
        f"tokenizer.ggml.{key}={id_} is not one of the file's {len(tokens)} "
        "tokens: it is damaged."
    )
  return tokens[id_]


def _ends(metadata, tokens, pre):
  """A post-processor that adds the first and last token the file asks for.

  If a file does not say, Llama 3 gets a first token, as in llama.cpp.
  """
  first, last = [], []
  bos_id = metadata.get("tokenizer.ggml.bos_token_id")
  silent = pre == "llama-bpe" and bos_id is not None
  for name, side, default in (("bos", first, silent), ("eos", last, False)):
    if metadata.get(f"tokenizer.ggml.add_{name}_token", default):
      token = _token(metadata, tokens, f"{name}_token_id")
      side.append((token, metadata[f"tokenizer.ggml.{name}_token_id"]))
  if not first + last:
    return None
  return processors.TemplateProcessing(
      single=[name for name, _ in first] + ["$A"] + [name for name, _ in last],
      special_tokens=sorted(set(first + last)),
  )
