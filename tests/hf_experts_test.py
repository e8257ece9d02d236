# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts in files of Qwen3-Next and DeepSeek: options, names, what matters.

That logits and gradients are those of transformers is in families_test.py.
"""

import dataclasses
import functools
import json
import logging
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import branch_replay as br
from branch_replay.weights import hf
from branch_replay.weights import hf_config

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def mapping(name):
  return json.loads((GOLDENS / name / "config.json").read_text())


def tensors(name):
  return safetensors_numpy.load_file(GOLDENS / name / "model.safetensors")


@functools.cache
def loaded(name):
  return hf.load_hf(GOLDENS / name)


def write(directory, name, more, **options):
  """A golden's directory with other tensors and options besides."""
  safetensors_numpy.save_file(
      tensors(name) | more, directory / "model.safetensors"
  )
  (directory / "config.json").write_text(json.dumps(mapping(name) | options))


def test_options_of_experts_by_hand():
  assert loaded("qwen3_next_experts").config.experts == br.Experts(
      6, 2, 4, shared_width=8, shared_gate=True
  )
  assert loaded("deepseek_v2_greedy").config.experts == br.Experts(
      8, 3, 4, shared_width=8, first_dense=1, normalised=False
  )
  assert loaded("deepseek_v2_groups").config.experts == br.Experts(
      8, 3, 4, shared_width=8, first_dense=1, normalised=False, scaling=4.0,
      groups=4, top_groups=2,
  )
  assert loaded("deepseek_v3_experts").config.experts == br.Experts(
      8, 3, 4, shared_width=8, first_dense=1, scores="sigmoid", scaling=2.5,
      correction=True, groups=4, top_groups=2, group_top=2,
  )


def test_absent_options_have_the_defaults_of_transformers():
  """Of its classes DeepseekV3Config and Qwen3NextConfig."""
  options = mapping("deepseek_v3_experts") | dict(num_hidden_layers=5)
  for key in (
      "first_k_dense_replace", "n_routed_experts", "n_shared_experts",
      "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group",
      "routed_scaling_factor", "norm_topk_prob",
  ):
    del options[key]
  assert hf_config.config_from_hf(options).experts == br.Experts(
      256, 8, 2048, shared_width=2048, first_dense=3, scores="sigmoid",
      scaling=2.5, correction=True, groups=8, top_groups=4, group_top=2,
  )
  options = mapping("qwen3_next_experts")
  for key in (
      "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size",
      "norm_topk_prob", "num_experts", "num_experts_per_tok",
      "shared_expert_intermediate_size",
  ):
    del options[key]
  assert hf_config.config_from_hf(options).experts == br.Experts(
      512, 10, 512, shared_width=512, shared_gate=True
  )


def test_leading_layers_of_qwen3_next_may_be_dense():
  options = mapping("qwen3_next_experts") | dict(mlp_only_layers=[0])
  config = hf_config.config_from_hf(options)
  assert config.experts.first_dense == 1
  written = hf_config.config_to_hf(config)
  assert written["mlp_only_layers"] == [0]


