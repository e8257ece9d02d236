# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits and gradients against transformers; see make_goldens.py."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay import config as config_lib
from branch_replay.devices import layout as layout_lib
from branch_replay.engine import segment
from branch_replay.engine import state
from branch_replay.mixers import kinds
from branch_replay.mixers import mixer as mixer_lib
from branch_replay.models import block
from branch_replay.ops import rope
from branch_replay.ops.attention import reference
from branch_replay.weights import gguf
from branch_replay.weights import hf
from branch_replay.weights import hf_config
from branch_replay.weights import stacking

GOLDENS = pathlib.Path(__file__).parent / "goldens"
MODELS = (
    "llama_llama3", "llama_yarn", "llama_linear", "mistral", "qwen2", "qwen3",
    "qwen3_moe",
)
ROPES = (
    "default", "linear", "llama_3_1", "llama_3_2", "qwen3_yarn", "yarn_mscale",
    "yarn_no_truncate", "yarn_attention_factor", "gemma3_full",
    "gemma3_sliding", "qwen3", "qwen3_5_of_64", "llama_3_not_2", "yarn_not_2",
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
  named = stacking.unstack(pretrained.config, stacking.HF_NAMES, gradient)
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


def test_the_window_matters_and_is_not_one_key_wider():
  expected = golden("mistral/golden.npz")
  pretrained = hf.load_hf(GOLDENS / "mistral", param_dtype="float32")
  config = pretrained.config
  assert (config.layer_pattern, config.window) == (("sliding",), 9)
  for window in (8, 10):
    other = dataclasses.replace(config, window=window)
    logits_GTV = pretrained.model.clone(config=other).apply(
        {"params": pretrained.params}, jnp.asarray(expected["tokens"])[None]
    )
    assert np.max(np.abs(logits_GTV[0] - expected["logits"])) > 0.1


def delta_stages(config, named):
  """Parameters of a delta layer from those of Qwen3-Next, or gradients."""
  delta = config.delta
  heads, repeats = delta.key_heads, delta.value_heads // delta.key_heads
  values = repeats * delta.value_dim
  fused = named["in_proj_qkvz.weight"].reshape(heads, -1, config.width)
  channels, gate = np.split(fused, [delta.channels], axis=1)
  filters = np.concatenate([
      part.reshape(heads, size, -1)
      for part, size in zip(
          np.split(
              named["conv1d.weight"],
              [heads * delta.key_dim, 2 * heads * delta.key_dim],
          ),
          (delta.key_dim, delta.key_dim, values), strict=True,
      )
  ], axis=1)

  def kernel(x):
    return {"kernel": jnp.asarray(x.reshape(-1, config.width).T)}

  project = {
      "norm": {"scale": jnp.ones(config.width)},
      "channels": kernel(channels), "output_gate": kernel(gate),
      "rates": kernel(named["in_proj_ba.weight"]),
  }
  recur = {
      "filter": jnp.asarray(filters),
      "log_rate": jnp.asarray(named["A_log"].reshape(heads, repeats)),
      "rate_bias": jnp.asarray(named["dt_bias"].reshape(heads, repeats)),
  }
  join = {
      "norm": {"scale": jnp.asarray(named["norm.weight"])},
      "output": {"kernel": jnp.asarray(named["out_proj.weight"].T)},
  }
  return project, recur, join


def latent_stages(config, named):
  """Parameters of a latent layer from those of DeepSeek-V3, or gradients."""
  latent, heads = config.latent, config.num_heads
  # Its rotated pairs are neighbours; here they are halves apart.
  pairs = np.arange(latent.rope_dim).reshape(-1, 2).T.reshape(-1)

  def halves(x, first):
    return np.concatenate([x[..., :first, :], x[..., first + pairs, :]], -2)

  queries = named["q_b_proj.weight"].reshape(heads, latent.query_dim, -1)
  queries = halves(queries, latent.nope_dim).reshape(-1, queries.shape[-1])
  up = named["kv_b_proj.weight"].reshape(heads, -1, latent.rank)
  key_up, value_up = np.split(up, [latent.nope_dim], axis=1)

  def kernel(x):
    return {"kernel": jnp.asarray(x.T)}

  project = {
      "norm": {"scale": jnp.ones(config.width)},
      "query": kernel(named["q_a_proj.weight"]),
      "latent": kernel(halves(named["kv_a_proj_with_mqa.weight"], latent.rank)),
  }
  rotate = {
      "query_norm": {"scale": jnp.asarray(named["q_a_layernorm.weight"])},
      "query_up": kernel(queries),
      "latent_norm": {"scale": jnp.asarray(named["kv_a_layernorm.weight"])},
      "key_up": jnp.asarray(key_up),
  }
  join = {
      "value_up": jnp.asarray(value_up.swapaxes(1, 2)),
      "output": kernel(named["o_proj.weight"]),
  }
  return project, rotate, join


def mixer_config(kind, **options):
  return config_lib.ModelConfig(
      8, width=32, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=8,
      ffn_width=8, max_positions=64, layer_pattern=(kind,),
      param_dtype="float64", compute_dtype="float64", **options,
  )


MIXERS = {
    "gated_delta": (
        delta_stages,
        mixer_config("delta", delta=config_lib.GatedDelta(2, 4, 8, 12)),
    ),
    "latent": (
        latent_stages,
        mixer_config(
            "latent", norm_eps=1e-6, rope_theta=100.0,
            latent=config_lib.LatentAttention(12, 8, 4, 10, query_rank=9),
        ),
    ),
}


@pytest.mark.exhaustive(but="gated_delta")
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_agree_with_transformers(x64, name):
  """A whole layer's mixer as segments run it, and all its gradients."""
  expected, (stages_of, config) = golden(f"{name}.npz"), MIXERS[name]
  (kind,) = config.layer_pattern
  mixer = kinds.of(config, kind)

  def named(prefix):
    return {
        key.removeprefix(f"{prefix}/"): value
        for key, value in expected.items() if key.startswith(f"{prefix}/")
    }

  @jax.jit
  def run(stages, x_GTM):
    projected = mixer.project().apply({"params": stages[0]}, x_GTM)
    nothing = state.seen(config, state.empty(config, 0).mixer)
    positions_GT = jnp.broadcast_to(jnp.arange(50), (2, 50))
    at = mixer_lib.OnPrefix(
        layout_lib.Layout(), 0, segment.Context(nothing, 0, positions_GT),
        nothing,
    )
    out, *_ = mixer.forward(at, stages[1], projected[: mixer.takes])
    joined = mixer.join().apply(
        {"params": stages[2]}, x_GTM, out, *projected[mixer.takes :]
    )
    return joined - x_GTM

  def by_block(stages, x_GTM):
    """The readable layer, without its feed-forward."""
    layer = block.Block(config, kind)
    arguments = (
        x_GTM, jnp.broadcast_to(jnp.arange(50), (2, 50)), reference.causal
    )
    shapes = jax.eval_shape(
        lambda: layer.init(jax.random.key(0), *arguments)
    )["params"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes) | {
        "project": stages[0], mixer.stage: stages[1],
        "join": stages[2],
    }
    y_GTM, _ = layer.apply({"params": params}, *arguments)
    return y_GTM - x_GTM

  stages, x = stages_of(config, named("param")), jnp.asarray(expected["x"])
  wanted = stages_of(config, named("grad"))
  del wanted[0]["norm"]  # which the golden has not
  out = by_block(stages, x)
  assert relative(out, expected["out"]) < 1e-5, MAY_CHANGE
  if kind == "delta":  # its loops are differentiated as they stand
    out, pull = jax.vjp(run, stages, x)
  else:
    out, pull = run(stages, x), jax.vjp(by_block, stages, x)[1]
  gradient, dx = pull(jnp.asarray(expected["cotangent"]))
  del gradient[0]["norm"]
  errors = jax.tree.map(relative, gradient, wanted)
  assert relative(out, expected["out"]) < 1e-5, MAY_CHANGE
  assert relative(dx, expected["dx"]) < 1e-5, MAY_CHANGE
  assert max(jax.tree.leaves(errors)) < 1e-5, (errors, MAY_CHANGE)


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
  # Bit for bit: one digit of a frequency is a quarter of a turn far out.
  np.testing.assert_array_equal(
      inverse_H, expected[f"{name}/inverse"], err_msg=MAY_CHANGE
  )
  np.testing.assert_allclose(factor, expected[f"{name}/factor"], rtol=1e-12)


@pytest.mark.exhaustive
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
  ids = smollm2().tokenizer.encode(str(expected["text"]))
  assert ids == expected["tokens"].tolist(), MAY_CHANGE


EXPERTS = {
    "deepseek_v3": config_lib.Experts(
        8, 3, 8, shared_width=16, scores="sigmoid", scaling=2.5,
        correction=True, groups=4, top_groups=2, group_top=2,
    ),
    "qwen3_next": config_lib.Experts(
        6, 2, 8, shared_width=12, shared_gate=True
    ),
}


def expert_stages(expected, kind):
  """Parameters, or gradients, of `expand` and `contract` by stage."""
  named = {
      key.partition("/")[2].replace("shared_experts.", "shared_expert."): value
      for key, value in expected.items() if key.startswith(f"{kind}/")
  }

  def kernel(name):
    return {"kernel": jnp.swapaxes(jnp.asarray(named[name]), -1, -2)}

  gate, up = np.split(named["experts.gate_up_proj"], 2, axis=1)
  named |= {"gate": gate, "up": up}
  expand = {
      "router": kernel("gate.weight"),
      "expert_gate": kernel("gate"),
      "expert_up": kernel("up"),
      "shared_gate": kernel("shared_expert.gate_proj.weight"),
      "shared_up": kernel("shared_expert.up_proj.weight"),
  }
  if "shared_expert_gate.weight" in named:
    expand["shared_scale"] = kernel("shared_expert_gate.weight")
  if "gate.e_score_correction_bias" in named:
    correction = jnp.asarray(named["gate.e_score_correction_bias"])
    expand["router"]["correction"] = correction
  return {
      "expand": expand,
      "contract": {
          "expert_down": kernel("experts.down_proj"),
          "shared_down": kernel("shared_expert.down_proj.weight"),
      },
  }


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_agree_with_transformers(x64, name):
  expected = golden(f"experts_{name}.npz")
  config = config_lib.ModelConfig(
      vocab_size=8, width=16, num_layers=1, num_heads=1, num_kv_heads=1,
      head_dim=16, ffn_width=8, max_positions=64, norm_eps=1e-6,
      experts=EXPERTS[name], param_dtype="float64", compute_dtype="float64",
  )
  params = expert_stages(expected, "param")
  params["expand"]["norm"] = {"scale": jnp.ones(16)}

  def run(params, x_GTM):
    choices_Nk = block.choose(config, params, x_GTM)
    expand, contract = block.feed_forward(params)
    expanded = expand(config).apply(
        {"params": params["expand"]}, x_GTM, choices_Nk
    )
    y_GTM = contract(config).apply(
        {"params": params["contract"]}, x_GTM, choices_Nk, *expanded
    )
    return y_GTM - x_GTM

  @jax.jit
  def there_and_back(params, x_GTM, dy_GTM):
    y_GTM, pull = jax.vjp(run, params, x_GTM)
    return y_GTM, *pull(dy_GTM)

  out, grads, dx = there_and_back(
      params, expected["x"], expected["cotangent"]
  )
  del grads["expand"]["norm"]  # which the golden has not
  grads["expand"]["router"].pop("correction", None)
  errors = jax.tree.map(relative, grads, expert_stages(expected, "grad"))
  assert relative(out, expected["out"]) < 1e-5, MAY_CHANGE
  assert relative(dx, expected["dx"]) < 1e-5, MAY_CHANGE
  assert max(jax.tree.leaves(errors)) < 1e-5, (errors, MAY_CHANGE)
