# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Gemma 3, Qwen3.5, Qwen3-Next, DeepSeek: read, replayed, written back.

Against transformers; see make_goldens.py, and make_published_goldens.py for
those with experts.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import branch_replay as br
from branch_replay.mixers import kinds
from branch_replay.weights import hf
from branch_replay.weights import hf_config
from branch_replay.weights import hf_tensors
from branch_replay.weights import stacking

GOLDENS = pathlib.Path(__file__).parent / "goldens"
EXPERTS = (
    "qwen3_next_experts", "deepseek_v2_greedy", "deepseek_v2_groups",
    "deepseek_v3_experts",
)
FAMILIES = (
    "gemma3", "qwen3_5", "qwen3_next", "deepseek_v3", "deepseek_v2", *EXPERTS,
)
TOLERANCE = 2e-4
MAY_CHANGE = (
    "Committed numbers of transformers: they change only when make_goldens.py "
    "does, never because this package does."
)


@functools.cache
def golden(name):
  with np.load(GOLDENS / name / "golden.npz") as archive:
    return dict(archive)


def mapping(name):
  return json.loads((GOLDENS / name / "config.json").read_text())


def file(name):
  return safetensors_numpy.load_file(GOLDENS / name / "model.safetensors")


@functools.cache
def loaded(name):
  return hf.load_hf(GOLDENS / name)


def in_float64(name):
  """The same model in float64."""
  one = loaded(name)
  config = dataclasses.replace(
      one.config, param_dtype="float64", compute_dtype="float64"
  )
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), one.params)
  return br.Decoder(config), params


def of_file(name, gradient):
  """A gradient by the names, in the form, of the family's file."""
  config, options = loaded(name).config, mapping(name)
  return hf_tensors.to_file(
      hf_tensors.tensors(config, options),
      stacking.unstack(config, stacking.HF_NAMES, gradient),
  )


@pytest.mark.exhaustive(but=(
    "gemma3", "qwen3_next_experts", "deepseek_v3_experts",
))
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_agree_with_transformers(name):
  expected, one = golden(name), loaded(name)
  tokens_GT = jnp.asarray(expected["tokens"])[None]

  def mean_log_likelihood(params):
    logits_GTV = one.model.apply({"params": params}, tokens_GT)
    scores_GTV = jax.nn.log_softmax(logits_GTV[:, :-1])
    picked = jnp.take_along_axis(scores_GTV, tokens_GT[:, 1:, None], axis=-1)
    return jnp.mean(picked), logits_GTV[0]

  gradient, logits_TV = jax.jit(
      jax.grad(mean_log_likelihood, has_aux=True)
  )(one.params)
  error = np.max(np.abs(logits_TV - expected["logits"]))
  assert error < TOLERANCE, MAY_CHANGE
  wanted = {
      key.removeprefix("gradient/"): value for key, value in expected.items()
      if "/" in key
  }
  found = of_file(name, gradient)
  for key in [x for x in found if x.endswith("e_score_correction_bias")]:
    assert not np.any(found.pop(key))  # a buffer there, without a gradient
  assert found.keys() == wanted.keys()
  whole = np.sqrt(sum(np.sum(np.square(x)) for x in wanted.values()))
  for key, value in wanted.items():
    assert found[key].shape == value.shape
    far = np.linalg.norm(found[key] - value)
    size = max(np.linalg.norm(value), 1e-3 * whole)
    assert far / size < TOLERANCE, (key, MAY_CHANGE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAMILIES)
def test_a_captured_prompt_is_continued_as_the_whole_text(x64, name):
  """Prefill in chunks, then replay: the log-probs of the golden's logits."""
  expected = golden(name)
  decoder, params = in_float64(name)
  tokens, prompt = expected["tokens"], 41
  group = br.Group.create(
      tokens[:prompt], [tokens[prompt:], tokens[prompt : prompt + 9]],
      config=decoder.config,
  )
  schedule = br.Schedule(chunk_size=16)
  state = br.capture(decoder, params, group, schedule=schedule)
  found_GT = br.log_probs(
      decoder, params, group, state=state, schedule=schedule
  )
  scores_TV = jax.nn.log_softmax(
      jnp.asarray(expected["logits"], jnp.float64)[prompt - 1 : -1]
  )
  wanted_T = np.take_along_axis(
      np.asarray(scores_TV), tokens[prompt:, None], axis=-1
  )[:, 0]
  rest = len(wanted_T)
  np.testing.assert_allclose(
      found_GT[0, :rest], wanted_T, rtol=0, atol=TOLERANCE, err_msg=MAY_CHANGE
  )
  np.testing.assert_allclose(
      found_GT[1, :9], wanted_T[:9], rtol=0, atol=TOLERANCE
  )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_that_is_read_is_written_back(tmp_path, name):
  one = loaded(name)
  hf.save_hf(tmp_path, one.config, one.params)
  again = hf.load_hf(tmp_path)
  assert again.config == one.config
  for path, value in jax.tree_util.tree_leaves_with_path(again.params):
    before = functools.reduce(lambda tree, key: tree[key.key], path, one.params)
    np.testing.assert_array_equal(value, before)
  if name in ("qwen3_next", "deepseek_v2"):  # written as the later family
    return
  written = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  kept = file(name)
  assert written.keys() == kept.keys()
  for key, value in kept.items():
    np.testing.assert_array_equal(written[key], value)
  assert mapping(name).get("query_pre_attn_scalar") == json.loads(
      (tmp_path / "config.json").read_text()
  ).get("query_pre_attn_scalar")


