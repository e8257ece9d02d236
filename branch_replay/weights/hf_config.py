# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `config.json` to `ModelConfig` and back.

Geometry is read, never guessed; whatever a file asks for that `Decoder` does
not compute is an error, because a model that runs with it ignored is wrong only
by a little.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from branch_replay import config as config_lib

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Options that only one value of is computed here; absent means that value.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}


def config_from_hf(
    mapping: Mapping[str, Any],
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
) -> config_lib.ModelConfig:
  """Reads the `config.json` of a Llama (SmolLM), Mistral or Qwen2/3 model.

  Both styles of RoPE options are read: `rope_theta` with `rope_scaling`, and
  the `rope_parameters` of transformers 5. Absent options have the defaults of
  the transformers classes.

  Args:
    mapping: the parsed file.
    param_dtype: dtype to store parameters in, whatever dtype the file names.
    compute_dtype: dtype of activations and matrix products.

  Returns:
    The configuration.

  Raises:
    ValueError: an option is missing, malformed, or asks for something that
      `Decoder` does not compute; the message names it and what is supported.
  """
  family = mapping.get("model_type")
  if family not in _ARCHITECTURES:
    raise ValueError(
        f"model_type={family!r} is not supported: {', '.join(_ARCHITECTURES)}."
    )
  _check_fixed(mapping)
  theta, scaling = _rope_from_hf(mapping)
  heads = _integer(mapping, "num_attention_heads")
  window = None
  if family == "mistral" and mapping.get("sliding_window", 1) is not None:
    # MistralConfig has a constant default; null means that there is none.
    window = _integer(mapping, "sliding_window", default=4096)
  return config_lib.ModelConfig(
      vocab_size=_integer(mapping, "vocab_size"),
      width=_integer(mapping, "hidden_size"),
      num_layers=_integer(mapping, "num_hidden_layers"),
      num_heads=heads,
      num_kv_heads=_integer(mapping, "num_key_value_heads", default=heads),
      head_dim=_head_dim(mapping, family),
      ffn_width=_integer(mapping, "intermediate_size"),
      max_positions=_integer(mapping, "max_position_embeddings"),
      rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=float(mapping.get("rms_norm_eps", 1e-6)),
      qk_norm=family == "qwen3",
      qkv_bias=family == "qwen2",
      layer_pattern=("full",) if window is None else ("sliding",),
      window=window,
      tied_embeddings=bool(mapping.get("tie_word_embeddings", False)),
      param_dtype=str(jnp.dtype(param_dtype)),
      compute_dtype=str(jnp.dtype(compute_dtype)),
  )


def _integer(mapping, key, *, default=None):
  value = mapping.get(key)
  value = default if value is None else value
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(f"config.json must hold an integer {key}, not {value!r}.")
  return value


def _head_dim(mapping, family):
  if mapping.get("head_dim") is not None:
    return _integer(mapping, "head_dim")
  if family == "qwen3":
    # Qwen3Config has a constant default: width / heads is half of it in 0.6B.
    return 128
  width = _integer(mapping, "hidden_size")
  heads = _integer(mapping, "num_attention_heads")
  if width % heads:
    raise ValueError(
        f"config.json has no head_dim, and hidden_size={width} is not a "
        f"multiple of num_attention_heads={heads}."
    )
  return width // heads


def _check_fixed(mapping):
  for key, supported in _FIXED.items():
    value = mapping.get(key)
    if value is not None and value != supported:
      raise ValueError(
          f"{key}={value!r} is not supported: only {supported!r} is."
      )
  kinds = set(mapping.get("layer_types") or []) - {"full_attention"}
  if kinds:
    raise ValueError(
        f"layer_types has {sorted(kinds)}: only 'full_attention' is supported."
    )


def _rope_from_hf(mapping):
  """Base and scaling of either style."""
  rope = dict(
      mapping.get("rope_parameters") or mapping.get("rope_scaling") or {}
  )
  kind = rope.get("rope_type", rope.get("type", "default"))
  theta = rope.get("rope_theta", mapping.get("rope_theta"))
  theta = 10_000.0 if theta is None else float(theta)
  partial = rope.get(
      "partial_rotary_factor", mapping.get("partial_rotary_factor")
  )
  if partial not in (None, 1, 1.0):
    raise ValueError(
        f"partial_rotary_factor={partial} is not supported: only 1 is."
    )
  if kind == "default":
    return theta, None
  if kind not in _ROPE_TYPES:
    raise ValueError(
        f"RoPE type {kind!r} is not supported: {', '.join(_ROPE_TYPES)}."
    )
  rope.setdefault(
      "original_max_position_embeddings",
      mapping.get("max_position_embeddings"),
  )
  return theta, _scaling_from_hf(kind, rope)


