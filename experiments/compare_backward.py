# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Full backward pass against branch replay: same gradient, less work?

Takes one group (a prompt, answers sampled from the model, group-relative
advantages), computes its policy gradient in every mode, and writes times,
memory and the distance of each gradient from the full one to results.json and
report.png in the workdir.

  python -m experiments.compare_backward --config=configs/compare_backward.py
  python -m experiments.compare_backward --config.prompt_tokens=2048
"""

import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay import compare
from branch_replay import engine
from branch_replay import flops
from branch_replay import sharding
from branch_replay.schedule import check_mode
from branch_replay.weights import gguf
from branch_replay.weights import hf
from branch_replay.weights import pretrained as pretrained_lib
from experiments import cli
from experiments import prompts
from experiments import record
from experiments import report

_TINY = br.ModelConfig(
    vocab_size=256, width=64, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=128, max_positions=4096,
)


@dataclasses.dataclass(frozen=True)
class Problem:
  """What all modes are run on."""

  model: br.Decoder
  params: dict
  group: br.Group
  advantages_G: jax.Array
  temperature: float


def policy_gradient_loss(log_probs_GT, advantages_G, weights_G):
  """−Σ_b A_b w_b Σₜ log π(t): REINFORCE with the group as its baseline."""
  return -jnp.sum(jnp.sum(log_probs_GT, axis=1) * advantages_G * weights_G)


def load(
    name: str, *, param_dtype: str | None = None,
    compute_dtype: str = "float32", seed: int = 0,
) -> pretrained_lib.Pretrained:
  """The model "smollm2", "tiny" (random, by `seed`), or a path to weights.

  Args:
    name: of the model.
    param_dtype: of parameters; None for that of the file, which is float32 for
      GGUF, whose quantised values are exact in it.
    compute_dtype: of activations; "file" for the file's dtype, but float32 for
      float16, in which gradients overflow.
    seed: of a random model.
  """
  if compute_dtype == "file":
    compute_dtype = "float32"
    if name not in ("tiny", "smollm2") and not name.endswith(".gguf"):
      stored = hf.stored_dtype(name)
      compute_dtype = "float32" if stored == "float16" else stored
  dtypes = {"compute_dtype": compute_dtype}
  if param_dtype is not None:
    dtypes["param_dtype"] = param_dtype
  if name == "tiny":
    model = br.Decoder(dataclasses.replace(_TINY, **dtypes))
    key, token = jax.random.key(seed), jnp.zeros((1, 1), jnp.int32)
    return pretrained_lib.Pretrained(model, model.init(key, token)["params"])
  if name == "smollm2":
    return gguf.load_smollm2(**dtypes)
  if name.endswith(".gguf"):
    return br.load_gguf(name, **dtypes)
  return br.load_hf(name, **dtypes)


def build(config: ml_collections.ConfigDict) -> Problem:
  """Prompt, sampled tails and advantages of a config."""
  pretrained = load(
      config.model, compute_dtype=config.compute_dtype, seed=config.seed
  )
  model, tokenizer = pretrained.model, pretrained.tokenizer
  text = prompts.document(config.document)
  if tokenizer is None:
    data = np.frombuffer(text.encode(), np.uint8)[: config.prompt_tokens]
    if data.size < config.prompt_tokens:
      raise ValueError(
          f"The document has {data.size} bytes; prompt_tokens="
          f"{config.prompt_tokens} needs as many."
      )
    prompt = data.astype(np.int32) % model.config.vocab_size
  else:
    prompt = prompts.about_document(pretrained, text, config.prompt_tokens)
  rollout = br.sample(
      model, pretrained.params, prompt,
      key=jax.random.key(config.seed), branches=config.branches,
      max_tokens=config.tail_tokens, stop_ids=pretrained.stop_ids,
      law=br.Law(temperature=config.temperature),
      schedule=br.Schedule(chunk_size=config.chunk_size),
  )
  tails = rollout.tails()
  rewards_G = np.array([reward(tokenizer, tail, text) for tail in tails])
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
  said = tokenizer.decode(
      np.asarray(tail).tolist(), skip_special_tokens=True
  )
  words = said.lower().split()
  known = set(text.lower().split())
  return sum(word in known for word in words) / max(len(words), 1)


def compiled(
    problem: Problem, mode: str, schedule: br.Schedule, sampling: br.Sampling
):
  """The gradient of one mode, compiled: () -> ((loss, log-probs), grads)."""
  group = problem.group
  weight = 1.0 / jnp.maximum(jnp.sum(group.tail_lengths), 1)
  weights_G = jnp.full(problem.advantages_G.shape, weight)
  args = problem.params, group, problem.advantages_G, weights_G
  function = br.value_and_grad(
      problem.model, policy_gradient_loss, prefix_gradient=mode,
      schedule=schedule, readout=br.LogProbs(problem.temperature),
      sampling=sampling,
  )
  key = jax.random.key(0)
  executable = jax.jit(function).lower(*args, key=key).compile()
  return executable, functools.partial(executable, *args, key=key)


def describe(
    problem: Problem, mode: str, schedule: br.Schedule, sampling: br.Sampling
) -> dict:
  """The analytic half of a run's record."""
  branches, tail = problem.group.tails.shape  # padded, as they are run
  prefix = int(problem.group.prompt_length) - 1
  task = engine.Task(
      problem.model, prefix_gradient=mode, schedule=schedule,
      sampling=sampling,
  )
  policy = task.policy(problem.group, one_pass=True)
  per_sequence = branches * (prefix + tail)
  return {
      "mode": mode,
      "prefix_tokens": prefix,
      "branches": branches,
      "tail_tokens": int(problem.group.tail_lengths.max()),
      "padded_tail_tokens": tail,
      "devices": schedule.layout.devices,
      "activations": policy,
      "branches_at_once": task.at_once(branches),
      "chunk_size": schedule.chunk_size,
      "model_tokens": (
          per_sequence if mode == "full" else prefix + branches * tail
      ),
      "flops": flops.gradient(
          problem.model.config, prefix=prefix, branches=branches, tail=tail,
          mode=mode, policy=policy, share=_share(task, problem.group),
      ),
      "seconds": [],
  }


