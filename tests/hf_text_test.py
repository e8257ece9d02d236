# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Text parts of models that read images too, against transformers."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import transformers

from branch_replay.weights import hf
from branch_replay.weights import hf_config
from branch_replay.weights import hf_text

GOLDENS = pathlib.Path(__file__).parent / "goldens"
PUBLISHED = pathlib.Path(__file__).parent / "published"
MODELS = ("mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe")


def mapping(name):
  return json.loads((GOLDENS / name / "config.json").read_text())


def tensors(name):
  return safetensors_numpy.load_file(GOLDENS / name / "model.safetensors")


def write(directory, options, named):
  safetensors_numpy.save_file(named, directory / "model.safetensors")
  (directory / "config.json").write_text(json.dumps(options))


def logits_are_those_of(name, one):
  with np.load(GOLDENS / name / "golden.npz") as golden:
    logits_GTV = jax.jit(one.model.apply)(
        {"params": one.params}, jnp.asarray(golden["tokens"])[None]
    )
    return np.max(np.abs(logits_GTV[0] - golden["logits"])) < 2e-4


@pytest.mark.exhaustive(but="moe")
@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_computes_what_the_whole_does(tmp_path, name):
  """The golden is of the model with its image part; it is written and read."""
  one = hf.load_hf(GOLDENS / name)
  assert logits_are_those_of(name, one)
  hf.save_hf(tmp_path, one.config, one.params)
  again = hf.load_hf(tmp_path)
  assert again.config == one.config
  chex.assert_trees_all_equal(again.params, one.params)


@pytest.mark.exhaustive(but="qwen2_5_vl")
@pytest.mark.parametrize("name", ("mistral3", "qwen2_5_vl", "qwen3_vl"))
def test_the_text_part_is_written_under_the_names_of_text(tmp_path, name):
  one = hf.load_hf(GOLDENS / name)
  hf.save_hf(tmp_path, one.config, one.params)
  written = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  own_name = hf_text.namer(mapping(name))
  kept = {own_name(x): y for x, y in tensors(name).items()}
  assert written.keys() == kept.keys() - {None}
  for key, value in written.items():
    np.testing.assert_array_equal(value, kept[key])


EXPERTS = "model.language_model.layers.{}.mlp.experts."


@pytest.mark.exhaustive(but="True")
@pytest.mark.parametrize("turned", (False, True))
def test_one_tensor_may_hold_all_experts(tmp_path, turned):
  """As published: in Qwen3-VL-MoE each matrix is the transpose."""
  found, wanted = tensors("qwen3_5_moe"), hf.load_hf(GOLDENS / "qwen3_5_moe")
  for before in map(EXPERTS.format, range(2)):
    gate, up, down = (
        np.stack([found.pop(f"{before}{e}.{x}.weight") for e in range(4)])
        for x in ("gate_proj", "up_proj", "down_proj")
    )
    both = {"gate_up_proj": np.concatenate([gate, up], 1), "down_proj": down}
    found |= {
        before + x: np.ascontiguousarray(y.swapaxes(1, 2)) if turned else y
        for x, y in both.items()
    }
  found = {x: y.astype(jnp.bfloat16) for x, y in found.items()}
  write(tmp_path, mapping("qwen3_5_moe"), found)
  one = hf.load_hf(tmp_path)
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wanted.params)
  chex.assert_trees_all_equal(one.params, rounded)
  lost = EXPERTS.format(1) + "down_proj"
  found[lost] = found[lost][:, :, :3]
  write(tmp_path, mapping("qwen3_5_moe"), found)
  with pytest.raises(ValueError, match="misshapen model.layers.1.mlp.experts"):
    hf.load_hf(tmp_path)


def test_a_flat_config_is_that_of_its_text_part():
  """Qwen2.5-VL was published so, and with the older name of its positions."""
  nested = mapping("qwen2_5_vl")
  inner = dict(nested["text_config"])
  rope = inner.pop("rope_parameters")
  flat = nested | inner | dict(
      model_type="qwen2_5_vl", rope_theta=rope["rope_theta"],
      rope_scaling={"type": "mrope", "mrope_section": rope["mrope_section"]},
  )
  del flat["text_config"], flat["layer_types"]
  read = [
      hf_config.config_from_hf(hf_text.text_part(x)) for x in (flat, nested)
  ]
  assert read[0] == read[1]
  with pytest.raises(ValueError, match="'mrope' is not supported"):
    hf_config.config_from_hf(flat | {"model_type": "qwen2"})


@pytest.mark.exhaustive(but="mistral3")
@pytest.mark.parametrize("name", ("mistral3", "qwen2_5_vl", "qwen3_vl"))
def test_image_tensors_need_an_image_part(tmp_path, name):
  """Without one in the config they are as unknown as any other."""
  options = mapping(name)
  del options["vision_config"]
  write(tmp_path, options, tensors(name))
  with pytest.raises(ValueError, match="unexpected .*(visual|vision_tower)"):
    hf.load_hf(tmp_path)


@pytest.mark.parametrize("other", (
    "visual.merger.weight", "vision_tower.norm.weight",
    "model.visual.norm.weight", "multi_modal_projector.linear_1.weight",
))
def test_a_model_of_text_alone_has_no_image_tensors(tmp_path, other):
  write(
      tmp_path, mapping("qwen3"),
      tensors("qwen3") | {other: np.ones(3, np.float32)},
  )
  with pytest.raises(ValueError, match=f"unexpected .*{other}"):
    hf.load_hf(tmp_path)


def test_a_text_part_of_another_family_is_not_taken_for_the_usual_one():
  options = mapping("mistral3")
  options["text_config"]["model_type"] = "ministral3"
  with pytest.raises(ValueError, match="'ministral3' is not supported, becaus"):
    hf_config.config_from_hf(hf_text.text_part(options))


@pytest.mark.parametrize("name", (
    "gemma-3-4b-it", "gemma-3-12b-it", "gemma-3-27b-it",
))
def test_a_sparse_text_config_has_the_defaults_of_transformers(name):
  inner = json.loads((PUBLISHED / f"{name}.json").read_text())["text_config"]
  wanted = transformers.Gemma3TextConfig(**inner)
  config = hf_config.config_from_hf(inner)
  for own, field in {
      "vocab_size": "vocab_size", "width": "hidden_size",
      "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
      "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
      "ffn_width": "intermediate_size", "norm_eps": "rms_norm_eps",
      "max_positions": "max_position_embeddings", "window": "sliding_window",
      "tied_embeddings": "tie_word_embeddings",
  }.items():
    assert getattr(config, own) == getattr(wanted, field), own
  divisor = config.score_divisor or config.head_dim
  assert divisor == wanted.query_pre_attn_scalar
  kinds = {"sliding_attention": "sliding", "full_attention": "full"}
  pattern = config.layer_pattern
  assert [kinds[x] for x in wanted.layer_types] == [
      pattern[i % len(pattern)] for i in range(config.num_layers)
  ]


def test_a_gemma_of_an_empty_config_is_that_of_transformers():
  wanted = transformers.Gemma3TextConfig()
  config = hf_config.config_from_hf({"model_type": "gemma3_text"})
  assert (
      config.width, config.num_layers, config.num_heads, config.num_kv_heads,
      config.vocab_size, config.ffn_width, config.window,
  ) == (
      wanted.hidden_size, wanted.num_hidden_layers, wanted.num_attention_heads,
      wanted.num_key_value_heads, wanted.vocab_size, wanted.intermediate_size,
      wanted.sliding_window,
  )
