# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tunix: its Llama and its per-token log-probs, every sequence in full.

One sequence at a time, gradients added up, as its trainer does with micro
batches of one. Its attention holds a [heads, S, S] matrix of scores; where the
program needs more memory than there is, its own rematerialisation is tried,
least first.
"""

import importlib.metadata

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.llama3 import model as llama3
from tunix.rl import common

from experiments.peers import problem as problem_lib
from experiments.peers import serve

_REMAT = (
    llama3.RematConfig.NONE, llama3.RematConfig.BLOCK,
    llama3.RematConfig.DECODER,
)
_NO_TOKEN = -1  # nothing is padding here


def _config(model: dict, remat) -> llama3.ModelConfig:
  return llama3.ModelConfig(
      num_layers=model["num_layers"], vocab_size=model["vocab_size"],
      embed_dim=model["width"], hidden_dim=model["ffn_width"],
      num_heads=model["num_heads"], head_dim=model["head_dim"],
      num_kv_heads=model["num_kv_heads"], rope_theta=model["rope_theta"],
      norm_eps=model["norm_eps"], weight_tying=False, remat_config=remat,
  )


def _layer_paths(model: dict) -> dict[str, tuple]:
  """For each name of ours: path in a layer of theirs, and shape there."""
  width, head_dim = model["width"], model["head_dim"]
  heads, kv_heads = model["num_heads"], model["num_kv_heads"]
  hidden = model["ffn_width"]
  return {
      "project/norm/scale": (("input_layernorm", "w"), (width,)),
      "project/query/kernel": (
          ("attn", "q_proj", "w"), (width, heads, head_dim)
      ),
      "project/key/kernel": (
          ("attn", "k_proj", "w"), (width, kv_heads, head_dim)
      ),
      "project/value/kernel": (
          ("attn", "v_proj", "w"), (width, kv_heads, head_dim)
      ),
      "join/output/kernel": (("attn", "o_proj", "w"), (heads, head_dim, width)),
      "expand/norm/scale": (("post_attention_layernorm", "w"), (width,)),
      "expand/gate/kernel": (("mlp", "gate_proj", "kernel"), (width, hidden)),
      "expand/up/kernel": (("mlp", "up_proj", "kernel"), (width, hidden)),
      "contract/down/kernel": (("mlp", "down_proj", "kernel"), (hidden, width)),
  }


def _to_tunix(problem: problem_lib.Problem) -> dict[tuple, np.ndarray]:
  """Their parameters by path."""
  weights = problem.weights
  found = {
      ("embedder", "input_embedding"): weights["embed/table"],
      ("lm_head", "w"): weights["head/table"].T,
      ("final_norm", "w"): weights["final_norm/scale"],
  }
  for name, (path, shape) in _layer_paths(problem.model).items():
    for layer, x in enumerate(weights[f"layers/{name}"]):
      found[("layers", layer, *path)] = x.reshape(shape)
  return found


def _from_tunix(model: dict, found: dict[tuple, np.ndarray]) -> dict:
  """Our names and shapes of arrays by their paths."""
  arrays = {
      "embed/table": found[("embedder", "input_embedding")],
      "head/table": found[("lm_head", "w")].T,
      "final_norm/scale": found[("final_norm", "w")],
  }
  for name, (path, shape) in _layer_paths(model).items():
    rows = shape[0] if path[-2] != "o_proj" else shape[0] * shape[1]
    flat = shape if len(shape) == 1 else (rows, -1)
    arrays[f"layers/{name}"] = np.stack([
        found[("layers", layer, *path)].reshape(flat)
        for layer in range(model["num_layers"])
    ])
  return arrays


def _flat(state) -> dict[tuple, jax.Array]:
  return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}


def load(
    problem: problem_lib.Problem, *, name: str, threads: int, memory_bytes: int
) -> serve.Peer:
  """See `serve.Peer`."""
  del name, threads  # XLA takes the cores it may run on
  model, graphdefs = problem.model, {}
  for remat in _REMAT:
    graphdefs[remat], state = nnx.split(nnx.eval_shape(
        lambda remat=remat: llama3.Llama3(
            _config(model, remat), rngs=nnx.Rngs(0)
        )
    ))
  weights = _to_tunix(problem)
  flat = nnx.to_flat_state(state)
  shapes = {path: leaf.shape for path, leaf in flat}
  if shapes != {path: x.shape for path, x in weights.items()}:
    raise ValueError(f"Tunix has other parameters: {shapes}")
  state = nnx.from_flat_state([
      (path, leaf.replace(jnp.asarray(weights[path]))) for path, leaf in flat
  ])
  prompt_1P = jnp.asarray(problem.prompt_P)[None]
  tails_GT = jnp.asarray(problem.tails_GT)
  coefficients_G = jnp.asarray(problem.coefficients_G)
  settings = {"sequences_at_once": 1}

  def add(graphdef, state, total, tail_T, coefficient):
    """Adds the gradient of one sequence."""
    def loss(state):
      log_probs_1T = common.compute_per_token_logps(
          graphdef, state, prompt_1P, tail_T[None], pad_id=_NO_TOKEN,
          eos_id=_NO_TOKEN, stop_gradient=False,
      )
      return -coefficient * jnp.sum(log_probs_1T), log_probs_1T[0]

    (value, log_probs_T), grads = jax.value_and_grad(loss, has_aux=True)(state)
    return jax.tree.map(jnp.add, total, grads), value, log_probs_T

  def build():
    zeros = jax.jit(lambda state: jax.tree.map(jnp.zeros_like, state))
    needed = settings["temp_bytes_by_remat"] = {}
    for remat in _REMAT:
      executable = jax.jit(add, static_argnums=0, donate_argnums=2).lower(
          graphdefs[remat], state, state, tails_GT[0], coefficients_G[0]
      ).compile()
      memory = executable.memory_analysis()
      needed[remat.name] = memory.temp_size_in_bytes
      settings["remat"] = remat.name
      if needed[remat.name] <= memory_bytes:
        break
    else:
      sizes = ", ".join(f"{n / 2**30:.1f}" for n in needed.values())
      raise serve.NotRun(
          f"one sequence needs {sizes} GiB of temporaries with "
          f"rematerialisation {', '.join(needed)}"
      )

    def run():
      total, loss, found = zeros(state), 0.0, []
      for tail_T, coefficient in zip(tails_GT, coefficients_G, strict=True):
        total, value, log_probs_T = executable(
            state, total, tail_T, coefficient
        )
        loss += float(value)
        found.append(np.asarray(log_probs_T))
      return loss, np.stack(found), jax.block_until_ready(total)

    return run

  def export(grads):
    return _from_tunix(
        model, {path: np.asarray(x) for path, x in _flat(grads).items()}
    )

  return serve.Peer(
      build, export,
      {
          name: importlib.metadata.version(name)
          for name in ("google-tunix", "jax", "jaxlib", "flax")
      },
      settings,
  )
