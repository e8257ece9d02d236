# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Full backward pass against branch replay: same gradient, less work?

Takes one group (a prompt, answers sampled from the model, group-relative
advantages), computes its policy gradient in every mode, and writes times,
memory and the distance of each gradient from the full one to results.json and
figure.png in the workdir.

  python -m experiments.compare_backward --config=configs/compare_backward.py
  python -m experiments.compare_backward --config.prompt_tokens=2048
"""

import dataclasses
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import spec as spec_lib
from branch_replay.engine.schedule import check_mode
from branch_replay.planning import compare
from branch_replay.planning import flops
from branch_replay.weights import load as load_lib
from experiments import cli
from experiments import prompts
from experiments.reporting import comparisons
from experiments.reporting import record
from experiments.reporting import timing


@dataclasses.dataclass(frozen=True)
class Problem:
  """Model and data of a comparison, the same for all modes."""

  model: br.Decoder
  params: dict
  group: br.Group
  advantages_G: jax.Array
  temperature: float


def policy_gradient_loss(log_probs_GT, advantages_G, weights_G):
  """−Σ_b A_b w_b Σₜ log π(t): REINFORCE with the group as its baseline."""
  return -jnp.sum(jnp.sum(log_probs_GT, axis=1) * advantages_G * weights_G)


def build(config: ml_collections.ConfigDict) -> Problem:
  """Prompt, sampled tails and advantages of a config."""
  pretrained = load_lib.load(
      config.model, compute_dtype=config.compute_dtype, seed=config.seed
  )
  model = pretrained.model
  text = prompts.document(config.document)
  prompt = prompts.about_document(pretrained, text, config.prompt_tokens)
  rollout = br.sample(
      model, pretrained.params, prompt,
      key=jax.random.key(config.seed), branches=config.branches,
      max_tokens=config.tail_tokens, stop_ids=pretrained.stop_ids,
      law=br.Law(temperature=config.temperature),
      schedule=br.Schedule(chunk_size=config.chunk_size),
  )
  tails = rollout.tails()
  rewards_G = np.array([
      reward(pretrained.tokenizer, tail, text) for tail in tails
  ])
  spread = rewards_G.std()
  if spread == 0:
    raise ValueError(
        f"All {len(tails)} answers have the same reward, so the gradient is "
        "zero and there is nothing to compare: take another --config.seed or "
        "more branches."
    )
  advantages_G = jnp.asarray(
      (rewards_G - rewards_G.mean()) / spread, jnp.float32
  )
  group = br.Group.create(prompt, tails, config=model.config)
  return Problem(
      model, pretrained.params, group, advantages_G, config.temperature
  )


def reward(tokenizer, tail, text: str) -> float:
  """Share of an answer's words that occur in the document."""
  if tokenizer is None:
    return float(np.mean(np.asarray(tail) % 7))
  said = tokenizer.decode(np.asarray(tail).tolist(), skip_special_tokens=True)
  words = said.lower().split()
  known = set(text.lower().split())
  return sum(word in known for word in words) / max(len(words), 1)


def compiled(
    problem: Problem, mode: str, schedule: br.Schedule, sampling: br.Sampling,
    band: br.Band,
):
  """The gradient of one mode: () -> (Evaluation, grads), and what is known."""
  group = problem.group
  weight = 1.0 / jnp.maximum(jnp.sum(group.tail_lengths), 1)
  weights_G = jnp.full(problem.advantages_G.shape, weight)
  args = problem.params, group, problem.advantages_G, weights_G
  function = br.value_and_grad(
      problem.model, policy_gradient_loss, prefix_gradient=mode,
      schedule=schedule, readout=br.LogProbs(problem.temperature),
      sampling=sampling, band=band,
  )
  call, known = timing.compiled(function, *args, key=jax.random.key(0))
  return call, describe(problem, mode, schedule, sampling, band) | known


def describe(
    problem: Problem, mode: str, schedule: br.Schedule, sampling: br.Sampling,
    band: br.Band,
) -> dict:
  """The analytic half of a run's record."""
  branches, tail = problem.group.tails.shape  # padded, as they are run
  prefix = int(problem.group.prompt_length) - 1
  spec = spec_lib.of_group(
      problem.model, problem.group, br.LogProbs(), mode, schedule, sampling,
      band,
  )
  policy = spec.schedule.activations
  share = 1.0  # of the prefix's chunks, expected
  if mode == "sampled":
    count = spec.chunks(problem.group.prompt.shape[0] - 1).count
    share = min(1.0, sampling.chunks / max(count, 1))
  per_sequence = branches * (prefix + tail)
  return {
      "mode": mode,
      "prefix_tokens": prefix,
      "branches": branches,
      "tail_tokens": int(problem.group.tail_lengths.max()),
      "padded_tail_tokens": tail,
      "devices": schedule.layout.devices,
      "activations": policy,
      "keep_attention": spec.keeps_attention,
      "branches_at_once": spec.at_once(branches),
      "chunk_size": schedule.chunk_size,
      "model_tokens": (
          per_sequence if mode == "full" else prefix + branches * tail
      ),
      "flops": flops.gradient(
          problem.model.config, prefix=prefix, branches=branches, tail=tail,
          mode=mode, policy=policy, share=share, band=band,
          keep_attention=spec.keeps_attention,
      ),
  }