def _share(task: engine.Task, group: br.Group) -> float:
  """Expected share of the prefix's chunks that a sampled pass runs."""
  if task.prefix_gradient != "sampled":
    return 1.0
  count = task.chunks(group.prompt.shape[0] - 1).count
  return min(1.0, task.sampling.chunks / max(count, 1))


def judge(run: dict, gradient, reference) -> None:
  """Adds the distance of a gradient from the full one to its run."""
  result = compare.compare(gradient, reference)
  run |= {
      "gradient_cosine": result.cosine,
      "gradient_relative_error": result.relative_error,
      "gradient_norm_ratio": result.norm_ratio,
      "worst_parameter": {
          "name": result.worst_parameter,
          "relative_error": result.worst_error,
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


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the comparison; see the module.

  Args:
    config: one of configs/compare_*.py.
    workdir: where results.json and report.png go.

  Returns:
    What results.json holds. After an interrupt it holds the measurements that
    were finished.

  Raises:
    ValueError: a config that cannot be run, before anything is timed.
  """
  began = time.perf_counter()
  workdir = pathlib.Path(workdir).resolve()
  schedule = br.Schedule(
      chunk_size=config.chunk_size,
      branches_at_once=config.branches_at_once or None,
      activations=None if config.activations == "auto" else config.activations,
      memory_budget=int(config.memory_budget_gib * 2**30),
  )
  for mode in config.modes:
    check_mode(mode)
  if not config.modes or len(set(config.modes)) < len(config.modes):
    raise ValueError(f"modes={config.modes}: name each mode once.")
  br.Sampling(chunks=config.sampled_chunks)  # or an error, before any work
  if not config.temperature > 0:
    raise ValueError(
        f"temperature={config.temperature}: answers that are all alike teach "
        "nothing."
    )
  if config.repeats < 1:
    raise ValueError(f"repeats={config.repeats}: measure at least once.")
  modes = sorted(config.modes, key=lambda mode: mode != "full")
  steps = len(modes) * (config.repeats + 2) + 1
  with tqdm.tqdm(total=steps, unit="step", desc="sampling") as bar:
    problem = build(config)
    if config.devices > 1:
      layout = sharding.sharded(problem.params, config.devices)
      schedule = dataclasses.replace(schedule, layout=layout)
      problem = dataclasses.replace(
          problem, params=layout.place(problem.params)
      )
    bar.update()
    settings = schedule, br.Sampling(chunks=config.sampled_chunks)
    results = {
        "environment": record.environment(),
        "config": config.to_dict(),
        "model": dataclasses.asdict(problem.model.config),
        "runs": [],
    }
    record.write_json(workdir / "results.json", results)
    (workdir / "report.png").unlink(missing_ok=True)  # of an earlier run
    try:
      _measure(problem, settings, modes, config.repeats, results, workdir, bar)
    except KeyboardInterrupt:
      print(f"\nInterrupted: {len(results['runs'])} modes have measurements "
            f"in {workdir / 'results.json'}.")
      raise
  results["environment"]["peak_rss_bytes"] = record.peak_rss_bytes()
  results["environment"]["wall_seconds"] = time.perf_counter() - began
  record.write_json(workdir / "results.json", results)
  report.draw(results, workdir / "report.png")
  print(report.table(results))
  print(f"Wrote {workdir / 'results.json'} and report.png beside it.")
  return results


def _measure(problem, settings, modes, repeats, results, workdir, bar):
  """Compiles and warms up every mode, then times them in turns."""
  functions, reference = {}, None

  def save():
    relate(results["runs"])
    record.write_json(workdir / "results.json", results)

  for mode in modes:
    bar.set_description(f"{mode}: compiling")
    start = time.perf_counter()
    executable, function = compiled(problem, mode, *settings)
    run_ = describe(problem, mode, *settings)
    run_["compile_seconds"] = time.perf_counter() - start
    memory = executable.memory_analysis()
    run_["temp_bytes"] = memory and memory.temp_size_in_bytes
    bar.update()
    bar.set_description(f"{mode}: first run, gradient")
    (loss, _, _), gradient = jax.block_until_ready(function())
    run_["loss"] = float(loss)
    reference = gradient if mode == "full" else reference
    if reference is not None:
      judge(run_, gradient, reference)
    del gradient
    functions[mode] = function
    results["runs"].append(run_)
    save()
    bar.update()
  for repeat in range(repeats):
    for run_ in results["runs"]:
      bar.set_description(f"{run_['mode']}: timing {repeat + 1}/{repeats}")
      start = time.perf_counter()
      jax.block_until_ready(functions[run_["mode"]]())
      run_["seconds"].append(time.perf_counter() - start)
      save()
      bar.update()


if __name__ == "__main__":
  cli.main(run, "configs/compare_backward.py")
