# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of directories: read as transformers does, and written for it."""

import datetime
import functools
import json
import socket
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
import tokenizers
import transformers

import branch_replay as br
from branch_replay import tasks
from branch_replay.weights import chat
from branch_replay.weights import hf
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib
from tests import tiny_tokenizers

CONFIG = br.ModelConfig(
    vocab_size=448, width=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, ffn_width=8, max_positions=4096,
)
NAMES = tuple(tiny_tokenizers.FAMILIES)
TEXT = "the access code of\n\n the wren  is 12 — é🙂"
MESSAGES = [
    {"role": "user", "content": f" {TEXT}\n"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "Why?"},
]
DAY = chat.DATE.strftime("%d %b %Y")


@functools.cache
def params():
  return br.Decoder(CONFIG).init(
      jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]


def published(directory, name, *, template="family", **changes):
  """A directory of the family; returns the family."""
  family = tiny_tokenizers.FAMILIES[name]()
  hf.save_hf(directory, CONFIG, params())
  family.write(directory, **changes)
  if template is None:
    (directory / "chat_template.jinja").unlink()
  elif template != "family":
    (directory / "chat_template.jinja").write_text(template)
  return family


def load(directory):
  """As `load_hf`, without the warning that one of the families gives."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "The class GPT2Tokenizer")
    return hf.load_hf(directory)


def with_transformers(directory):
  return transformers.AutoTokenizer.from_pretrained(
      str(directory), local_files_only=True
  )


@pytest.mark.parametrize("name", NAMES)
def test_a_published_directory_is_read_as_transformers_reads_it(tmp_path, name):
  family = published(tmp_path, name)
  loaded = load(tmp_path)
  theirs = with_transformers(tmp_path)
  if name != "smollm2":  # see below
    assert loaded.tokenizer.encode(TEXT) == theirs.encode(TEXT)
    assert chat.encode_chat(loaded, MESSAGES).ids == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, day=DAY
    )["input_ids"]
  for key in ("bos_token", "eos_token", "unk_token"):
    assert loaded.tokenizer.special_tokens_map.get(key) == (
        family.config.get(key)
    )
  assert loaded.end_of_turn == family.id(family.end)
  assert loaded.stop_ids == tuple(family.stop_ids)
  task = tasks.Chat(loaded)
  answer = task.answer(task.prompt("How many?"), "12")
  assert answer[-1] == family.id(family.end)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_by_transformers(tmp_path, name):
  family = published(tmp_path / "a", name)
  loaded = load(tmp_path / "a")
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    hf.save_hf(
        tmp_path / "b", CONFIG, params(), tokenizer=loaded.tokenizer,
        stop_ids=loaded.stop_ids, bos_id=loaded.bos_id,
    )
  theirs = with_transformers(tmp_path / "b")
  assert theirs.encode(TEXT) == loaded.tokenizer.encode(TEXT)
  assert theirs.decode(theirs.encode(TEXT), skip_special_tokens=True) == TEXT
  assert theirs.apply_chat_template(
      MESSAGES, add_generation_prompt=True, day=DAY
  )["input_ids"] == chat.encode_chat(loaded, MESSAGES).ids
  special = loaded.tokenizer.special_tokens_map | {"eos_token": family.end}
  pads = {"llama3": "<|end_of_text|>", "sentencepiece": "<unk>"}
  if name in pads:
    assert "pad_token" not in special
    assert any("no pad token" in str(one.message) for one in said)
    special["pad_token"] = pads[name]
  assert theirs.special_tokens_map == special
  padded = theirs(["12", TEXT], padding=True)
  assert len(set(map(len, padded["input_ids"]))) == 1
  assert sum(padded["attention_mask"][0]) == len(theirs.encode("12"))
  pad = theirs.pad_token_id
  assert padded["input_ids"][0].count(pad) >= len(padded["input_ids"][0]) - 3
  generation = json.loads((tmp_path / "b/generation_config.json").read_text())
  assert generation["pad_token_id"] == pad != -1
  stop_ids = generation["eos_token_id"]
  assert family.stop_ids in (stop_ids, [stop_ids])
  again = hf.load_hf(tmp_path / "b")
  assert again.stop_ids == loaded.stop_ids
  assert again.end_of_turn == loaded.end_of_turn
  assert chat.encode_chat(again, MESSAGES).ids == (
      chat.encode_chat(loaded, MESSAGES).ids
  )


def test_of_a_byte_level_file_the_splits_are_those_of_the_file(tmp_path):
  """transformers' GPT2Tokenizer makes one token of two digits here."""
  family = published(tmp_path, "smollm2")
  with pytest.warns(UserWarning, match="GPT2Tokenizer.*splits text otherwise"):
    ours = hf.load_hf(tmp_path).tokenizer
  expected = family.backend.encode("the  12 wren")
  assert ours.encode("the  12 wren") == expected.ids
  assert expected.tokens.count("12") == 0
  assert with_transformers(tmp_path).encode("the  12 wren") != expected.ids


