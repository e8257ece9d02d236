# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts `config.json` of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from branch_replay import config as config_lib
from branch_replay.weights import hf_experts
from branch_replay.weights import hf_fields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def read(mapping: Mapping[str, Any]) -> dict[str, Any]:
  """Config fields of a Llama, Mistral, Qwen2 or Qwen3 model."""
  family = mapping["model_type"]
  kinds = set(mapping.get("layer_types") or []) - {"full_attention"}
  if kinds:
    raise ValueError(
        f"layer_types has {sorted(kinds)}: only 'full_attention' is supported."
    )
  theta, scaling = hf_fields.whole_rope_from_hf(mapping)
  heads = hf_fields.integer(mapping, "num_attention_heads")
  window = None
  if family == "mistral" and mapping.get("sliding_window", 1) is not None:
    # Absent means 4096, null means no window.
    window = hf_fields.integer(mapping, "sliding_window", default=4096)
  experts = None
  if family == "qwen3_moe":
    experts = hf_experts.qwen3_moe(mapping)
  return {
      "num_kv_heads": hf_fields.integer(
          mapping, "num_key_value_heads", default=heads
      ),
      "head_dim": _head_dim(mapping, family),
      "rope_theta": theta,
      "rope_scaling": scaling,
      "qk_norm": family in ("qwen3", "qwen3_moe"),
      "qkv_bias": family == "qwen2",
      "layer_pattern": ("full",) if window is None else ("sliding",),
      "window": window,
      "experts": experts,
  }


def _head_dim(mapping, family):
  if mapping.get("head_dim") is not None:
    return hf_fields.integer(mapping, "head_dim")
  if family == "qwen3":
    # The default of Qwen3Config; width / heads would be 64 in Qwen3-0.6B.
    return 128
  width = hf_fields.integer(mapping, "hidden_size")
  heads = hf_fields.integer(mapping, "num_attention_heads")
  if width % heads:
    raise ValueError(
        f"config.json has no head_dim, and hidden_size={width} is not a "
        f"multiple of num_attention_heads={heads}."
    )
  return width // heads


def to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  """Options that make a Llama the nearest of these families to a config."""
  if config.qk_norm and config.qkv_bias:
    raise ValueError(
        "qk_norm and qkv_bias together have no Hugging Face model_type: qwen3 "
        "has the norms, qwen2 the biases."
    )
  family = "llama"
  if config.experts is not None:
    _check_exportable(config)
    family = "qwen3_moe"
  elif config.layer_pattern != ("full",):
    if config.layer_pattern != ("sliding",) or (
        config.qk_norm or config.qkv_bias
    ):
      raise ValueError(
          f"layer_pattern={config.layer_pattern!r} has no Hugging Face "
          "model_type here: mistral has sliding layers alone, without qk_norm "
          "and qkv_bias."
      )
    family = "mistral"
  elif config.qk_norm:
    family = "qwen3"
  elif config.qkv_bias:
    family = "qwen2"
  options = {
      "architectures": [_ARCHITECTURES[family]],
      "model_type": family,
      "hidden_act": "silu",
  }
  if family == "qwen3_moe":
    options |= hf_experts.qwen3_moe_to_hf(config.experts)
  if family == "mistral":
    return options | {"sliding_window": config.window}
  if family != "qwen2":
    options["attention_bias"] = False
  if family == "llama":
    options["mlp_bias"] = False
  else:
    options["use_sliding_window"] = False
  return options


def _check_exportable(config: config_lib.ModelConfig):
  """Raises ValueError for experts that no supported family has."""
  experts = config.experts
  plain = config_lib.Experts(
      experts.count, experts.top_k, experts.width,
      normalised=experts.normalised,
  )
  if experts != plain or config.layer_pattern != ("full",) or (
      config.qkv_bias or not config.qk_norm
  ):
    raise ValueError(
        f"{experts} with layer_pattern={config.layer_pattern!r}, qk_norm="
        f"{config.qk_norm} and qkv_bias={config.qkv_bias} has no Hugging Face "
        "model_type here: qwen3_moe has full attention with qk_norm, and "
        "experts in every layer, chosen by a softmax, without a shared one."
    )