def judge(run: dict, gradient, reference) -> None:
  """Adds the distance of a gradient from the full one to its run."""
  result = compare.compare(gradient, reference)
  run |= {
      "gradient_cosine": result.cosine,
      "gradient_relative_error": result.relative_error,
      "gradient_norm_ratio": result.norm_ratio,
      "worst_parameter": {
          "name": result.worst_parameter, "relative_error": result.worst_error,
      },
      "per_matrix_cosine": result.per_matrix_cosine,
      "per_layer_cosine": result.per_layer_cosine,
  }


def relate(runs: list[dict]) -> None:
  """Adds medians and, where full has been timed too, the speed-ups."""
  for run in runs:
    if run["seconds"]:
      run["seconds_median"] = statistics.median(run["seconds"])
  full = next((run for run in runs if run["mode"] == "full"), None)
  for run in runs:
    if full is not None:
      run["ideal_speedup"] = full["flops"] / run["flops"]
      if full["seconds"] and run["seconds"]:
        run["speedup"] = full["seconds_median"] / run["seconds_median"]


def measure(modes, make, runs: list[dict], repeats: int, save, bar) -> None:
  """Runs every mode once, then times all in turns.

  Args:
    modes: "full" first, if it is one of them; others are compared with it.
    make: mode -> (() -> (Evaluation, grads), what is known of the run).
    runs: takes a record of each mode.
    repeats: timed calls of each.
    save: called when there is something new.
    bar: progress, of len(modes) · (1 + repeats) steps.
  """
  functions, reference = {}, None
  for mode in modes:
    bar.set_description(f"{mode}: compiling, first gradient")
    functions[mode], known = make(mode)
    start = time.perf_counter()
    (loss, _, _), gradient = jax.block_until_ready(functions[mode]())
    run_ = known | {
        "seconds": [], "first_seconds": time.perf_counter() - start,
        "loss": float(loss),
    }
    reference = gradient if mode == "full" else reference
    if reference is not None:
      judge(run_, gradient, reference)
    del gradient
    runs.append(run_)
    save()
    bar.update()
  for repeat in range(repeats):
    for run_ in runs:
      bar.set_description(f"{run_['mode']}: timing {repeat + 1}/{repeats}")
      run_["seconds"].append(timing.seconds(functions[run_["mode"]]))
      save()
      bar.update()


def ordered(config, allowed=None) -> list[str]:
  """The config's modes, full first; ValueError for those that cannot be."""
  if not config.modes or len(set(config.modes)) < len(config.modes):
    raise ValueError(f"modes={config.modes}: name each mode once.")
  for mode in config.modes:
    check_mode(mode)
    if allowed is not None and mode not in allowed:
      raise ValueError(
          f"modes={config.modes}: name some of {', '.join(allowed)}."
      )
  timing.check(config.repeats)
  return sorted(config.modes, key=lambda mode: mode != "full")


def schedule_of(config, **options) -> br.Schedule:
  """The schedule that a config describes."""
  return br.Schedule(
      chunk_size=config.chunk_size,
      activations=None if config.activations == "auto" else config.activations,
      memory_budget=int(config.memory_budget_gib * 2**30), **options,
  )


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the comparison.

  After an interrupt results.json holds the measurements that were finished.

  Raises:
    ValueError: a config that cannot be run, before anything is timed.
  """
  began = time.perf_counter()
  workdir = pathlib.Path(workdir).resolve()
  modes = ordered(config)
  schedule = schedule_of(
      config, branches_at_once=config.branches_at_once or None
  )
  sampling = br.Sampling(chunks=config.sampled_chunks)
  band = br.Band(**config.band)
  if not config.temperature > 0:
    raise ValueError(
        f"temperature={config.temperature}: answers that are all alike teach "
        "nothing."
    )
  problem = build(config)
  if config.devices > 1:
    layout = sharding.sharded(problem.params, config.devices)
    schedule = dataclasses.replace(schedule, layout=layout)
    problem = dataclasses.replace(problem, params=layout.place(problem.params))
  results = record.begin(
      config, model=dataclasses.asdict(problem.model.config), runs=[]
  )

  def save():
    relate(results["runs"])
    results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
    results["environment"]["wall_seconds"] = time.perf_counter() - began
    record.save(workdir, results)

  with tqdm.tqdm(total=len(modes) * (1 + config.repeats), unit="step") as bar:
    measure(
        modes, lambda mode: compiled(problem, mode, schedule, sampling, band),
        results["runs"], config.repeats, save, bar,
    )
  return record.finish(
      workdir, results, table=comparisons.table, draw=comparisons.draw
  )


if __name__ == "__main__":
  cli.main(run, "configs/compare_backward.py")