# Change of the configuration, and how far logits are off then at the least.
CHANGES = (
    ("qwen3_next_experts", dict(normalised=False)),
    ("qwen3_next_experts", dict(top_k=1)),
    ("qwen3_next_experts", dict(shared_gate=False)),
    ("deepseek_v2_greedy", dict(normalised=True)),
    ("deepseek_v2_groups", dict(scaling=1.0)),
    ("deepseek_v2_groups", dict(groups=1, top_groups=1)),
    ("deepseek_v3_experts", dict(correction=False)),
    ("deepseek_v3_experts", dict(group_top=1)),
    ("deepseek_v3_experts", dict(normalised=False)),
    ("deepseek_v3_experts", dict(scores="softmax")),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, change", CHANGES)
def test_every_option_of_the_routing_matters(name, change):
  """Without it the goldens would be missed: that they are met says something.
  """
  one = loaded(name)
  experts = dataclasses.replace(one.config.experts, **change)
  assert far(one, name, dataclasses.replace(one.config, experts=experts)) > 0.01


def far(one, name, config):
  """Largest difference from the golden's logits under another config."""
  with np.load(GOLDENS / name / "golden.npz") as golden:
    logits_GTV = br.Decoder(config).apply(
        {"params": one.params}, jnp.asarray(golden["tokens"])[None]
    )
    return np.max(np.abs(logits_GTV[0] - golden["logits"]))


def test_latents_have_an_epsilon_of_their_own():
  """0.05 in the file, and 1e-6 inside of transformers' attention."""
  config = loaded("deepseek_v3_experts").config
  assert (config.norm_eps, config.latent.norm_eps) == (0.05, 1e-6)
  assert loaded("deepseek_v2_groups").config.latent.norm_eps is None
  same = dataclasses.replace(
      config, latent=dataclasses.replace(config.latent, norm_eps=None)
  )
  with pytest.raises(ValueError, match="latent=.* cannot be said in deepseek"):
    hf_config.config_to_hf(same)


@pytest.mark.exhaustive
def test_the_epsilon_of_latents_matters():
  one = loaded("deepseek_v3_experts")
  same = dataclasses.replace(
      one.config, latent=dataclasses.replace(one.config.latent, norm_eps=None)
  )
  assert far(one, "deepseek_v3_experts", same) > 0.01


@pytest.mark.parametrize("name, options, message", (
    (
        "qwen3_next_experts", dict(mlp_only_layers=[1]),
        r"mlp_only_layers=\[1\].*\[0\] of 2",
    ),
    (
        "qwen3_next_experts", dict(shared_expert_intermediate_size=0),
        "shared_width",
    ),
    ("deepseek_v2_groups", dict(norm_topk_prob=True), "norm_topk_prob=True"),
    ("deepseek_v2_groups", dict(topk_method="noaux_tc"), "group_limited_gr"),
    ("deepseek_v2_groups", dict(scoring_func="sigmoid"), "scoring_func"),
    ("deepseek_v2_groups", dict(num_experts_per_tok=None), "num_experts_per"),
    ("deepseek_v3_experts", dict(scoring_func="softmax"), "'softmax'.*sigmoid"),
    ("deepseek_v3_experts", dict(topk_method="greedy"), "'greedy'.*noaux_tc"),
    ("deepseek_v3_experts", dict(moe_layer_freq=2), "moe_layer_freq=2"),
    ("deepseek_v3_experts", dict(n_shared_experts=0), "n_shared_experts=0"),
    ("deepseek_v3_experts", dict(n_group=3), "not a multiple of groups=3"),
))
def test_what_is_not_computed_is_refused(name, options, message):
  with pytest.raises(ValueError, match=message):
    hf_config.config_from_hf(mapping(name) | options)


@pytest.mark.parametrize("name, change", (
    ("qwen3_next_experts", dict(shared_gate=False)),
    ("qwen3_next_experts", dict(scaling=2.0)),
    ("deepseek_v2_groups", dict(normalised=True)),
    ("deepseek_v2_groups", dict(group_top=2)),
    ("deepseek_v3_experts", dict(correction=False)),
    ("deepseek_v3_experts", dict(shared_width=6)),
    ("deepseek_v3_experts", dict(shared_width=0)),
))
def test_no_family_has_these_experts(name, change):
  config = loaded(name).config
  experts = dataclasses.replace(config.experts, **change)
  with pytest.raises(ValueError, match="Hugging Face model_type here"):
    hf_config.config_to_hf(dataclasses.replace(config, experts=experts))


# Heads that predict later tokens.

HEADS = {
    "qwen3_next_experts": ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"),
    "deepseek_v3_experts": (
        "model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_for_later_tokens_are_left_out_in_one_line(
    tmp_path, caplog, name
):
  write(tmp_path, name, {x: np.ones((2, 3), np.float32) for x in HEADS[name]})
  with caplog.at_level(logging.WARNING):
    found = hf.load_hf(tmp_path)
  assert found.config == loaded(name).config
  (line,) = [x.getMessage() for x in caplog.records]
  assert "2 tensors" in line and all(x in line for x in HEADS[name])
  hf.stored_dtype(tmp_path)


@pytest.mark.parametrize("name, options, more", (
    ("deepseek_v3_experts", {"num_nextn_predict_layers": 0}, "layers.2.norm"),
    ("deepseek_v3_experts", {}, "layers.3.norm"),
    ("deepseek_v2_groups", {}, "layers.2.norm"),
    ("deepseek_v3_experts", {}, "mtp.fc.weight"),
    ("qwen3", {}, "mtp.fc.weight"),
))
def test_in_other_places_they_are_unexpected(tmp_path, name, options, more):
  write(tmp_path, name, {f"model.{more}": np.ones(3, np.float32)}, **options)
  with pytest.raises(ValueError, match=f"unexpected model.{more}"):
    hf.load_hf(tmp_path)
