# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Published models: each row of docs/models.md against its config.json."""

import json
import math
import pathlib
import re

import pytest
import transformers

import branch_replay as br
from branch_replay.weights import hf_config
from branch_replay.weights import hf_tensors
from branch_replay.weights import hf_text
from branch_replay.weights import stacking

TESTS = pathlib.Path(__file__).parent
ROW = re.compile(
    r"\| (\S+) \| `(\w+)` \| (.+) \| ([\d,]+|–) \| ([^|]+) \|"
)
ROWS = {
    found[1]: found.groups()[1:]
    for line in (TESTS.parent / "docs" / "models.md").read_text().splitlines()
    if (found := ROW.fullmatch(line))
}
LOADED = [name for name, row in ROWS.items() if row[2] != "–"]
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def mapping(name):
  return json.loads((TESTS / "published" / f"{name}.json").read_text())


def read(name):
  """The config of a model's text part, as if it were not quantised."""
  part = dict(hf_text.text_part(mapping(name)))
  part.pop("quantization_config", None)
  return hf_config.config_from_hf(part)


def test_every_config_has_a_row():
  files = {path.stem for path in (TESTS / "published").glob("*.json")}
  assert files == ROWS.keys() and len(files) >= 40


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_whether_it_loads(name):
  family, loads, *_ = ROWS[name]
  options = mapping(name)
  assert options["model_type"] == family
  try:
    hf_config.config_from_hf(hf_text.text_part(options))
  except ValueError as error:
    assert loads.startswith("no: ")
    assert loads.removeprefix("no: ") in str(error)
    return
  assert loads == ("text part" if "vision_config" in options else "yes")


@pytest.mark.parametrize("name", LOADED)
def test_parameters_are_those_of_transformers_and_as_published(name):
  *_, count, published = ROWS[name]
  count = int(count.replace(",", ""))
  wanted = json.loads((TESTS / "goldens" / "published.json").read_text())
  assert count == wanted[name]
  found = re.fullmatch(r"([\d,.]+)([MBT])( \+ embedding)?", published)
  number, unit, apart = found.groups()
  if apart:
    config = read(name)
    count -= config.vocab_size * config.width
  decimals = len(number.partition(".")[2])
  stated = float(number.replace(",", ""))
  assert round(count / UNITS[unit], decimals) == stated


@pytest.mark.exhaustive(but=("Qwen3-Next", "DeepSeek-V3"))
@pytest.mark.parametrize("name", LOADED)
def test_the_decoder_has_that_many_parameters(name):
  slots = stacking.slots(read(name), stacking.HF_NAMES)
  found = sum(math.prod(slot.shape) for slot in slots.values())
  assert f"{found:,}" == ROWS[name][2]


SCALINGS = {
    "default": type(None), "linear": br.LinearScaling,
    "llama3": br.Llama3Scaling, "yarn": br.YarnScaling,
}


@pytest.mark.parametrize("name", LOADED)
def test_geometry_is_as_transformers_reads_it(name):
  options, config = mapping(name), read(name)
  family = options.pop("model_type").replace("kimi_k2", "deepseek_v3")
  options.pop("quantization_config", None)
  whole = transformers.AutoConfig.for_model(family, **options)
  theirs = whole.get_text_config()
  fields = dict(
      vocab_size="vocab_size", width="hidden_size", norm_eps="rms_norm_eps",
      num_layers="num_hidden_layers", num_heads="num_attention_heads",
      max_positions="max_position_embeddings",
  )
  if config.latent is None:
    fields |= dict(num_kv_heads="num_key_value_heads")
  if family != "qwen3_5_moe":  # which has no dense feed-forwards
    fields |= dict(ffn_width="intermediate_size")
  for own, field in fields.items():
    assert getattr(config, own) == getattr(theirs, field), own
  size = getattr(theirs, "head_dim", None)
  assert config.head_dim == (size or config.width // config.num_heads)
  if family != "mistral3":  # published with a head, and without the option
    assert config.tied_embeddings == whole.tie_word_embeddings
  rope = theirs.rope_parameters
  if family.startswith("gemma3"):
    assert config.rope_theta_local == rope["sliding_attention"]["rope_theta"]
    assert config.window == theirs.sliding_window
    rope = rope["full_attention"]
  assert config.rope_theta == rope["rope_theta"]
  scaling = config.rope_scaling
  assert isinstance(scaling, SCALINGS[rope["rope_type"]])
  if scaling is not None:
    assert scaling.factor == rope["factor"]
  share = rope.get("partial_rotary_factor", 1)
  assert (config.rotary_dim or config.head_dim) == config.head_dim * share


# Options and names of published files, by hand.


@pytest.mark.parametrize("name, wanted", (
    ("DeepSeek-V3", {
        "layers.0.mlp.gate_proj": (18432, 7168),
        "layers.3.mlp.experts.255.down_proj": (7168, 2048),
        "layers.3.mlp.shared_experts.up_proj": (2048, 7168),
        "layers.60.mlp.gate": (256, 7168),
        "layers.60.self_attn.kv_a_proj_with_mqa": (576, 7168),
    }),
    ("Qwen3-Next-80B-A3B-Instruct", {
        "layers.0.linear_attn.in_proj_qkvz": (12288, 2048),
        "layers.3.self_attn.q_proj": (8192, 2048),
        "layers.47.mlp.experts.511.up_proj": (512, 2048),
        "layers.47.mlp.shared_expert_gate": (1, 2048),
    }),
))
def test_tensors_of_the_large_ones(name, wanted):
  config, part = read(name), hf_text.text_part(mapping(name))
  slots = stacking.slots(config, stacking.HF_NAMES)
  shapes = {name: slot.shape for name, slot in slots.items()}
  found = hf_tensors.file_shapes(hf_tensors.tensors(config, part), shapes)
  for key, shape in wanted.items():
    assert found[f"model.{key}.weight"] == shape


def test_what_the_large_ones_are_made_of():
  qwen = read("Qwen3-Next-80B-A3B-Instruct")
  assert qwen.layer_pattern == ("delta", "delta", "delta", "full")
  assert qwen.rotary_dim == 64
  experts = qwen.experts
  assert (experts.count, experts.top_k, experts.width) == (512, 10, 512)
  assert experts.shared_gate and experts.normalised
  third = read("DeepSeek-V3").experts
  assert (third.groups, third.top_groups, third.group_top) == (8, 4, 2)
  assert (third.scores, third.scaling, third.correction) == (
      "sigmoid", 2.5, True
  )
  second = read("DeepSeek-V2-Chat").experts
  assert (second.groups, second.top_groups, second.scaling) == (8, 3, 16.0)
  assert (second.scores, second.normalised) == ("softmax", False)
  assert second.shared_width == 2 * 1536 and second.first_dense == 1
  moon = read("Moonlight-16B-A3B-Instruct")
  assert (moon.experts.groups, moon.experts.scaling) == (1, 2.446)
  assert (moon.norm_eps, moon.latent.norm_eps) == (1e-5, 1e-6)
  gemma = read("gemma-3-4b-it")
  assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (8, 4, 256)
  assert gemma.window == 1024 and gemma.tied_embeddings


@pytest.mark.parametrize("name", LOADED)
def test_what_loads_is_written_as_some_family(name):
  config = read(name)
  again = hf_config.config_from_hf(hf_config.config_to_hf(config))
  assert again == config
