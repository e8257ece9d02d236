# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""branch_replay itself: full, exact (keep, recompute) and stop."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.planning import compare
from experiments.peers import problem as problem_lib
from experiments.peers import serve

# Of each name: mode, activation policy.
_VARIANTS = {
    "ours_full": ("full", "keep"), "ours_exact_keep": ("exact", "keep"),
    "ours_exact_recompute": ("exact", "recompute"),
    "ours_stop": ("stop", "keep"),
}


def nested(arrays: dict[str, np.ndarray]) -> dict:
  """{"a/b": x} as {"a": {"b": x}}, on the device."""
  tree = {}
  for name, x in arrays.items():
    *path, last = name.split("/")
    node = tree
    for part in path:
      node = node.setdefault(part, {})
    node[last] = jnp.asarray(x)
  return tree


def _loss(log_probs_GT, coefficients_G):
  return -jnp.sum(jnp.sum(log_probs_GT, axis=1) * coefficients_G)


def load(
    problem: problem_lib.Problem, *, name: str, threads: int, memory_bytes: int
) -> serve.Peer:
  """See `serve.Peer`."""
  del threads  # XLA takes the cores it may run on
  mode, policy = _VARIANTS[name]
  config = br.ModelConfig(**problem.model)
  params = nested(problem.weights)
  group = br.Group.create(problem.prompt_P, problem.tails_GT, config=config)
  coefficients_G = jnp.asarray(problem.coefficients_G)
  args = params, group, coefficients_G
  settings = {"mode": mode, "activations": policy}

  def build():
    function = br.value_and_grad(
        br.Decoder(config), _loss, prefix_gradient=mode,
        schedule=br.Schedule(activations=policy),
    )
    executable = jax.jit(function).lower(*args).compile()
    settings["temp_bytes"] = executable.memory_analysis().temp_size_in_bytes
    if settings["temp_bytes"] > memory_bytes:
      raise serve.NotRun(
          f"needs {settings['temp_bytes'] / 2**30:.1f} GiB of temporaries"
      )

    def run():
      evaluation, grads = jax.block_until_ready(executable(*args))
      return float(evaluation.loss), np.asarray(evaluation.outputs), grads

    return run

  return serve.Peer(
      build, compare.named,
      {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
      settings,
  )