def test_small_scales_of_a_bfloat16_file_come_back_bit_for_bit(tmp_path):
  """1 + w in bfloat16 would be 1, and in float32 lose digits of w."""
  kept = {
      key: value.astype(jnp.bfloat16) for key, value in file("gemma3").items()
  }
  scale = np.array([0.003, -0.0039, 1e-6, 1.7e-7] * 8, jnp.bfloat16)
  kept |= {
      key: np.resize(scale, value.shape)
      for key, value in kept.items() if key.endswith("norm.weight")
  }
  before, after = tmp_path / "before", tmp_path / "after"
  before.mkdir()
  safetensors_numpy.save_file(kept, before / "model.safetensors")
  (before / "config.json").write_text(json.dumps(mapping("gemma3")))
  for dtype in (None, "float32"):
    one = hf.load_hf(before, param_dtype=dtype)
    hf.save_hf(after, one.config, one.params)
    written = safetensors_numpy.load_file(after / "model.safetensors")
    assert written.keys() == kept.keys()
    for key, value in kept.items():
      np.testing.assert_array_equal(
          written[key].astype(np.float32), value.astype(np.float32)
      )


def test_what_is_permuted_comes_back_as_it_was():
  """And what is split or fused."""
  for name in FAMILIES:
    config, options = loaded(name).config, mapping(name)
    stored = hf_tensors.tensors(config, options)
    own = dict(
        stacking.unstack(config, stacking.HF_NAMES, loaded(name).params)
    )
    shapes = {key: value.shape for key, value in own.items()}
    in_file = hf_tensors.to_file(stored, own.items())
    read = hf_tensors.reader(stored, shapes, in_file.__getitem__)
    for key, value in own.items():
      np.testing.assert_array_equal(read(key), value)


# Conventions, by hand.


def test_scales_of_norms_are_loaded_as_they_are_stored():
  kept, one = file("gemma3"), loaded("gemma3")
  assert one.config.embedding_scale == 32**0.5
  layers = one.params["layers"]["periods"]["0"]
  np.testing.assert_array_equal(
      layers["project"]["norm"]["scale"][1],
      kept["model.layers.2.input_layernorm.weight"],
  )
  np.testing.assert_array_equal(
      layers["expand"]["norm"]["scale"][0],
      kept["model.layers.0.pre_feedforward_layernorm.weight"],
  )
  np.testing.assert_array_equal(
      layers["join"]["post_norm"]["scale"][0],
      kept["model.layers.0.post_attention_layernorm.weight"],
  )
  np.testing.assert_array_equal(
      layers["rotate"]["query_norm"]["scale"][0],
      kept["model.layers.0.self_attn.q_norm.weight"],
  )
  # Scores are divided by √24 and not by √16.
  assert one.config.score_divisor == 24
  assert one.config.query_factor == pytest.approx((16 / 24) ** 0.5)
  # The norm inside of a delta layer is stored as it is used.
  delta = loaded("qwen3_5").params["layers"]["periods"]["0"]
  np.testing.assert_array_equal(
      delta["join"]["norm"]["scale"][0],
      file("qwen3_5")["model.layers.0.linear_attn.norm.weight"],
  )


