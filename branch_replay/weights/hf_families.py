# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts `config.json` of Gemma 3, Qwen3.5, Qwen3-Next and DeepSeek.

A reader returns the `ModelConfig` fields in which its family differs from
Llama; a writer returns the options that express them. Tensors are in
`hf_tensors`.
"""

from collections.abc import Mapping
from typing import Any

from branch_replay import config as config_lib
from branch_replay.mixers import kinds
from branch_replay.models import pattern
from branch_replay.weights import hf_experts
from branch_replay.weights import hf_fields

_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "delta",
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def _pattern(mapping, interval: int, other: str) -> tuple[str, ...]:
  """The shortest period of the kinds of layers.

  Without `layer_types` every `interval`-th layer is one of full attention.
  """
  layers = hf_fields.integer(mapping, "num_hidden_layers")
  names = mapping.get("layer_types") or [
      other if (layer + 1) % interval else "full_attention"
      for layer in range(layers)
  ]
  if set(names) - {other, "full_attention"} or len(names) != layers:
    raise ValueError(
        f"layer_types={names!r} must name {other!r} or 'full_attention' for "
        f"each of {layers} layers."
    )
  kinds = [_KINDS[name] for name in names]
  period = next(
      size for size in range(1, layers + 1)
      if all(kind == kinds[i % size] for i, kind in enumerate(kinds))
  )
  return tuple(kinds[:period])


def _layer_types(config: config_lib.ModelConfig) -> list[str]:
  """The inverse of `_pattern`: a name for each layer.

  Raises:
    ValueError: a kind of layer that has no name.
  """
  unnamed = [kind for kind in config.layer_pattern if kind not in _NAMES]
  if unnamed:
    raise ValueError(
        f"layer_pattern has {', '.join(map(repr, unnamed))}, which no Hugging "
        f"Face model_type has here: only {', '.join(_NAMES)} can be saved."
    )
  return [_NAMES[kind] for kind in pattern.layers(config)]


def _heads(mapping) -> dict[str, int]:
  """Attention heads, for which these families have no usable defaults."""
  return {
      "num_kv_heads": hf_fields.integer(mapping, "num_key_value_heads"),
      "head_dim": hf_fields.integer(mapping, "head_dim", default=256),
  }


def _by_layer_type(mapping) -> Mapping[str, Any]:
  """`rope_parameters` of a family that has one set for each type of layer."""
  rope = mapping.get("rope_parameters") or {}
  kinds = ("full_attention", "sliding_attention")
  if not isinstance(rope, Mapping) or any(
      key not in kinds or not isinstance(value, Mapping | None)
      for key, value in rope.items()
  ):
    raise ValueError(
        f"rope_parameters={rope!r} must hold options for each of "
        f"{' and '.join(kinds)} in this family."
    )
  return rope


def gemma3(mapping: Mapping[str, Any]) -> dict[str, Any]:
  """Config fields of Gemma 3."""
  hf_fields.check_fixed(mapping, {
      "hidden_activation": "gelu_pytorch_tanh",
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
      "use_bidirectional_attention": False,
  })
  default = mapping.get("_sliding_window_pattern") or 6
  kinds = _pattern(
      mapping,
      hf_fields.integer(mapping, "sliding_window_pattern", default=default),
      "sliding_attention",
  )
  rope = _by_layer_type(mapping)
  theta, scaling = hf_fields.whole_rope_from_hf(
      {**mapping, "rope_parameters": rope.get("full_attention")},
      default_theta=1_000_000.0,
  )
  local, scaled = hf_fields.whole_rope_from_hf({
      "rope_theta": mapping.get("rope_local_base_freq"),
      "rope_parameters": rope.get("sliding_attention"),
  })
  if scaled is not None:
    raise ValueError(
        f"rope_parameters scale the sliding layers, {scaled}: only those of "
        "full attention may be."
    )
  sliding = "sliding" in kinds
  apart = sliding and (local, None) != (theta, scaling)
  window = hf_fields.integer(mapping, "sliding_window", default=4096)
  heads = _heads(mapping)
  divisor = hf_fields.integer(mapping, "query_pre_attn_scalar", default=256)
  return heads | {
      "layer_pattern": kinds,
      "window": window if sliding else None,
      "rope_theta": theta,
      "rope_theta_local": local if apart else None,
      "rope_scaling": scaling,
      "norms_from_one": True,
      "qk_norm": True,
      "score_divisor": None if divisor == heads["head_dim"] else divisor,
      "post_norms": True,
      "activation": "gelu_tanh",
      "scale_embeddings": True,
      "tied_embeddings": bool(mapping.get("tie_word_embeddings", True)),
  }


def _gemma3_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  local, _ = kinds.of(config, "sliding").rope
  return {
      "architectures": ["Gemma3ForCausalLM"],
      "model_type": "gemma3_text",
      "hidden_activation": "gelu_pytorch_tanh",
      "layer_types": _layer_types(config),
      "sliding_window": config.window or 4096,
      "rope_local_base_freq": local,
      "query_pre_attn_scalar": config.score_divisor or config.head_dim,
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
      "attention_bias": False,
  }


def hybrid(mapping: Mapping[str, Any]) -> dict[str, Any]:
  """Config fields of Qwen3-Next and Qwen3.5."""
  hf_fields.check_fixed(mapping, {"attn_output_gate": True})
  heads = _heads(mapping)
  theta, scaling, share = hf_fields.rope_from_hf(mapping)
  rotated = int(heads["head_dim"] * (0.25 if share is None else share))
  interval = hf_fields.integer(mapping, "full_attention_interval", default=4)
  kinds = _pattern(mapping, interval, "linear_attention")
  delta = None
  if "delta" in kinds:
    delta = config_lib.GatedDelta(*(
        hf_fields.integer(mapping, f"linear_{name}", default=default)
        for name, default in (
            ("num_key_heads", 16), ("num_value_heads", 32),
            ("key_head_dim", 128), ("value_head_dim", 128),
            ("conv_kernel_dim", 4),
        )
    ))
  return heads | {
      "layer_pattern": kinds,
      "delta": delta,
      "rope_theta": theta,
      "rope_scaling": scaling,
      "rotary_dim": rotated if rotated < heads["head_dim"] else None,
      "norms_from_one": True,
      "qk_norm": True,
      "output_gate": True,
  }


def qwen3_next(mapping: Mapping[str, Any]) -> dict[str, Any]:
  """Config fields of Qwen3-Next, which may have experts."""
  return hybrid(mapping) | {"experts": hf_experts.qwen3_next(mapping)}


def _hybrid_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  delta = config.delta
  rotated = config.rotary_dim or config.head_dim
  options = {
      "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
  }
  if config.experts is not None:
    options = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        **hf_experts.qwen3_next_to_hf(config.experts),
    }
  return {
      **options,
      "hidden_act": "silu",
      "layer_types": _layer_types(config),
      "partial_rotary_factor": rotated / config.head_dim,
      "linear_num_key_heads": delta.key_heads,
      "linear_num_value_heads": delta.value_heads,
      "linear_key_head_dim": delta.key_dim,
      "linear_value_head_dim": delta.value_dim,
      "linear_conv_kernel_dim": delta.conv_width,
      "attention_bias": False,
  }


def deepseek(mapping: Mapping[str, Any]) -> dict[str, Any]:
  """Config fields of DeepSeek-V2 and -V3."""
  heads = hf_fields.integer(mapping, "num_attention_heads")
  hf_fields.check_fixed(mapping, {
      "rope_interleave": True,
      "num_key_value_heads": heads,
  })
  theta, scaling = hf_fields.whole_rope_from_hf(mapping)
  rank = mapping.get("q_lora_rank", 1536)
  latent = config_lib.LatentAttention(
      rank=hf_fields.integer(mapping, "kv_lora_rank", default=512),
      nope_dim=hf_fields.integer(mapping, "qk_nope_head_dim", default=128),
      rope_dim=hf_fields.integer(mapping, "qk_rope_head_dim", default=64),
      value_dim=hf_fields.integer(mapping, "v_head_dim", default=128),
      query_rank=rank,
      # Whatever the epsilon of the other norms is.
      norm_eps=1e-6 if mapping.get("rms_norm_eps", 1e-6) != 1e-6 else None,
  )
  return {
      "experts": hf_experts.deepseek(mapping),
      "layer_pattern": ("latent",),
      "latent": latent,
      "num_kv_heads": 1,
      "head_dim": latent.rope_dim,
      "rope_theta": theta,
      "rope_scaling": scaling,
  }


def _deepseek_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  latent, experts = config.latent, config.experts
  version = 2 if experts is not None and experts.scores == "softmax" else 3
  options = {"first_k_dense_replace": config.num_layers}
  if experts is not None:
    options = hf_experts.deepseek_to_hf(experts)
  return {
      "architectures": [f"DeepseekV{version}ForCausalLM"],
      "model_type": f"deepseek_v{version}",
      **options,
      "num_nextn_predict_layers": 0,
      "hidden_act": "silu",
      "num_key_value_heads": config.num_heads,
      "head_dim": latent.rope_dim,
      "kv_lora_rank": latent.rank,
      "q_lora_rank": latent.query_rank,
      "qk_nope_head_dim": latent.nope_dim,
      "qk_rope_head_dim": latent.rope_dim,
      "v_head_dim": latent.value_dim,
      "rope_interleave": True,
      "attention_bias": False,
  }


def to_hf(config: config_lib.ModelConfig) -> dict[str, Any] | None:
  """Options of the family the config belongs to; None for a Llama-like one."""
  if "latent" in config.layer_pattern:
    return _deepseek_to_hf(config)
  if "delta" in config.layer_pattern:
    return _hybrid_to_hf(config)
  if config.post_norms:
    return _gemma3_to_hf(config)
  return None