@pytest.mark.parametrize("name", NAMES)
def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path, name):
  published(tmp_path, name)
  plain = load(tmp_path).tokenizer.encode(TEXT)
  backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  backend.enable_truncation(8)
  backend.enable_padding(length=12, pad_id=3, pad_token="x", direction="left")
  backend.save(str(tmp_path / "tokenizer.json"))
  assert len(backend.encode(TEXT).ids) == 12
  loaded = load(tmp_path)
  assert loaded.tokenizer.backend_tokenizer.encode(TEXT).ids == plain
  assert loaded.tokenizer.pad_token != "x"
  assert len(tasks.Chat(loaded).encode("x" * 25)) in (25, 26)  # a space first
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hf.save_hf(tmp_path / "b", CONFIG, params(), tokenizer=loaded.tokenizer)
  written = json.loads((tmp_path / "b/tokenizer.json").read_text())
  assert written["truncation"] is written["padding"] is None
  settings = json.loads((tmp_path / "b/tokenizer_config.json").read_text())
  assert not settings.keys() & {
      "max_length", "stride", "truncation_strategy", "pad_to_multiple_of",
  }
  assert with_transformers(tmp_path / "b").encode(TEXT) == plain


def test_a_turn_ends_where_the_template_says(tmp_path):
  """Not with the first stop id, and the file's stop ids are kept."""
  for name, first, end in (
      ("llama3", "<|end_of_text|>", "<|eot_id|>"),
      ("gemma3", "<eos>", "<end_of_turn>"),
  ):
    family = published(tmp_path / name, name)
    first, end = family.id(first), family.id(end)
    path = tmp_path / name / "generation_config.json"
    for said in ([first, end], [first], first):
      path.write_text(json.dumps({"eos_token_id": said}))
      loaded = hf.load_hf(tmp_path / name)
      assert (loaded.end_of_turn, loaded.stop_ids) == (end, (first, end))
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      hf.save_hf(
          tmp_path / name, CONFIG, params(), tokenizer=loaded.tokenizer,
          stop_ids=(first,),
      )
    assert with_transformers(tmp_path / name).eos_token_id == end
    assert json.loads(path.read_text())["eos_token_id"] == [first, end]


@pytest.mark.parametrize("template, end", [
    # White space before the end, a header of the next turn behind it, an end
    # that only `eos_token` names.
    ("{% for m in messages %}{{ m.content }} \n<|im_end|>{% endfor %}", "m"),
    ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "e"),
    ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "e"),
    ("{% for m in messages %}{{ m.content }} so <|im_end|>{% endfor %}", "e"),
    ("{% for m in messages %}{{ m.role }}{% endfor %}<|im_end|>", "e"),
    (None, "e"),
])
def test_ends_of_turns_of_unusual_templates(tmp_path, template, end):
  family = published(
      tmp_path, "qwen3", template=template, eos_token="<|endoftext|>"
  )
  end = {"m": "<|im_end|>", "e": "<|endoftext|>"}[end]
  assert hf.load_hf(tmp_path).end_of_turn == family.id(end)


def test_a_template_that_refuses_answers_is_warned_of(tmp_path):
  family = published(
      tmp_path, "qwen3",
      template="{{ raise_exception('no') if messages[1:] else 'Hm?' }}",
  )
  with pytest.warns(UserWarning, match="refused a question and its answer"):
    loaded = hf.load_hf(tmp_path)
  assert loaded.end_of_turn == family.id("<|im_end|>")
  with pytest.raises(ValueError, match="refused 3 messages: no"):
    chat.render_chat(loaded, MESSAGES)


