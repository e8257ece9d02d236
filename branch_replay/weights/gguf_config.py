# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a `ModelConfig` from GGUF metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from branch_replay import config as config_lib
from branch_replay.ops import rope

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Keys that are read below, or do not change what the model computes.
_KNOWN = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied_embeddings: bool,
    rope_factors_H: np.ndarray | None = None,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
) -> config_lib.ModelConfig:
  """Reads the metadata of a llama, qwen2 or qwen3 GGUF file.

  Args:
    metadata: values by full key, such as "llama.block_count".
    vocab_size: number of rows of the embedding tensor.
    tied_embeddings: whether the file has no output tensor.
    rope_factors_H: the `rope_freqs.weight` tensor [D/2], by which frequencies
      are divided; None if the file has none.
    param_dtype: dtype to store parameters in.
    compute_dtype: dtype of activations and matrix products.

  Returns:
    The configuration.

  Raises:
    ValueError: a key is missing, or asks for something `Decoder` does not
      compute.
  """
  architecture = metadata.get("general.architecture")
  if architecture not in ARCHITECTURES:
    raise ValueError(
        f"general.architecture={architecture!r} is not supported: "
        f"{', '.join(ARCHITECTURES)}."
    )
  options = _options(metadata, architecture)
  heads = _integer(options, "attention.head_count")
  width = _integer(options, "embedding_length")
  head_dim = _head_dim(options, width, heads)
  theta = _above_zero(options, "rope.freq_base", 10_000.0)
  return config_lib.ModelConfig(
      vocab_size=vocab_size,
      width=width,
      num_layers=_integer(options, "block_count"),
      num_heads=heads,
      num_kv_heads=_integer(options, "attention.head_count_kv", heads),
      head_dim=head_dim,
      ffn_width=_integer(options, "feed_forward_length"),
      max_positions=_integer(options, "context_length"),
      rope_theta=theta,
      rope_scaling=_scaling(options, head_dim, theta, rope_factors_H),
      norm_eps=_shortest(
          _required(options, "attention.layer_norm_rms_epsilon")
      ),
      qk_norm=architecture == "qwen3",
      qkv_bias=architecture == "qwen2",
      tied_embeddings=tied_embeddings,
      param_dtype=param_dtype,
      compute_dtype=compute_dtype,
  )


def _options(metadata, architecture):
  prefix = f"{architecture}."
  options = {
      key.removeprefix(prefix): value
      for key, value in metadata.items()
      if key.startswith(prefix)
  }
  # A zero (no experts, no sliding window) leaves the model as it is.
  unknown = {k: v for k, v in options.items() if k not in _KNOWN and v}
  if unknown:
    raise ValueError(
        f"{architecture} metadata {unknown} is not supported: the model would "
        "run without it and be wrong."
    )
  return options


def _required(options, key):
  if key not in options:
    raise ValueError(f"The file has no {key} in its metadata.")
  return options[key]


def _integer(options, key, default=None):
  value = options.get(key, default)
  if isinstance(value, list) and len(set(value)) == 1:
    value = value[0]
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(
        f"{key}={value!r} is not supported: every layer must have the same "
        "integer."
    )
  return value


def _shortest(value) -> float:
  """The decimal that a float32 was written from: 1e-5, not 9.99999975e-6."""
  return float(str(np.float32(value)))


def _head_dim(options, width, heads):
  head_dim = options.get("attention.key_length")
  if head_dim is None:
    if width % heads:
      raise ValueError(
          f"The file has no attention.key_length, and embedding_length={width} "
          f"is not a multiple of attention.head_count={heads}."
      )
    head_dim = width // heads
  for key in ("attention.value_length", "rope.dimension_count"):
    if options.get(key, head_dim) != head_dim:
      raise ValueError(
          f"{key}={options[key]} differs from the head_dim {head_dim}: values "
          "of another width and partly rotated heads are not supported."
      )
  return head_dim


def _scaling(options, head_dim, theta, factors_H):
  kind = options.get("rope.scaling.type")
  if kind is None and "rope.scale_linear" in options:
    kind = "linear"
    factor = _above_zero(options, "rope.scale_linear")
    options = options | {"rope.scaling.factor": factor}
  if factors_H is not None:
    if kind not in (None, "none"):
      raise ValueError(
          f"rope_freqs.weight together with rope.scaling.type={kind!r} is not "
          "supported."
      )
    return _scaling_of_factors(head_dim, theta, factors_H)
  if kind is None and "rope.scaling.factor" in options:
    # llama.cpp assumes linear; converters always write a type.
    raise ValueError(
        f"rope.scaling.factor={options['rope.scaling.factor']!r} without "
        "rope.scaling.type: the file must say which scaling it is."
    )
  if kind in (None, "none"):
    return None
  if kind not in ("linear", "yarn"):
    raise ValueError(
        f"rope.scaling.type={kind!r} is not supported: none, linear, yarn, or "
        "the rope_freqs.weight tensor of Llama 3.1."
    )
  factor = _above_zero(options, "rope.scaling.factor")
  if kind == "linear":
    return config_lib.LinearScaling(factor)
  return config_lib.YarnScaling(
      factor=factor,
      original_max_positions=_integer(
          options, "rope.scaling.original_context_length"
      ),
      beta_fast=_above_zero(options, "rope.scaling.yarn_beta_fast", 32.0),
      beta_slow=_above_zero(options, "rope.scaling.yarn_beta_slow", 1.0),
  )


def _above_zero(options, key, default=None) -> float:
  value = _required(options, key) if default is None else options.get(
      key, default
  )
  if not config_lib.is_number(value) or value <= 0:
    raise ValueError(f"{key} must be a finite number above 0, not {value!r}.")
  return _shortest(value)


def _scaling_of_factors(head_dim, theta, factors_H):
  """The published Llama 3.1 scaling, if these divisors come from it.

  A file keeps the divisors and not the numbers they were computed from. All
  published Llama 3.1, 3.2 and 3.3 models differ only in `factor`, which is the
  largest divisor. Anything else is refused, because it cannot be distinguished
  from damage.
  """
  if np.array_equal(factors_H, np.ones(head_dim // 2)):
    return None
  scaling = config_lib.Llama3Scaling(
      factor=_shortest(np.max(factors_H)),
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_positions=8192,
  )
  plain_H, _ = rope.frequencies(head_dim, theta, None)
  scaled_H, _ = rope.frequencies(head_dim, theta, scaling)
  expected_H = plain_H / scaled_H
  if factors_H.shape != expected_H.shape or not np.allclose(
      factors_H, expected_H, rtol=1e-4, atol=0
  ):
    raise ValueError(
        f"rope_freqs.weight {np.round(factors_H, 4).tolist()} is not the Llama "
        f"3.1 scaling {scaling}: only that one is supported."
    )
  return scaling
