# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers with the structure and special tokens of known families.

Each is written as a directory, as its family publishes it. Templates are our
own; they have the structure of the family's: who writes the first token, what
is trimmed, where a turn ends, what the day is needed for.
"""

import dataclasses
import json

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

_WORDS = ("the", "in", "code", "access", "of", "is", "wren", "12", "system")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace("{1,3}", "")


@dataclasses.dataclass(frozen=True)
class Family:
  """A tokenizer as published.

  Attributes:
    backend: what tokenizer.json holds.
    config: what tokenizer_config.json holds.
    template: chat_template.jinja.
    stop_tokens: whose ids generation_config.json holds.
    end: the token that ends a turn.
    model_type: of config.json.
  """

  backend: tokenizers.Tokenizer
  config: dict
  template: str | None
  stop_tokens: tuple[str, ...]
  end: str
  model_type: str = "llama"

  def id(self, token: str) -> int:
    return self.backend.token_to_id(token)

  @property
  def stop_ids(self) -> list[int]:
    return [self.id(token) for token in self.stop_tokens]

  def write(self, directory, **changes):
    """Writes the text side; `changes` go into tokenizer_config.json."""
    self.backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(self.config | changes)
    )
    if self.template is not None:
      (directory / "chat_template.jinja").write_text(self.template)
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": self.stop_ids})
    )


def _merged(words, space):
  """Merges that make each word, alone and behind a space, from its left."""
  merges, made = [], []
  for word in words:
    for text in (word, space + word):
      for at in range(2, len(text) + 1):
        pair = (text[: at - 1], text[at - 1])
        if pair not in merges:
          merges.append(pair)
          made.append(text[:at])
  return merges, made


def _bytes(regex, **model):
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  merges, made = _merged(_WORDS, "Ġ")
  tokens = dict.fromkeys([*alphabet, *made])
  backend = tokenizers.Tokenizer(models.BPE(
      {token: at for at, token in enumerate(tokens)}, merges, **model
  ))
  split = [] if regex is None else [
      pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
  ]
  backend.pre_tokenizer = pre_tokenizers.Sequence(split + [
      pre_tokenizers.ByteLevel(
          add_prefix_space=False, use_regex=regex is None
      )
  ])
  backend.decoder = decoders.ByteLevel()
  return backend


def _first(backend, token):
  backend.post_processor = processors.TemplateProcessing(
      single=f"{token} $A", pair=f"{token} $A {token} $B",
      special_tokens=[(token, backend.token_to_id(token))],
  )


def llama3() -> Family:
  backend = _bytes(_LLAMA3, ignore_merges=True)
  backend.add_special_tokens([
      "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
      "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|pad_id|>",
  ])
  _first(backend, "<|begin_of_text|>")
  template = (
      "{{- bos_token }}{%- if not day is defined %}"
      "{%- set day = strftime_now('%d %b %Y') %}{%- endif %}"
      "{{- '<|start_header_id|>system<|end_header_id|>\n\nDay: ' + day }}"
      "{{- '<|eot_id|>' }}{%- for m in messages %}"
      "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
      "{{- m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
      "{%- if add_generation_prompt %}"
      "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
  )
  return Family(
      backend,
      dict(
          tokenizer_class="PreTrainedTokenizerFast",
          bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
          model_max_length=131072,
      ),
      template, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>",
  )


def qwen3() -> Family:
  backend = _bytes(_QWEN)
  backend.normalizer = normalizers.NFC()
  backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
  backend.add_tokens([
      tokenizers.AddedToken(token, normalized=False)
      for token in ("<tool_call>", "</tool_call>", "<think>", "</think>")
  ])
  template = (
      "{%- for m in messages %}{%- set content = m.content %}"
      "{%- if m.role == 'assistant' %}"
      "{%- if '</think>' in content %}"
      "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
      "{%- endif %}"
      "{%- if loop.last %}"
      "{%- set content = '<think>\n\n</think>\n\n' + content %}{%- endif %}"
      "{%- endif %}"
      "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}"
      "{%- endfor %}{%- if add_generation_prompt %}"
      "{{- '<|im_start|>assistant\n' }}"
      "{%- if enable_thinking is defined and not enable_thinking %}"
      "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
  )
  return Family(
      backend,
      dict(
          tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>",
          pad_token="<|endoftext|>", add_prefix_space=False, bos_token=None,
          unk_token=None,
      ),
      template, ("<|im_end|>", "<|endoftext|>"), "<|im_end|>", "qwen3",
  )


def smollm2() -> Family:
  backend = _bytes(None)
  backend.pre_tokenizer = pre_tokenizers.Sequence([
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
  ])
  backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
  template = (
      "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
      "{{ '<|im_start|>system\nthe code is in<|im_end|>\n' }}{% endif %}"
      "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>'"
      " + '\n'}}{% endfor %}{% if add_generation_prompt %}"
      "{{ '<|im_start|>assistant\n' }}{% endif %}"
  )
  return Family(
      backend,
      dict(
          tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>",
          eos_token="<|im_end|>", unk_token="<|endoftext|>",
          pad_token="<|im_end|>", add_prefix_space=False,
      ),
      template, ("<|im_end|>",), "<|im_end|>",
  )


def _pieces(first, **model):
  """Bytes behind what spells them, letters, and merges, as sentencepiece."""
  merges, made = _merged(_WORDS, "▁")
  letters = [chr(x) for x in range(33, 127)] + ["▁", "\n"]
  tokens = dict.fromkeys([
      *first, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *made,
  ])
  return tokenizers.Tokenizer(models.BPE(
      {token: at for at, token in enumerate(tokens)}, merges, fuse_unk=True,
      byte_fallback=True, unk_token="<unk>", **model,
  ))


def gemma3() -> Family:
  special = ["<pad>", "<eos>", "<bos>", "<unk>"]
  turns = ["<start_of_turn>", "<end_of_turn>"]
  backend = _pieces([*special, *turns])
  backend.normalizer = normalizers.Replace(" ", "▁")
  backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
  backend.decoder = decoders.Sequence([
      decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
  ])
  backend.add_special_tokens(special + turns)
  _first(backend, "<bos>")
  template = (
      "{{ bos_token }}{%- for m in messages %}"
      "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
      "{{ '<start_of_turn>' + role + '\n' + (m['content'] | trim) }}"
      "{{ '<end_of_turn>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
      "{{ '<start_of_turn>model\n' }}{%- endif %}"
  )
  return Family(
      backend,
      dict(
          tokenizer_class="GemmaTokenizer", bos_token="<bos>",
          eos_token="<eos>", unk_token="<unk>", pad_token="<pad>",
          add_bos_token=True, add_eos_token=False,
      ),
      template, ("<eos>", "<end_of_turn>"), "<end_of_turn>", "gemma3_text",
  )


def sentencepiece() -> Family:
  """As Llama 2: a space before whatever is encoded, turns that end in </s>."""
  special = ["<unk>", "<s>", "</s>"]
  backend = _pieces(special)
  backend.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme="first", split=False
  )
  backend.decoder = decoders.Sequence([
      decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
  ])
  backend.add_special_tokens(special)
  _first(backend, "<s>")
  template = (
      "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
      "{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
      "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
      "{% endif %}{% endfor %}"
  )
  return Family(
      backend,
      dict(
          tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>",
          unk_token="<unk>", add_bos_token=True, add_eos_token=False,
          legacy=False,
      ),
      template, ("</s>",), "</s>",
  )


FAMILIES = {
    "llama3": llama3, "gemma3": gemma3, "qwen3": qwen3, "smollm2": smollm2,
    "sentencepiece": sentencepiece,
}
