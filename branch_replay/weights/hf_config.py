# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face `config.json` to `ModelConfig` and back.

Geometry is read and never guessed. If a file asks for something `Decoder` does
not compute, that is an error: a model that ignores it would be wrong by so
little that nobody notices.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.weights import hf_families
from branch_replay.weights import hf_fields
from branch_replay.weights import hf_llama
from branch_replay.weights import hf_text


class Family(NamedTuple):
  """A `model_type` that is read.

  Attributes:
    read: function from the parsed file to the `ModelConfig` fields in which
      the family differs from what all have.
    defaults: options that published files leave out, as the classes of
      transformers fill them.
  """

  read: Callable[[Mapping[str, Any]], dict[str, Any]]
  defaults: Mapping[str, Any] = {}


_DEEPSEEK_V2 = dict(
    first_k_dense_replace=0, n_routed_experts=64, n_shared_experts=2,
    moe_intermediate_size=1407, routed_scaling_factor=1.0,
    norm_topk_prob=False,
)
_DEEPSEEK_V3 = dict(
    first_k_dense_replace=3, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048, n_group=8, topk_group=4,
    routed_scaling_factor=2.5, norm_topk_prob=True,
)
FAMILIES = {
    "llama": Family(hf_llama.read),
    "mistral": Family(hf_llama.read),
    "qwen2": Family(hf_llama.read),
    "qwen3": Family(hf_llama.read),
    "qwen3_moe": Family(hf_llama.read),
    "gemma3_text": Family(hf_families.gemma3, dict(
        vocab_size=262_208, hidden_size=2304, intermediate_size=9216,
        num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, max_position_embeddings=131_072,
    )),
    "qwen3_5_text": Family(hf_families.hybrid),
    # No layer has the dense feed-forward that the width is of.
    "qwen3_5_moe_text": Family(hf_families.qwen3_next, dict(
        intermediate_size=5632, num_experts=256, num_experts_per_tok=8,
    )),
    "qwen3_next": Family(hf_families.qwen3_next),
    "deepseek_v2": Family(hf_families.deepseek, _DEEPSEEK_V2),
    "deepseek_v3": Family(hf_families.deepseek, _DEEPSEEK_V3),
    "kimi_k2": Family(hf_families.deepseek, _DEEPSEEK_V3),
}
# Why related families are not supported.
_REFUSED = {
    "gemma2": "its scores and logits are soft-capped",
    "glm4": "it rotates half of each head, in pairs of neighbours, and norms "
            "what a layer adds",
    "gpt_oss": "its attention has sinks and its experts biases",
    "llama4": "its attention is in chunks, and some layers have no positions",
    "ministral3": "its queries grow with their position",
    "mixtral": "its experts have other names",
    "phi3": "its projections are fused in a form that is not read",
    "smollm3": "every fourth layer of it has no positions",
    **{
        family: f"it has no text_config; its text part is {images.family}"
        for family, images in hf_text.IMAGES.items()
    },
}

# Options with one supported value, which is also the default.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


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
  if family not in FAMILIES:
    why = f", because {_REFUSED[family]}" if family in _REFUSED else ""
    raise ValueError(
        f"model_type={family!r} is not supported{why}: {', '.join(FAMILIES)} "
        "are."
    )
  mapping = {**FAMILIES[family].defaults, **mapping}
  if mapping.get("quantization_config") is not None:
    raise ValueError(
        f"quantization_config={mapping['quantization_config']!r}: its weights "
        "are quantised. Dequantise them first, and delete the option."
    )
  hf_fields.check_fixed(mapping, _FIXED)
  options = FAMILIES[family].read(mapping)
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
    options = hf_llama.to_hf(config)
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
