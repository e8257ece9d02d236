# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face `config.json` to `ModelConfig` and back.

Geometry is read and never guessed. If a file asks for something `Decoder` does
not compute, that is an error: a model that ignores it would be wrong by so
little that nobody notices.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.weights import hf_families
from branch_replay.weights import hf_fields

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Why related families are not supported.
_REFUSED = {
    "gemma2": ", because its scores and logits are soft-capped",
    "gemma3": " without a text_config; its text part is gemma3_text",
    "qwen3_5": " without a text_config; its text part is qwen3_5_text",
}
# Models that read images too, and the families of their text parts.
_TEXT_PARTS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}

# Options with one supported value, which is also the default.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
# In Qwen3-MoE every layer must have experts.
_FIXED_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def text_part(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
  """The config of a model's text part; of a model of text alone its own.

  Models that read images too keep it under `text_config`. What is said outside
  holds for the text part where it does not say otherwise.
  """
  inner = mapping.get("text_config")
  family = mapping.get("model_type")
  if family not in _TEXT_PARTS or not isinstance(inner, Mapping):
    return mapping
  outer = {
      name: mapping[name]
      for name in ("tie_word_embeddings", "quantization_config")
      if name in mapping
  }
  return {**outer, **inner, "model_type": _TEXT_PARTS[family]}


def config_from_hf(
    mapping: Mapping[str, Any],
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
) -> config_lib.ModelConfig:
  """Reads the `config.json` of a model of one of the supported families.

  Both styles of RoPE options are read: `rope_theta` with `rope_scaling`, and
  `rope_parameters` of transformers 5. Absent options have the defaults of the
  transformers classes.

  Args:
    mapping: the parsed file.
    param_dtype: dtype to store parameters in, whatever dtype the file names.
    compute_dtype: dtype of activations and matrix products.

  Returns:
    The configuration.

  Raises:
    ValueError: an option is missing, malformed, or asks for something `Decoder`
      does not compute; the message names it and what is supported.
  """
  family = mapping.get("model_type")
  if family not in (*_ARCHITECTURES, *hf_families.READERS):
    raise ValueError(
        f"model_type={family!r} is not supported"
        f"{_REFUSED.get(family, '')}: {', '.join(_ARCHITECTURES)}, "
        f"{', '.join(hf_families.READERS)}."
    )
  hf_fields.check_fixed(mapping, _FIXED)
  if family in _ARCHITECTURES:
    options = _llama_like(mapping, family)
  else:
    options = hf_families.READERS[family](mapping)
  common = {
      "vocab_size": hf_fields.integer(mapping, "vocab_size"),
      "width": hf_fields.integer(mapping, "hidden_size"),
      "num_layers": hf_fields.integer(mapping, "num_hidden_layers"),
      "num_heads": hf_fields.integer(mapping, "num_attention_heads"),
      "ffn_width": hf_fields.integer(mapping, "intermediate_size"),
      "max_positions": hf_fields.integer(mapping, "max_position_embeddings"),
      "norm_eps": float(mapping.get("rms_norm_eps", 1e-6)),
      "tied_embeddings": bool(mapping.get("tie_word_embeddings", False)),
      "param_dtype": str(jnp.dtype(param_dtype)),
      "compute_dtype": str(jnp.dtype(compute_dtype)),
  }
  return config_lib.ModelConfig(**common | options)


def _llama_like(mapping, family) -> dict[str, Any]:
  """Config fields of a Llama, Mistral, Qwen2 or Qwen3 model."""
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
    hf_fields.check_fixed(mapping, _FIXED_MOE)
    experts = _experts(mapping)
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


def _experts(mapping) -> config_lib.Experts:
  """The experts of a Qwen3-MoE model, which every layer has."""
  count = hf_fields.integer(mapping, "num_local_experts", default=128)
  return config_lib.Experts(
      count=hf_fields.integer(mapping, "num_experts", default=count),
      top_k=hf_fields.integer(mapping, "num_experts_per_tok", default=8),
      width=hf_fields.integer(mapping, "moe_intermediate_size", default=768),
      normalised=bool(mapping.get("norm_topk_prob", False)),
  )


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


def config_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  """The `config.json` that describes a model to transformers.

  RoPE is written in the older style, which transformers 4 and 5 both read.
  `torch_dtype` is `config.param_dtype`; `compute_dtype` is not written.

  Args:
    config: configuration of the model.

  Returns:
    A mapping of JSON values. `config_from_hf` of it is the same config apart
    from dtypes.

  Raises:
    ValueError: no published family has this combination.
  """
  options = hf_families.to_hf(config)
  if options is None:
    options = _llama_like_to_hf(config)
  mapping = {
      "vocab_size": config.vocab_size,
      "hidden_size": config.width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "intermediate_size": config.ffn_width,
      "max_position_embeddings": config.max_positions,
      "rope_theta": config.rope_theta,
      "rope_scaling": hf_fields.scaling_to_hf(config.rope_scaling),
      "rms_norm_eps": config.norm_eps,
      "tie_word_embeddings": config.tied_embeddings,
      "torch_dtype": config.param_dtype,
      "attention_dropout": 0.0,
      **options,
  }
  _check_written(config, mapping)
  return mapping


def _check_written(config, mapping):
  """Raises ValueError for what the family's options cannot express."""
  try:
    read = config_from_hf(
        mapping, param_dtype=config.param_dtype,
        compute_dtype=config.compute_dtype,
    )
  except ValueError as error:
    raise ValueError(
        f"{mapping['model_type']} is the nearest Hugging Face model_type here, "
        f"and not near enough: {error}"
    ) from error
  lost = [
      f"{field.name}={getattr(config, field.name)!r}"
      for field in dataclasses.fields(config)
      if field.name != "adapter"
      and getattr(config, field.name) != getattr(read, field.name)
  ]
  if lost:
    raise ValueError(
        f"{', '.join(lost)} cannot be said in {mapping['model_type']}, the "
        "nearest Hugging Face model_type here."
    )


def _llama_like_to_hf(config) -> dict[str, Any]:
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
    options |= {
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.top_k,
        "moe_intermediate_size": config.experts.width,
        "norm_topk_prob": config.experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
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
