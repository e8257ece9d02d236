# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer sees that adds the gradients of many groups.

Parameters stay fixed. The gradients of one group after another are added up,
and fed to Adam, separately for the exact gradient, for stop, and for every
estimator, all from the same accumulated cotangent. At some counts n the sums
and Adam's directions are compared with those of exact. If the groups' errors
are independent their sum grows as √n; the part of an error that is the same in
every group grows as n.

results.json is rewritten at every count, the last of which is of all groups.
The sums themselves are not kept: a run that was interrupted starts anew, and
says so.

  python -m experiments.bias_batch --config=configs/bias_batch.py
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm

import branch_replay as br
from branch_replay.engine import estimators
from branch_replay.planning import compare
from experiments import bias_sweep
from experiments import cli
from experiments import prompts
from experiments.reporting import bias
from experiments.reporting import record


class Sums:
  """The sum of gradients, and Adam's moments of them, by name."""

  def __init__(self, config, params, names):
    self._config = config
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)

    def add(running, gradient):
      total, moments = running
      _, moments = adam.update(gradient, moments)
      return jax.tree.map(jnp.add, total, gradient), moments

    self._add = jax.jit(add, donate_argnums=0)
    self._running = {
        name: (jax.tree.map(jnp.zeros_like, params), adam.init(params))
        for name in names
    }

  def add(self, name: str, gradient):
    self._running[name] = self._add(self._running[name], gradient)

  def direction(self, name: str):
    """Adam's last update: m̂ / (√v̂ + ε), with both moments corrected.

    Source: Kingma and Ba 2014, https://arxiv.org/abs/1412.6980.
    """
    _, (count, first, second) = self._running[name]
    first = optax.tree.bias_correction(first, self._config.b1, count)
    second = optax.tree.bias_correction(second, self._config.b2, count)
    return jax.tree.map(
        lambda m, v: m / (jnp.sqrt(v) + self._config.eps), first, second
    )

  def norm(self, name: str) -> float:
    """‖Σ g‖."""
    return float(optax.tree.norm(self._running[name][0]))

  def distance(self, name: str) -> dict:
    """Distances of the sum and of Adam's direction from those of exact."""
    total, exact = (self._running[x][0] for x in (name, "exact"))
    adam = compare.compare(self.direction(name), self.direction("exact"))
    return _measures(total, exact) | {"adam_cosine": adam.cosine}


def _measures(gradient, exact) -> dict:
  far = compare.compare(gradient, exact)
  return {name: getattr(far, name) for name in bias.MEASURES}


def gradients(config, params, parts, group, advantages_G, key):
  """Yields (name, gradient) of one group, exact first, one at a time."""
  state = parts.capture(params, group)
  stop, accumulator = parts.visit(params, state, group, advantages_G)
  finish = functools.partial(
      parts.finish, params=params, grads=stop, accumulator=accumulator,
      state=state,
  )
  yield "exact", finish(parts.spec(group, "exact"), uniform_N=None)[0]
  yield "stop", stop
  uniform_N = estimators.uniforms(key, config.chunks)
  for law, budget in config.estimators.items():
    sampling = br.Sampling(chunks=budget, law=law)
    spec = parts.spec(group, "sampled", sampling)
    yield law, finish(spec, uniform_N=uniform_N)[0]


def names(config) -> list[str]:
  """Names of the gradients, exact first."""
  return ["exact", "stop", *config.estimators]


def cases(config) -> list[bias_sweep.Case]:
  """The groups in the order they are added, seeds outermost."""
  shape = config.prompt_tokens, config.tail_tokens, config.branches
  return [
      bias_sweep.Case(document, seed, *shape, config.advantages)
      for seed in range(config.seeds)
      for document in range(config.documents)
  ]


def add_group(config, pretrained, case, texts, parts, sums: Sums) -> dict:
  """Adds the gradients of one group; returns how far each is from exact."""
  group, advantages_G, rewards_G = bias_sweep.group_of(pretrained, case, texts)
  bias_sweep.check_chunks(config, group, parts)
  result = {
      "document": case.document, "seed": case.seed,
      "rewards": [round(float(reward), 4) for reward in rewards_G],
  }
  if not np.asarray(advantages_G).any():
    return result | {"dead": True}
  exact, result["estimators"] = None, {}
  for name, gradient in gradients(
      config, pretrained.params, parts, group, advantages_G,
      bias_sweep.draw_key(case),
  ):
    if name == "exact":
      exact = gradient
      result["exact_norm"] = float(optax.tree.norm(exact))
    else:
      result["estimators"][name] = _measures(gradient, exact)
    sums.add(name, gradient)
    del gradient
  return result


def compared(config, sums: Sums, groups: list[dict]) -> dict:
  """The sums of the groups so far, against that of exact.

  Returns:
    Of the exact sum its norm and coherence ‖Σᵢ gᵢ‖² / Σᵢ ‖gᵢ‖², 1 for
    orthogonal gradients and n for equal ones; by estimator, cosine, relative
    error and norm ratio of the sum, cosine of Adam's direction, and the
    coherence of the errors.
  """
  norms = np.array([group["exact_norm"] for group in groups])
  norm = sums.norm("exact")
  result = {
      "n": len(groups), "exact_norm": norm,
      "exact_coherence": norm**2 / float(np.sum(norms**2)), "estimators": {},
  }
  for name in names(config)[1:]:
    errors = norms * [g["estimators"][name]["relative_error"] for g in groups]
    far = sums.distance(name)
    error = far["relative_error"] * norm
    result["estimators"][name] = far | {
        "error_coherence": error**2 / max(float(np.sum(errors**2)), 1e-300)
    }
  return result


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Adds up all groups.

  Raises:
    ValueError: a config that cannot be run, before anything is added, or
      groups that are all dead.
  """
  workdir = pathlib.Path(workdir).resolve()
  pretrained, texts = bias_sweep.load(config.model), prompts.texts()
  if config.advantages not in ("words", "random"):
    raise ValueError(
        f"Unknown advantages={config.advantages!r}: use 'words' or 'random'."
    )
  for law, budget in config.estimators.items():
    br.Sampling(chunks=budget, law=law)  # or an error, before any work
  if (workdir / "results.json").exists():
    print(f"{workdir / 'results.json'} is of an earlier run, whose sums are "
          "not kept: starting anew, it will be overwritten.")
  parts = bias_sweep.study_of(
      pretrained.model, config.prompt_tokens, config.chunks
  )
  results = record.begin(config, groups=[], sums=[])
  sums, alive = Sums(config, pretrained.params, names(config)), []
  studied = cases(config)
  for case in tqdm.tqdm(studied, unit="group"):
    group = add_group(config, pretrained, case, texts, parts, sums)
    results["groups"].append(group)
    if "dead" not in group:
      alive.append(group)
      if len(alive) in config.counts:
        results["sums"].append(compared(config, sums, alive))
        record.save(workdir, results)
  if not alive:
    raise ValueError(
        f"All answers to each of {len(studied)} prompts have the same reward: "
        "nothing to add. Take more tail_tokens or branches."
    )
  if len(alive) not in config.counts:
    results["sums"].append(compared(config, sums, alive))
  results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
  return record.finish(
      workdir, results, draw=bias.draw_sums,
      table=lambda results: f"{bias.groups(results)}\n{bias.sums(results)}",
  )


if __name__ == "__main__":
  cli.main(run, "configs/bias_batch.py")
