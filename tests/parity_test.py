# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients against transformers; see make_goldens.py."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops import rope
from branch_replay.weights import gguf
from branch_replay.weights import hf
from branch_replay.weights import hf_config
from branch_replay.weights import layout

GOLDENS = pathlib.Path(__file__).parent / "goldens"
MODELS = ("llama_llama3", "llama_yarn", "llama_linear", "qwen2", "qwen3")
ROPES = (
    "default", "linear", "llama_3_1", "llama_3_2", "qwen3_yarn", "yarn_mscale",
    "yarn_no_truncate", "yarn_attention_factor",
)
MAY_CHANGE = (
    "Committed numbers of transformers: they change only when make_goldens.py "
    "does, never because this package does."
)


@functools.cache
def golden(name):
  with np.load(GOLDENS / name) as archive:
    return dict(archive)


@functools.cache
def smollm2():
  return gguf.load_smollm2()


def logits_and_gradients(pretrained, tokens_T):
  """Logits [T, V] and the gradient by Hugging Face name."""
  tokens_GT = jnp.asarray(tokens_T)[None]

  def mean_log_likelihood(params):
    logits_GTV = pretrained.model.apply({"params": params}, tokens_GT)
    scores_GTV = jax.nn.log_softmax(logits_GTV[:, :-1])
    picked = jnp.take_along_axis(scores_GTV, tokens_GT[:, 1:, None], axis=-1)
    return jnp.mean(picked), logits_GTV[0]

  gradient, logits_TV = jax.jit(
      jax.grad(mean_log_likelihood, has_aux=True)
  )(pretrained.params)
  named = layout.unstack(pretrained.config, layout.HF_NAMES, gradient)
  return np.asarray(logits_TV), dict(named)


def relative(actual, expected):
  actual, expected = np.asarray(actual, float), np.asarray(expected, float)
  return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", MODELS)
def test_small_models_agree_with_transformers(name):
  expected = golden(f"{name}/golden.npz")
  pretrained = hf.load_hf(GOLDENS / name, param_dtype="float32")
  logits_TV, gradients = logits_and_gradients(pretrained, expected["tokens"])
  error = np.max(np.abs(logits_TV - expected["logits"]))
  wanted = {k.removeprefix("gradient/") for k in expected if "/" in k}
  assert gradients.keys() == wanted
  worst = max(
      (relative(value, expected[f"gradient/{key}"]), key)
      for key, value in gradients.items()
  )
  print(f"{name}: logits {error:.1e}, gradient {worst[0]:.1e} {worst[1]}")
  assert error < 1e-4, MAY_CHANGE
  assert worst[0] < 1e-4, (worst, MAY_CHANGE)


@pytest.mark.parametrize("name", ("llama_llama3", "llama_yarn", "llama_linear"))
def test_the_scaling_matters_at_these_positions(name):
  """Without its scaling the model is far off: the test above can fail."""
  expected = golden(f"{name}/golden.npz")
  pretrained = hf.load_hf(GOLDENS / name, param_dtype="float32")
  plain = pretrained.model.clone(
      config=hf_config.config_from_hf(
          json.loads((GOLDENS / name / "config.json").read_text())
          | {"rope_parameters": {"rope_theta": pretrained.config.rope_theta}}
      )
  )
  logits_GTV = plain.apply(
      {"params": pretrained.params}, jnp.asarray(expected["tokens"])[None]
  )
  assert np.max(np.abs(logits_GTV[0] - expected["logits"])) > 0.1


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_agree_with_transformers(name):
  expected = golden("ropes.npz")
  head_dim = int(expected[f"{name}/head_dim"])
  config = hf_config.config_from_hf({
      "model_type": "llama", "vocab_size": 8, "hidden_size": 64,
      "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": head_dim,
      "intermediate_size": 8, "max_position_embeddings": 131_072,
      "rope_parameters": json.loads(str(expected[f"{name}/parameters"])),
  })
  inverse_H, factor = rope.frequencies(
      head_dim, config.rope_theta, config.rope_scaling
  )
  # transformers computes them in float32.
  np.testing.assert_allclose(
      inverse_H, expected[f"{name}/inverse"], rtol=3e-6, err_msg=MAY_CHANGE
  )
  np.testing.assert_allclose(factor, expected[f"{name}/factor"], rtol=1e-12)


def test_smollm2_agrees_with_transformers():
  expected = golden("smollm2.npz")
  logits_TV, gradients = logits_and_gradients(smollm2(), expected["tokens"])
  error = np.max(np.abs(logits_TV[:, ::97] - expected["logits"]))
  lse_T = np.logaddexp.reduce(logits_TV.astype(np.float64), axis=-1)
  lse_error = np.max(np.abs(lse_T - expected["logsumexp"]))
  names = expected["names"].tolist()
  assert gradients.keys() == set(names)
  worst, worst_norm = (0.0, ""), (0.0, "")
  for name, norm, sample in zip(
      names, expected["norms"], expected["gradients"], strict=True
  ):
    flat = gradients[name].reshape(-1)
    actual = flat[:: flat.size // sample.size][: sample.size]
    worst = max(worst, (relative(actual, sample), name))
    norm_error = abs(np.linalg.norm(flat.astype(float)) / norm - 1)
    worst_norm = max(worst_norm, (norm_error, name))
  print(
      f"smollm2: logits {error:.1e}, log-sum-exp {lse_error:.1e}, gradient "
      f"{worst[0]:.1e} {worst[1]}, norm {worst_norm[0]:.1e} {worst_norm[1]}"
  )
  assert error < 2e-4, MAY_CHANGE
  assert lse_error < 2e-4, MAY_CHANGE
  np.testing.assert_array_equal(logits_TV.argmax(-1), expected["argmax"])
  assert worst[0] < 2e-4, (worst, MAY_CHANGE)
  assert worst_norm[0] < 2e-4, (worst_norm, MAY_CHANGE)


def test_smollm2_tokens_agree_with_transformers():
  expected = golden("smollm2.npz")
  encoded = smollm2().tokenizer.encode(str(expected["text"]))
  assert encoded.ids == expected["tokens"].tolist(), MAY_CHANGE