def test_a_tokenizer_may_know_more_than_the_embedding(tmp_path):
  """As those that multimodal families share; its id is refused when used."""
  family = published(tmp_path, "gemma3")
  family.backend.add_special_tokens(
      [f"<image{n}>" for n in range(CONFIG.vocab_size)]
  )
  family.write(tmp_path)
  loaded = hf.load_hf(tmp_path)
  assert len(loaded.tokenizer) > CONFIG.vocab_size
  last = len(loaded.tokenizer) - 2
  tasks.Chat(loaded).prompt("the <image447>?")  # as text, all is well
  loaded.tokenizer.chat_template = "<image447>{{ messages[0].content }}"
  with pytest.raises(ValueError, match="'<image447>', whose id .* 448 rows"):
    tasks.Chat(loaded).prompt("the")
  with pytest.raises(ValueError, match=f"stop id {last} is outside"):
    pretrained_lib.Pretrained(
        loaded.model, loaded.params, loaded.tokenizer, (1, last)
    )


def test_a_tokenizer_of_another_library_is_refused(tmp_path):
  backend = tiny_tokenizers.qwen3().backend
  for call in (
      lambda: hf.save_hf(tmp_path, CONFIG, params(), tokenizer=backend),
      lambda: pretrained_lib.Pretrained(br.Decoder(CONFIG), {}, backend),
  ):
    with pytest.raises(TypeError, match="not tokenizers.Tokenizer.*wrapped"):
      call()
  with pytest.raises(ValueError, match="eos_token='</s>' is not in the vocab"):
    tokenizer_lib.wrapped(backend, eos_token="</s>")


def test_damaged_text_files_are_named(tmp_path):
  published(tmp_path, "qwen3")
  (tmp_path / "tokenizer_config.json").write_text("{")
  with pytest.raises(ValueError, match="tokenizer_config.json is not JSON"):
    hf.load_hf(tmp_path)
  (tmp_path / "tokenizer_config.json").unlink()
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
    hf.load_hf(tmp_path)
  assert hf.load_hf(tmp_path, with_tokenizer=False).tokenizer is None