def _scaling_from_hf(kind, rope):
  def number(key):
    if not isinstance(rope.get(key), int | float):
      raise ValueError(
          f"RoPE type {kind!r} needs a number {key}, not {rope.get(key)!r}."
      )
    return float(rope[key])

  if kind == "linear":
    return config_lib.LinearScaling(number("factor"))
  original = int(number("original_max_position_embeddings"))
  if kind == "llama3":
    return config_lib.Llama3Scaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_positions=original,
    )

  def optional(key):
    return None if rope.get(key) is None else number(key)

  return config_lib.YarnScaling(
      factor=number("factor"),
      original_max_positions=original,
      beta_fast=optional("beta_fast") or 32.0,
      beta_slow=optional("beta_slow") or 1.0,
      attention_factor=optional("attention_factor"),
      mscale=optional("mscale"),
      mscale_all_dim=optional("mscale_all_dim"),
      truncate=bool(rope.get("truncate", True)),
  )


def config_to_hf(config: config_lib.ModelConfig) -> dict[str, Any]:
  """The `config.json` that describes a model to transformers.

  RoPE is written in the older style, which transformers 4 and 5 both read.
  `torch_dtype` is `config.param_dtype`; `compute_dtype` has no place there.

  Args:
    config: of the model.

  Returns:
    A mapping of plain values; `config_from_hf` of it is the same config but
    for dtypes.

  Raises:
    ValueError: no published family has the combination.
  """
  if config.qk_norm and config.qkv_bias:
    raise ValueError(
        "qk_norm and qkv_bias together have no Hugging Face model_type: qwen3 "
        "has the norms, qwen2 the biases."
    )
  family = "llama"
  if config.layer_pattern != ("full",):
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
  mapping = {
      "architectures": [_ARCHITECTURES[family]],
      "model_type": family,
      "vocab_size": config.vocab_size,
      "hidden_size": config.width,
      "num_hidden_layers": config.num_layers,
      "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads,
      "head_dim": config.head_dim,
      "intermediate_size": config.ffn_width,
      "max_position_embeddings": config.max_positions,
      "rope_theta": config.rope_theta,
      "rope_scaling": _scaling_to_hf(config.rope_scaling),
      "rms_norm_eps": config.norm_eps,
      "tie_word_embeddings": config.tied_embeddings,
      "torch_dtype": config.param_dtype,
      "hidden_act": "silu",
      "attention_dropout": 0.0,
  }
  if family == "mistral":
    return mapping | {"sliding_window": config.window}
  if family != "qwen2":
    mapping["attention_bias"] = False
  if family == "llama":
    mapping["mlp_bias"] = False
  else:
    mapping["use_sliding_window"] = False
  return mapping


def _scaling_to_hf(scaling):
  match scaling:
    case None:
      return None
    case config_lib.LinearScaling():
      return {"rope_type": "linear", "factor": scaling.factor}
    case config_lib.Llama3Scaling():
      return {
          "rope_type": "llama3",
          "factor": scaling.factor,
          "low_freq_factor": scaling.low_freq_factor,
          "high_freq_factor": scaling.high_freq_factor,
          "original_max_position_embeddings": scaling.original_max_positions,
      }
    case config_lib.YarnScaling():
      optional = {
          key: getattr(scaling, key)
          for key in ("attention_factor", "mscale", "mscale_all_dim")
          if getattr(scaling, key) is not None
      }
      return {
          "rope_type": "yarn",
          "factor": scaling.factor,
          "original_max_position_embeddings": scaling.original_max_positions,
          "beta_fast": scaling.beta_fast,
          "beta_slow": scaling.beta_slow,
          "truncate": scaling.truncate,
          **optional,
      }
    case _:
      raise ValueError(f"Unknown RoPE scaling {scaling!r}.")
