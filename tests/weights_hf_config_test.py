# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""config.json: what is read, what is refused, what comes back."""

import dataclasses
import json

import pytest

from branch_replay import config as config_lib
from branch_replay.weights import hf_config

CONFIG = config_lib.ModelConfig(
    vocab_size=24, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=40, max_positions=64,
)
TIED = dataclasses.replace(CONFIG, tied_embeddings=True)
QWEN2 = dataclasses.replace(CONFIG, qkv_bias=True, rope_theta=1e6)
QWEN3 = dataclasses.replace(TIED, qk_norm=True, norm_eps=1e-6)
MISTRAL = dataclasses.replace(CONFIG, layer_pattern=("sliding",), window=7)
MOE = dataclasses.replace(
    CONFIG, qk_norm=True,
    experts=config_lib.Experts(6, 2, 12, normalised=False),
)
CONFIGS = {
    "llama": CONFIG, "tied": TIED, "mistral": MISTRAL, "qwen2": QWEN2,
    "qwen3": QWEN3, "qwen3_moe": MOE,
}
SCALINGS = {
    "linear": config_lib.LinearScaling(4.0),
    "llama3": config_lib.Llama3Scaling(8.0, 1.0, 4.0, 16),
    "yarn": config_lib.YarnScaling(4.0, 16),
    "yarn_all": config_lib.YarnScaling(
        4.0, 16, 16.0, 2.0, attention_factor=0.9, truncate=False
    ),
    "yarn_mscale": config_lib.YarnScaling(
        40.0, 16, mscale=1.0, mscale_all_dim=0.707
    ),
}


def mapping(**options):
  return {
      "model_type": "llama", "vocab_size": 24, "hidden_size": 32,
      "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "intermediate_size": 40,
      "max_position_embeddings": 64, **options,
  }


def test_geometry_is_read():
  config = hf_config.config_from_hf(
      mapping(head_dim=16, rms_norm_eps=1e-5, rope_theta=5e5)
  )
  assert config == dataclasses.replace(CONFIG, rope_theta=5e5)
  assert hf_config.config_from_hf(mapping()).head_dim == 8
  assert hf_config.config_from_hf(mapping(head_dim=None)).head_dim == 8
  assert hf_config.config_from_hf(mapping(model_type="qwen3")).head_dim == 128
  assert hf_config.config_from_hf(mapping()).norm_eps == 1e-6
  without = mapping()
  del without["num_key_value_heads"]
  assert hf_config.config_from_hf(without).num_kv_heads == 4
  qwen2 = hf_config.config_from_hf(mapping(model_type="qwen2"))
  assert qwen2.qkv_bias and not qwen2.qk_norm


def test_a_mistral_has_a_window_unless_it_says_that_it_has_none():
  def window(**options):
    config = hf_config.config_from_hf(mapping(model_type="mistral", **options))
    assert config.layer_pattern == (
        ("full",) if config.window is None else ("sliding",)
    )
    return config.window

  assert window(sliding_window=5) == 5
  assert window() == 4096
  assert window(sliding_window=None) is None


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_of_both_styles(name):
  config = dataclasses.replace(
      CONFIG, rope_theta=500.0, rope_scaling=SCALINGS[name]
  )
  old = hf_config.config_to_hf(config)
  assert hf_config.config_from_hf(old) == config
  scaling = old.pop("rope_scaling")
  new = old | {"rope_parameters": scaling | {"rope_theta": old["rope_theta"]}}
  del new["rope_theta"]
  assert hf_config.config_from_hf(new) == config
  oldest = dict(scaling)
  oldest["type"] = oldest.pop("rope_type")
  assert hf_config.config_from_hf(old | {"rope_scaling": oldest}) == config


def test_original_positions_default_to_max_positions():
  config = hf_config.config_from_hf(
      mapping(rope_scaling={"rope_type": "yarn", "factor": 4})
  )
  assert config.rope_scaling == config_lib.YarnScaling(4.0, 64)


def test_default_rope_type_is_no_scaling():
  for rope in ({"rope_type": "default"}, {"type": "default"}, None):
    config = hf_config.config_from_hf(mapping(rope_scaling=rope))
    assert config.rope_scaling is None and config.rope_theta == 10_000.0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(model_type="gemma"), "'gemma'.*llama, mistral, qwen2, qwen3"),
        (dict(model_type=None), "model_type=None"),
        (
            dict(model_type="qwen3_moe", decoder_sparse_step=2),
            "decoder_sparse_step=2.*1",
        ),
        (
            dict(model_type="qwen3_moe", mlp_only_layers=[0]),
            r"mlp_only_layers=\[0\]",
        ),
        (dict(rope_scaling={"type": "dynamic"}), "'dynamic'.*yarn"),
        (dict(rope_parameters={"rope_type": "longrope"}), "'longrope'.*llama3"),
        (dict(rope_scaling={"rope_type": "linear"}), "number factor, not None"),
        (
            dict(rope_scaling={"rope_type": "llama3", "factor": 8}),
            "low_freq_factor",
        ),
        (dict(hidden_act="gelu"), "hidden_act='gelu'.*'silu'"),
        (dict(attention_dropout=0.1), "attention_dropout=0.1"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(model_type="qwen3", attention_bias=True), "attention_bias=True"),
        (
            dict(model_type="qwen2", use_sliding_window=True),
            "use_sliding_window=True",
        ),
        (
            dict(layer_types=["full_attention", "sliding_attention"]),
            "sliding_attention.*full_attention",
        ),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (dict(vocab_size=None), "integer vocab_size, not None"),
        (dict(num_attention_heads=6), "no head_dim.*32.*6"),
    ],
)
def test_what_is_not_computed_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    hf_config.config_from_hf(mapping(**options))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_round_trip(name):
  config = CONFIGS[name]
  written = hf_config.config_to_hf(config)
  family = "llama" if name == "tied" else name
  assert written["model_type"] == family
  assert hf_config.config_from_hf(json.loads(json.dumps(written))) == config


def test_no_family_has_these_windows():
  for other in (
      dict(layer_pattern=("sliding", "full")), dict(qkv_bias=True),
      dict(qk_norm=True),
  ):
    with pytest.raises(ValueError, match="mistral has sliding layers alone"):
      hf_config.config_to_hf(dataclasses.replace(MISTRAL, **other))


def test_qwen3_moe_has_its_defaults_and_the_older_name_of_a_count():
  def experts(**options):
    family = mapping(model_type="qwen3_moe", head_dim=16, **options)
    return hf_config.config_from_hf(family).experts

  assert experts() == config_lib.Experts(128, 8, 768, normalised=False)
  assert experts(num_local_experts=16).count == 16
  assert experts(num_experts=9, norm_topk_prob=True) == config_lib.Experts(
      9, 8, 768
  )


@pytest.mark.parametrize("options", (
    dict(qk_norm=False), dict(layer_pattern=("sliding",), window=3),
    dict(experts=config_lib.Experts(6, 2, 12, shared_width=4)),
    dict(experts=config_lib.Experts(6, 2, 12, first_dense=1)),
    dict(experts=config_lib.Experts(6, 2, 12, scores="sigmoid")),
))
def test_no_family_has_these_experts(options):
  with pytest.raises(ValueError, match="qwen3_moe has full attention"):
    hf_config.config_to_hf(dataclasses.replace(MOE, **options))


def test_no_family_has_both_norms_and_biases():
  config = dataclasses.replace(CONFIG, qk_norm=True, qkv_bias=True)
  with pytest.raises(ValueError, match="qk_norm and qkv_bias"):
    hf_config.config_to_hf(config)
