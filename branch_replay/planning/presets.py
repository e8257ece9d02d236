# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Geometries of published models, without weights, for planning.

Source: the config.json of each model's release.
"""

import difflib
import json
import os
import pathlib

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.weights import hf_config

_QWEN3 = dict(
    vocab_size=151936, num_kv_heads=8, head_dim=128, max_positions=40960,
    rope_theta=1e6, norm_eps=1e-6, qk_norm=True,
)

PRESETS = {
    "qwen3-0.6b": config_lib.ModelConfig(
        width=1024, num_layers=28, num_heads=16, ffn_width=3072,
        tied_embeddings=True, **_QWEN3,
    ),
    "qwen3-4b": config_lib.ModelConfig(
        width=2560, num_layers=36, num_heads=32, ffn_width=9728,
        tied_embeddings=True, **_QWEN3,
    ),
    "qwen3-8b": config_lib.ModelConfig(
        width=4096, num_layers=36, num_heads=32, ffn_width=12288, **_QWEN3
    ),
    "qwen3.5-27b": config_lib.ModelConfig(
        vocab_size=248320, width=5120, num_layers=64, num_heads=24,
        num_kv_heads=4, head_dim=256, ffn_width=17408, max_positions=262144,
        rope_theta=1e7, rotary_dim=64, norm_eps=1e-6, norms_from_one=True,
        qk_norm=True,
        output_gate=True, layer_pattern=("delta", "delta", "delta", "full"),
        delta=config_lib.GatedDelta(16, 48, 128, 128, conv_width=4),
    ),
    "qwen3-30b-a3b": config_lib.ModelConfig(
        width=2048, num_layers=48, num_heads=32, ffn_width=6144,
        experts=config_lib.Experts(128, 8, 768),
        **_QWEN3 | dict(num_kv_heads=4),
    ),
    "llama-3.1-8b": config_lib.ModelConfig(
        vocab_size=128256, width=4096, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, ffn_width=14336, max_positions=131072,
        rope_theta=5e5, norm_eps=1e-5,
        rope_scaling=config_lib.Llama3Scaling(8.0, 1.0, 4.0, 8192),
    ),
    "qwen2.5-7b": config_lib.ModelConfig(
        vocab_size=152064, width=3584, num_layers=28, num_heads=28,
        num_kv_heads=4, head_dim=128, ffn_width=18944, max_positions=131072,
        rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
    ),
    "smollm2-135m": config_lib.ModelConfig(
        vocab_size=49152, width=576, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, ffn_width=1536, max_positions=8192,
        rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True,
    ),
}


def geometry(name: str) -> config_lib.ModelConfig:
  """Finds the config of a preset, or reads it from a Hugging Face config.json.

  Args:
    name: a key of `PRESETS` in upper or lower case, the path of a config.json,
      or its directory.

  Raises:
    ValueError: `name` is neither, or the file describes an unsupported model.
  """
  checks.instance(name, "model", (str, os.PathLike))
  name = os.fspath(name)
  preset = PRESETS.get(name.lower())
  if preset is not None:
    return preset
  file = pathlib.Path(name).expanduser()
  if file.is_dir():
    file = file / "config.json"
  if file.is_file():
    return hf_config.config_from_hf(json.loads(file.read_text()))
  near = difflib.get_close_matches(name.lower(), PRESETS, 1, 0)[0]
  raise ValueError(
      f"model={name!r} is no preset and no config.json; did you mean "
      f"{near!r}? Presets: {', '.join(PRESETS)}."
  )
