# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison of `compare_backward` over architectures and trees.

Small random models, one of every pattern of layers, and trees of an agent's
episodes. The policy gradient of a tree is computed in every mode, and times,
work and the distance of each gradient from the full one go to results.json in
the workdir.

  python -m experiments.compare_trees --config=configs/compare_trees.py
  python -m experiments.compare_trees \
    --config=configs/compare_trees.py:architectures
"""

import dataclasses
import functools
import itertools
import pathlib
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.engine import gradients
from branch_replay.engine.runs import Action
from branch_replay.planning import flops
from branch_replay.weights import load
from experiments import cli
from experiments import compare_backward
from experiments.reporting import comparisons
from experiments.reporting import record

_MODES = ("full", "exact", "stop")


@dataclasses.dataclass(frozen=True)
class Problem:
  """Model and data of a comparison, the same for all modes."""

  model: br.Decoder
  params: dict
  tree: br.Tree
  weights_N: jax.Array


def policy_gradient_loss(log_probs_RC, weights_RC):
  """−Σₙ wₙ log π(n), wₙ = Σ of the advantages of the leaves that share n."""
  return -jnp.sum(log_probs_RC * weights_RC)


def architecture(name: str, config: ml_collections.ConfigDict):
  """The `ModelConfig` of a name, of the sizes in a config.

  Raises:
    ValueError: an unknown name.
  """
  heads, head_dim = config.heads, config.width // config.heads
  base = br.ModelConfig(
      vocab_size=config.vocab_size, width=config.width,
      num_layers=config.layers, num_heads=heads, num_kv_heads=heads // 2,
      head_dim=head_dim, ffn_width=3 * config.width,
      max_positions=config.path_tokens,
  )
  window = max(2, config.path_tokens // 8)
  delta = br.GatedDelta(heads // 2, heads, head_dim, head_dim)
  latent = br.LatentAttention(2 * head_dim, head_dim, head_dim // 2, head_dim)
  patterns = {
      "full": {},
      "sliding": dict(layer_pattern=("sliding",), window=window),
      "sliding and full": dict(
          layer_pattern=("sliding", "full"), window=window
      ),
      "latent": dict(layer_pattern=("latent",), latent=latent),
      "delta": dict(layer_pattern=("delta",), delta=delta),
      "delta and full": dict(layer_pattern=("delta", "full"), delta=delta),
  }
  if name not in patterns:
    raise ValueError(
        f"Unknown architecture {name!r}: use some of {', '.join(patterns)}."
    )
  return dataclasses.replace(base, **patterns[name])


# A tree: how many children a segment has, its share of a path's tokens, and how
# much of it was observed, before the agent's own tokens.
_TREES = {
    # Eight leaves, depth four, 70 % of all sequences' tokens shared.
    "agent": ((2, 0.60, 0.8), (2, 0.13, 0.5), (2, 0.16, 0.5), (0, 0.11, 0.0)),
    # A prompt; four calls; what the tool says; two answers to each.
    "tools": ((4, 0.45, 1.0), (1, 0.10, 0.0), (2, 0.25, 1.0), (0, 0.20, 0.0)),
    # One prompt and its answers: a group.
    "group": ((8, 0.80, 1.0), (0, 0.20, 0.0)),
}


def episodes(name: str, tokens: int, vocab_size: int, seed: int):
  """The turns of random episodes of so many tokens, as a tree of that name.

  Raises:
    ValueError: an unknown name.
  """
  if name not in _TREES:
    raise ValueError(f"Unknown tree {name!r}: use some of {', '.join(_TREES)}.")
  random, found = np.random.default_rng(seed), []

  def grow(levels, turns, used, first):
    (children, share, observed), *below = levels
    length = max(2, round(share * tokens)) if below else tokens - used
    ids = random.integers(0, vocab_size, length)
    ids[0] = first  # siblings begin differently
    cut = round(observed * length)
    if not turns:
      cut = max(cut, 1)  # nothing predicts the first token
    turns = turns + [
        br.Turn(part, trained)
        for part, trained in ((ids[:cut], False), (ids[cut:], True))
        if part.size
    ]
    if not below:
      found.append(turns)
    for child in range(children):
      grow(below, turns, used + length, child)

  grow(_TREES[name], [], 0, 0)
  return found


def build(name: str, shape: str, config: ml_collections.ConfigDict) -> Problem:
  """A random model, a tree and random standardised advantages."""
  model, params = load.random(architecture(name, config), config.seed)
  tree = br.Tree.from_turns(
      episodes(shape, config.path_tokens, config.vocab_size, config.seed),
      config=model.config,
  )
  advantages_G = np.random.default_rng(config.seed).normal(
      size=len(tree.leaves)
  )
  advantages_G = (advantages_G - advantages_G.mean()) / advantages_G.std()
  mask = tree.mask()
  weights_N = tree.sum_over_leaves(
      (mask * advantages_G[:, None] / mask.sum()).astype(np.float32)
  )
  return Problem(model, params, tree, weights_N)


def compiled(problem: Problem, mode: str, schedule: br.Schedule):
  """The gradient of one mode: () -> (Evaluation, grads), and what is known."""
  tree, config = problem.tree, problem.model.config
  task, program = gradients.plan_tree(
      problem.model, tree, br.LogProbs(), mode, schedule
  )
  shapes = [
      (*step.run.tokens_RS.shape, int(step.run.first),
       step.action == Action.PUSH, step.run.read is not None)
      for step in program.steps if step.action != Action.POP
  ]
  policy = task.schedule.activations
  function = br.value_and_grad(
      problem.model, policy_gradient_loss, prefix_gradient=mode,
      schedule=schedule,
  )
  return functools.partial(function, problem.params, tree, problem.weights_N), {
      "mode": mode, "activations": policy, "steps": len(program.steps),
      "model_tokens": program.tokens, "padded_tokens": program.padded_tokens,
      "state_positions": program.capacity,
      "flops": flops.runs(config, shapes, mode=mode, policy=policy),
  }


def relate(case: dict) -> None:
  """Adds to each run how far its speed-up reaches towards the token ratio."""
  compare_backward.relate(case["runs"])
  full = next((run for run in case["runs"] if run["mode"] == "full"), None)
  for run in case["runs"]:
    if full is not None:
      run["token_ratio"] = full["model_tokens"] / run["model_tokens"]
      if "speedup" in run:
        run["speedup_of_token_ratio"] = run["speedup"] / run["token_ratio"]


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the comparison.

  After an interrupt results.json holds the measurements that were finished.

  Raises:
    ValueError: a config that cannot be run, before anything is timed.
  """
  began = time.perf_counter()
  workdir = pathlib.Path(workdir).resolve()
  modes = compare_backward.ordered(config, _MODES)
  schedule = compare_backward.schedule_of(config)
  for name in config.architectures:
    architecture(name, config)
  for shape in config.trees:
    episodes(shape, config.path_tokens, config.vocab_size, config.seed)
  results = record.begin(config, cases=[])

  def save():
    relate(results["cases"][-1])
    results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
    results["environment"]["wall_seconds"] = time.perf_counter() - began
    record.save(workdir, results)

  pairs = list(itertools.product(config.architectures, config.trees))
  steps = len(pairs) * len(modes) * (1 + config.repeats)
  with tqdm.tqdm(total=steps, unit="step") as bar:
    for name, shape in pairs:
      problem = build(name, shape, config)
      results["cases"].append(_sizes(problem, name, shape))
      compare_backward.measure(
          modes, functools.partial(compiled, problem, schedule=schedule),
          results["cases"][-1]["runs"], config.repeats, save, bar,
      )
  return record.finish(workdir, results, table=comparisons.trees)


def _sizes(problem: Problem, name: str, shape: str) -> dict:
  """A case without its runs."""
  tree = problem.tree
  dense = int((tree.positions + tree.lengths)[tree.leaves].sum())
  return {
      "architecture": name, "tree": shape,
      "model": dataclasses.asdict(problem.model.config),
      "leaves": len(tree.leaves), "segments": len(tree.parents),
      "sequence_tokens": dense, "distinct_tokens": int(tree.lengths.sum()),
      "shared": 1 - int(tree.lengths.sum()) / dense, "runs": [],
  }


if __name__ == "__main__":
  cli.main(run, "configs/compare_trees.py")