def test_rows_of_fused_projections_by_hand():
  # Two heads of two: query, gate, query, gate.
  assert hf_tensors._by_head(2, (2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
  rows = hf_tensors.RowMap(
      ("fused",), ("query", "gate"), (1,), hf_tensors._by_head(2, (2, 2))
  )
  fused = np.arange(8.0)[:, None]
  read = hf_tensors.reader(
      [rows], {"query": (4, 1), "gate": (4, 1)}, {"fused": fused}.__getitem__
  )
  assert read("query")[:, 0].tolist() == [0, 1, 4, 5]
  assert read("gate")[:, 0].tolist() == [2, 3, 6, 7]


def test_geometries_are_read():
  gemma = loaded("gemma3").config
  assert gemma.layer_pattern == ("sliding", "full") and gemma.window == 9
  assert kinds.of(gemma, "sliding").rope == (50.0, None)
  assert kinds.of(gemma, "full").rope == (1000.0, br.LinearScaling(4.0))
  hybrid = loaded("qwen3_5").config
  assert hybrid.layer_pattern == ("delta", "delta", "full")
  assert hybrid.delta == br.GatedDelta(2, 4, 8, 12, conv_width=3)
  assert hybrid.rotary_dim == 8 and hybrid.output_gate
  deepseek = loaded("deepseek_v3").config
  assert deepseek.latent == br.LatentAttention(12, 8, 4, 10, query_rank=9)
  assert loaded("deepseek_v2").config.latent.query_rank is None


@pytest.mark.parametrize("change", (
    dict(rope_theta_local=1000.0), dict(rope_scaling=None),
    dict(scale_embeddings=False), dict(activation="silu"), dict(window=8),
    dict(norms_from_one=False), dict(score_divisor=None),
))
def test_every_option_of_gemma_matters(change):
  expected, one = golden("gemma3"), loaded("gemma3")
  config = dataclasses.replace(one.config, **change)
  logits = br.Decoder(config).apply(
      {"params": one.params}, jnp.asarray(expected["tokens"])[None]
  )
  assert np.max(np.abs(logits[0] - expected["logits"])) > 0.01


def test_the_rotated_share_and_the_factor_of_scores_matter():
  for name, change in (
      ("qwen3_5", dict(rotary_dim=None)),
      ("deepseek_v3", dict(rope_scaling=br.YarnScaling(
          4.0, 32, 8.0, 0.5, attention_factor=1.0648
      ))),
  ):
    expected, one = golden(name), loaded(name)
    config = dataclasses.replace(one.config, **change)
    logits = br.Decoder(config).apply(
        {"params": one.params}, jnp.asarray(expected["tokens"])[None]
    )
    assert np.max(np.abs(logits[0] - expected["logits"])) > 0.01


# Options of config.json.


def test_older_options_of_gemma_are_read():
  options = mapping("gemma3")
  new = hf_config.config_from_hf(options)
  for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
    del options[key]
  old = options | dict(
      rope_theta=1000.0, rope_local_base_freq=50.0, sliding_window_pattern=2,
      rope_scaling={"rope_type": "linear", "factor": 4.0},
  )
  assert hf_config.config_from_hf(old) == new
  del options["tie_word_embeddings"]
  bare = hf_config.config_from_hf(options)
  assert bare.tied_embeddings and bare.rope_theta == 1e6
  assert (bare.rope_theta_local, bare.rope_scaling) == (1e4, None)
  assert bare.layer_pattern == ("sliding",)  # of its 4 layers the 6th is full


@pytest.mark.parametrize("name, options, message", (
    ("gemma3", dict(final_logit_softcapping=30.0), "softcapping=30.0.*None"),
    ("gemma3", dict(attn_logit_softcapping=50.0), "softcapping=50.0.*None"),
    ("gemma3", dict(model_type="gemma2"), "'gemma2'.*soft-capped"),
    ("gemma3", dict(model_type="gemma3"), "text_config.*gemma3_text"),
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional"),
    ("gemma3", dict(hidden_activation="gelu"), "hidden_activation='gelu'"),
    ("gemma3", dict(layer_types=["linear_attention"] * 4), "layer_types"),
    ("gemma3", dict(layer_types=["full_attention"]), "each of 4 layers"),
    ("gemma3", dict(head_dim=None, num_key_value_heads=None), "num_key_value"),
    (
        "gemma3",
        dict(rope_parameters={
            "sliding_attention": {"rope_type": "linear", "factor": 2.0}
        }), "scale the sliding layers",
    ),
    ("qwen3_5", dict(model_type="qwen3_5"), "text_config.*qwen3_5_text"),
    ("qwen3_5", dict(attn_output_gate=False), "attn_output_gate=False"),
    ("deepseek_v3", dict(rope_interleave=False), "rope_interleave=False"),
    ("deepseek_v3", dict(num_key_value_heads=2), "num_key_value_heads=2"),
))
def test_what_is_not_computed_is_refused(name, options, message):
  with pytest.raises(ValueError, match=message):
    hf_config.config_from_hf(mapping(name) | options)


@pytest.mark.parametrize("name, change, message", (
    (
        "gemma3", dict(norm_eps=1e-5, qk_norm=False, score_divisor=None),
        "qk_norm=False.*gemma3",
    ),
    ("gemma3", dict(norms_from_one=False), "norms_from_one=False.*gemma3"),
    ("qwen3_5", dict(output_gate=False), "output_gate=False.*qwen3_5_text"),
    ("qwen3_5", dict(post_norms=True), "post_norms=True"),
    ("deepseek_v3", dict(head_dim=16), "head_dim=16.*deepseek_v3"),
))
def test_no_family_has_these(name, change, message):
  config = dataclasses.replace(loaded(name).config, **change)
  with pytest.raises(ValueError, match=message):
    hf_config.config_to_hf(config)


def test_a_llama_has_no_gate():
  config = br.ModelConfig(24, 32, 2, 4, 2, 16, 40, 64, output_gate=True)
  with pytest.raises(ValueError, match="output_gate=True cannot be said in"):
    hf_config.config_to_hf(config)


def test_a_missing_tensor_is_named_as_the_file_would(tmp_path):
  kept = file("qwen3_5")
  del kept["model.layers.1.linear_attn.in_proj_a.weight"]
  safetensors_numpy.save_file(kept, tmp_path / "model.safetensors")
  (tmp_path / "config.json").write_text(json.dumps(mapping("qwen3_5")))
  with pytest.raises(ValueError, match="layers.1.linear_attn.in_proj_a.weight"):
    hf.load_hf(tmp_path)
