# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of RoPE that say nothing sensible are refused by name."""

import math

import numpy as np
import pytest

from branch_replay import config as config_lib
from branch_replay.weights import gguf_config
from branch_replay.weights import hf_config
from tests import weights_hf_config_test

ODD = (0, -2.0, math.nan, math.inf, True, "8", None)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("scaling, right, fields", [
    (config_lib.LinearScaling, dict(factor=4.0), ("factor",)),
    (
        config_lib.Llama3Scaling,
        dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_positions=16,
        ),
        (
            "factor", "low_freq_factor", "high_freq_factor",
            "original_max_positions",
        ),
    ),
    (
        config_lib.YarnScaling, dict(factor=4.0, original_max_positions=16),
        ("factor", "original_max_positions", "beta_fast", "beta_slow"),
    ),
])
def test_a_scaling_names_the_field_that_is_no_number_above_0(
    scaling, right, fields, odd
):
  scaling(**right)
  for field in fields:
    with pytest.raises(ValueError, match=f"{scaling.__name__}.{field} must"):
      scaling(**right | {field: odd})


def test_fields_that_contradict_each_other_are_refused():
  with pytest.raises(ValueError, match="low_freq_factor=4.0 must be below"):
    config_lib.Llama3Scaling(8.0, 4.0, 4.0, 16)
  with pytest.raises(ValueError, match="beta_fast=1.0 must not be below"):
    config_lib.YarnScaling(4.0, 16, beta_fast=1.0, beta_slow=2.0)
  with pytest.raises(ValueError, match="YarnScaling.truncate.*'false'"):
    config_lib.YarnScaling(4.0, 16, truncate="false")
  for field in ("attention_factor", "mscale", "mscale_all_dim"):
    with pytest.raises(ValueError, match=f"YarnScaling.{field}.*nan"):
      config_lib.YarnScaling(4.0, 16, **{field: math.nan})
  config_lib.YarnScaling(np.float32(4.0), np.int32(16), mscale=0.0)


def read(**options):
  return hf_config.config_from_hf(weights_hf_config_test.mapping(**options))


@pytest.mark.parametrize("options, message", [
    (dict(rope_scaling={"factor": 8.0}), "rope_scaling=.*factor without a rop"),
    (
        dict(rope_parameters={"rope_theta": 1e4, "factor": 8.0}),
        "rope_parameters=.*factor without a rope_type",
    ),
    (
        dict(rope_parameters={"rope_type": "default", "beta_fast": 32.0}),
        "beta_fast without",
    ),
    (
        dict(rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_type": "default"},
        }),
        "rope_parameters has options for full_attention, sliding_attention",
    ),
    (dict(rope_scaling=["linear", 8.0]), "rope_scaling must be a mapping"),
    (
        dict(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2}),
        "two types, rope_type='yarn' and type='linear'",
    ),
    (
        dict(
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        ),
        "rope_parameters and rope_scaling differ in factor, 4.0 and 2.0",
    ),
    (
        dict(rope_scaling={
            "rope_type": "yarn", "factor": 2.0, "beta_fast": 0,
        }),
        "number beta_fast, not 0",
    ),
    (
        dict(rope_scaling={
            "rope_type": "yarn", "factor": 2.0, "truncate": "false",
        }),
        "truncate must be True or False",
    ),
    (
        dict(rope_scaling={
            "rope_type": "yarn", "factor": 2.0,
            "original_max_position_embeddings": 16.5,
        }),
        "integer original_max_position_embeddings",
    ),
    (dict(rope_theta=0), "rope_theta must be"),
    (dict(rope_theta=math.nan), "rope_theta must be"),
    (dict(partial_rotary_factor=True), "partial_rotary_factor must be"),
    (
        dict(
            model_type="gemma3_text", hidden_act=None, layer_types=None,
            rope_parameters={"rope_type": "linear", "factor": 8.0},
        ),
        "rope_parameters=.* must hold options for each of full_attention",
    ),
    *(
        (dict(rope_scaling={"type": kind, "factor": odd}), "number factor, not")
        for kind in ("linear", "llama3", "yarn") for odd in ODD
    ),
])
def test_of_config_json_the_field_is_named(options, message):
  with pytest.raises(ValueError, match=message):
    read(**options)


def test_options_that_ask_for_nothing_are_plain_rope():
  for options in (
      {}, {"rope_type": "default"}, {"rope_type": "default", "factor": 1.0},
      {"type": None},
  ):
    assert read(rope_scaling=options).rope_scaling is None
  both = read(
      rope_scaling={"type": "linear", "factor": 2.0},
      rope_parameters={"rope_type": "linear", "factor": 2.0},
  )
  assert both.rope_scaling == config_lib.LinearScaling(2.0)
  none = read(rope_scaling={
      "rope_type": "yarn", "factor": 2.0, "mscale": 0,
      "original_max_position_embeddings": None,
  })
  assert none.rope_scaling == config_lib.YarnScaling(2.0, 64, mscale=0.0)


def of_gguf(**options):
  known = {
      "attention.head_count": 4, "embedding_length": 32, "block_count": 2,
      "feed_forward_length": 64, "context_length": 64,
      "attention.layer_norm_rms_epsilon": 1e-5,
  } | {key.replace("__", "."): value for key, value in options.items()}
  metadata = {f"llama.{key}": value for key, value in known.items()}
  return gguf_config.config_from_gguf(
      metadata | {"general.architecture": "llama"}, vocab_size=64,
      tied_embeddings=True,
  )


def test_of_gguf_metadata_the_field_is_named():
  assert of_gguf().rope_scaling is None
  for odd in ODD[:-1]:
    for kind in ("linear", "yarn"):
      with pytest.raises(ValueError, match="rope.scaling.factor must be"):
        of_gguf(rope__scaling__type=kind, rope__scaling__factor=odd)
    with pytest.raises(ValueError, match="rope.scale_linear must be"):
      of_gguf(rope__scale_linear=odd)
    with pytest.raises(ValueError, match="rope.freq_base must be"):
      of_gguf(rope__freq_base=odd)
  with pytest.raises(ValueError, match="factor=8.0 without rope.scaling.type"):
    of_gguf(rope__scaling__factor=8.0)