def test_no_hub_is_asked(tmp_path, monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError("A connection was tried.")

  monkeypatch.setattr(socket.socket, "connect", refuse)
  monkeypatch.setattr(socket, "getaddrinfo", refuse)
  for name in NAMES:
    (tmp_path / name).mkdir()
    published(tmp_path / name, name)
    assert load(tmp_path / name).tokenizer is not None


def test_code_of_a_directory_is_not_run(tmp_path):
  published(
      tmp_path, "qwen3", tokenizer_class="Mine",
      auto_map={"AutoTokenizer": ["mine.Mine", None]},
  )
  (tmp_path / "mine.py").write_text(
      f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Mine: pass\n"
  )
  try:
    hf.load_hf(tmp_path)
  except ValueError as error:
    assert "not a tokenizer that transformers can load" in str(error)
  assert not (tmp_path / "ran").exists()


def test_without_a_configuration_the_file_alone_is_followed(tmp_path):
  family = published(tmp_path, "qwen3")
  (tmp_path / "tokenizer_config.json").unlink()
  loaded = hf.load_hf(tmp_path)
  assert loaded.tokenizer.encode(TEXT) == family.backend.encode(TEXT).ids
  assert loaded.end_of_turn == family.id("<|im_end|>")


def test_an_export_over_another_leaves_no_text_file_of_it(tmp_path):
  published(tmp_path, "llama3")
  (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x"}')
  other = tiny_tokenizers.smollm2()
  hf.save_hf(
      tmp_path, CONFIG, params(), stop_ids=tuple(other.stop_ids),
      tokenizer=tokenizer_lib.wrapped(other.backend, pad_token="<|im_end|>"),
  )
  again = hf.load_hf(tmp_path)
  assert again.chat_template is None and again.tokenizer.bos_token is None
  assert again.tokenizer.encode(TEXT) == other.backend.encode(TEXT).ids
  hf.save_hf(tmp_path, CONFIG, params(), stop_ids=(3,))
  assert hf.load_hf(tmp_path).tokenizer is not None


@pytest.mark.parametrize("stop_tokens, unknown, pad", [
    (("<|im_end|>", "<|endoftext|>"), None, "<|endoftext|>"),
    (("<|im_end|>", "<|endoftext|>"), "<|im_start|>", "<|im_start|>"),
    (("<|im_end|>", "<|endoftext|>"), "<|im_end|>", "<|endoftext|>"),
    (("<|im_end|>",), None, "<|im_end|>"),
])
def test_padding_is_not_the_end_of_a_turn_where_there_is_another(
    tmp_path, stop_tokens, unknown, pad
):
  family = tiny_tokenizers.qwen3()
  tokenizer = tokenizer_lib.wrapped(
      family.backend, chat_template=family.template, unk_token=unknown
  )
  with pytest.warns(UserWarning, match="no pad token: .* is written"):
    hf.save_hf(
        tmp_path, CONFIG, params(), tokenizer=tokenizer,
        stop_ids=tuple(map(family.id, stop_tokens)),
    )
  assert with_transformers(tmp_path).pad_token == pad
  assert tokenizer.pad_token is None  # what is given stays as it was


def test_named_templates_survive(tmp_path):
  published(tmp_path / "a", "qwen3")
  loaded = hf.load_hf(tmp_path / "a")
  loaded.tokenizer.chat_template = {
      "default": loaded.tokenizer.chat_template, "tool_use": "b",
  }
  for _ in range(2):  # also over itself
    hf.save_hf(tmp_path / "b", CONFIG, params(), tokenizer=loaded.tokenizer)
  again = hf.load_hf(tmp_path / "b")
  assert again.chat_template == loaded.chat_template
  assert again.end_of_turn == loaded.end_of_turn
  assert chat.encode_chat(again, MESSAGES).ids == (
      chat.encode_chat(loaded, MESSAGES).ids
  )


def of_template(template):
  tokenizer = tokenizer_lib.wrapped(
      tiny_tokenizers.qwen3().backend, chat_template=template
  )
  return pretrained_lib.Pretrained(br.Decoder(CONFIG), {}, tokenizer)


@pytest.mark.parametrize("template, text", [
    ("{{ messages[0].content | tojson }}", '"<b>é</b>"'),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
    ("{% for x in [1, 2] %}{{ x }}{% break %}{% endfor %}", "1"),
    ("\n{{ 'a' }}\n", "\na"),
    ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
    ("\n{{ strftime_now('%A, %H:%M') }}", "\nFriday, 00:00"),
    ("{% if strftime_now is defined %}{{ strftime_now('%y') }}{% endif %}",
     "24"),
    ("{% macro day() %}{{ strftime_now('%-d') }}{% endmacro %}{{ day() }}",
     "26"),
])
def test_templates_are_rendered_as_by_transformers(template, text):
  messages = [{"role": "user", "content": "<b>é</b>"}]
  of = of_template(template)
  assert chat.render_chat(of, messages) == text
  if "strftime_now" not in template:
    assert of.tokenizer.apply_chat_template(messages, tokenize=False) == text


def test_the_day_is_an_argument():
  of = of_template(
      "{{ strftime_now('%Y-%m-%d') }}{{ strftime_now('%H') }}{{ 'b' if x }}"
  )
  messages = [{"role": "user", "content": "Why?"}]
  day = datetime.date(2031, 5, 6)
  assert chat.render_chat(of, messages, date=day) == "2031-05-0600"
  hour = datetime.datetime(2031, 5, 6, 7)
  assert chat.render_chat(of, messages, date=hour, x=True) == "2031-05-0607b"
  ids = {
      date: tasks.Chat(of_stop(of), date=date).prompt("Why?").ids
      for date in (day, chat.DATE)
  }
  assert of.tokenizer.decode(ids[day]) == "2031-05-0600"
  assert of.tokenizer.decode(ids[chat.DATE]) == "2024-07-2600"
  one, other = (tasks.Chat(of_stop(of), date=date) for date in ids)
  assert one.fingerprint() != other.fingerprint()


def test_a_letter_that_is_a_control_token_is_refused_in_text():
  """Nothing else could stand for it, and it would vanish."""
  tokenizer = tokenizer_lib.wrapped(
      tiny_tokenizers.qwen3().backend, pad_token="x"
  )
  of = pretrained_lib.Pretrained(br.Decoder(CONFIG), {}, tokenizer)
  spelt = chat.encode_text(of, "the<|im_end|>").ids
  assert tokenizer.decode(spelt) == "the<|im_end|>"
  with pytest.raises(ValueError, match=r"spells \['x'\], control tokens of"):
    chat.encode_text(of, "xx")


def of_stop(of):
  return pretrained_lib.Pretrained(of.model, {}, of.tokenizer, (1,))


def test_a_model_without_a_template_has_no_chat():
  with pytest.raises(ValueError, match="no chat template"):
    chat.render_chat(of_template(None), MESSAGES)


def test_text_is_what_transformers_is_imported_for():
  code = (
      "import sys, branch_replay, branch_replay.weights.gguf\n"
      "import branch_replay.tasks\n"
      "sys.exit('transformers' in sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
