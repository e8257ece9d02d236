# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Times one gradient over a grid of prefixes, group sizes and tail lengths.

In a case (one shape) all modes are compiled and run once; then they and a large
matrix product are timed in turns. Cases are appended to cases.jsonl as they
finish; results.json and figure.png are drawn from them.

  python -m experiments.bench_step --config=configs/bench_step.py
"""

import functools
import itertools
import pathlib
import statistics

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import check_mode
from branch_replay.planning import flops
from branch_replay.weights import load as load_lib
from experiments import cli
from experiments import compare_backward
from experiments.reporting import record
from experiments.reporting import speed
from experiments.reporting import timing

Shape = tuple[int, int, int]  # P, G, T


def shapes(config: ml_collections.ConfigDict) -> list[Shape]:
  """All shapes of a config's grid, each once, cheap ones first."""
  found = {
      shape for axes in config.grid for shape in itertools.product(*axes)
  }
  return sorted(found, key=lambda s: (s[1] * (s[0] + s[2]), s))


def useful_flops(
    model: br.ModelConfig, shape: Shape, mode: str, share: float = 1.0
) -> int:
  """Forward F and backward 2F of a mode; nothing that is computed twice."""
  prefix, branches, tail = shape
  once = flops.gradient(
      model, prefix=prefix, branches=branches, tail=tail, mode=mode,
      policy="keep", share=share,
  )
  logits_again = 2 * model.vocab_size * model.width * branches * tail
  return once - logits_again


def group_of(model: br.ModelConfig, shape: Shape, seed: int) -> br.Group:
  """Random tokens; every tail is of full length."""
  prefix, branches, tail = shape
  rng = np.random.default_rng(seed)
  group = br.Group.create(
      rng.integers(0, model.vocab_size, prefix + 1),
      rng.integers(0, model.vocab_size, (branches, tail)), config=model,
  )
  padded = group.prompt.shape[0] - 1, branches, group.tails.shape[1]
  if padded != shape:
    raise ValueError(
        f"P, G, T = {shape} would be padded to {padded}, and the times would "
        "not be those of the shape: take powers of two from 8 on."
    )
  return group


def _chunks(config, shape: Shape) -> int:
  return state_lib.chunks(shape[0], config.chunk_size, 1).count


def left_out(config, shape: Shape, mode: str) -> str | None:
  """Why a mode is not run on a shape, or None."""
  if mode == "full" and shape[0] > config.full_up_to:
    return f"full is run up to P={config.full_up_to}"
  if mode == "sampled" and _chunks(config, shape) < config.sampled_chunks:
    return f"fewer than {config.sampled_chunks} chunks to draw from"
  return None


def compiled(
    decoder, params, shape: Shape, mode: str, *, schedule: br.Schedule,
    sampling: br.Sampling | None = None, band: br.Band | None = None,
    seed: int = 0,
):
  """One gradient, compiled: () -> (Evaluation, grads), and its record."""
  _, branches, tail = shape
  function = br.value_and_grad(
      decoder, compare_backward.policy_gradient_loss, prefix_gradient=mode,
      schedule=schedule, sampling=sampling or br.Sampling(),
      band=band or br.Band(),
  )
  rng = np.random.default_rng(seed)
  return timing.compiled(
      function, params, group_of(decoder.config, shape, seed),
      jnp.asarray(rng.normal(size=branches), jnp.float32),
      jnp.full(branches, 1 / (branches * tail), jnp.float32),
      key=jax.random.key(0),
  )


def count(run: dict, model: br.ModelConfig, shape: Shape, evaluation) -> None:
  """Adds the analytic half; what a sampled pass runs is known by then."""
  prefix, branches, tail = shape
  share = 1.0
  if run["mode"] == "sampled":
    run["chunks_run"] = int(evaluation.prefix_pass.drawn.sum())
    share = run["chunks_run"] / run["chunks"]
  run["flops"] = flops.gradient(
      model, prefix=prefix, branches=branches, tail=tail, mode=run["mode"],
      policy=run["activations"], share=share,
      keep_attention=run.get("keep_attention", False),
  )
  run["useful_flops"] = useful_flops(model, shape, run["mode"], share)
  run["loss"] = float(evaluation.loss)


def measure(config, decoder, params, shape: Shape, describe) -> dict:
  """A line of cases.jsonl; `describe` is told what is being done."""
  runs, functions = [], {}
  for mode, policy, *outputs in config.variants:
    named = {"mode": mode, "activations": policy}
    if outputs:
      named["keep_attention"] = bool(*outputs)
    reason = left_out(config, shape, mode)
    if reason is not None:
      runs.append(named | {"left_out": reason})
      continue
    describe(f"{mode}, {policy}: compiling")
    chunks = _chunks(config, shape)
    function, known = compiled(
        decoder, params, shape, mode, seed=config.seed,
        schedule=br.Schedule(
            chunk_size=config.chunk_size, activations=policy,
            keep_attention=named.get("keep_attention"),
        ),
        sampling=br.Sampling(chunks=max(1.0, config.sampled_share * chunks)),
    )
    run_ = named | {"chunks": chunks, **known}
    evaluation, _ = jax.block_until_ready(function())
    count(run_, decoder.config, shape, evaluation)
    functions[len(runs)] = function
    runs.append(run_)
  matrix = jax.random.normal(jax.random.key(1), (config.matrix, config.matrix))
  product = jax.jit(jnp.dot).lower(matrix, matrix).compile()
  functions["matrix"] = functools.partial(product, matrix, matrix)
  jax.block_until_ready(functions["matrix"]())
  seconds = timing.in_turns(
      functions, config.repeats, seed=config.seed,
      report=lambda turn, _: describe(f"turn {turn + 1} of {config.repeats}"),
  ).wall
  matrix_seconds = seconds.pop("matrix")
  for number, mine in seconds.items():
    runs[number]["seconds"] = mine
  case = dict(zip(speed.AXES, shape, strict=True)) | {
      "matrix_seconds": matrix_seconds,
      "matrix_flops_per_second": (
          2 * config.matrix**3 / statistics.median(matrix_seconds)
      ),
      "runs": runs,
  }
  relate(case)
  return case


def relate(case: dict) -> None:
  """Adds medians, spreads and rates to the runs of a case."""
  for run_ in case["runs"]:
    if "left_out" in run_:
      continue
    seconds = run_["seconds"]
    run_["seconds_median"] = statistics.median(seconds)
    run_["seconds_min"], run_["seconds_max"] = min(seconds), max(seconds)
    rate = run_["useful_flops"] / run_["seconds_median"]
    run_["useful_flops_per_second"] = rate
    run_["share_of_matrix"] = rate / case["matrix_flops_per_second"]


def _check(config, model) -> None:
  for mode, policy, *outputs in config.variants:
    check_mode(mode)
    br.Schedule(
        chunk_size=config.chunk_size, activations=policy,
        keep_attention=bool(*outputs),
    )
  if len(set(config.variants)) < len(config.variants):
    raise ValueError(f"variants={config.variants}: name each once.")
  timing.check(config.repeats)
  if not 0 < config.sampled_share <= 1:
    raise ValueError(
        f"sampled_share={config.sampled_share} must lie in (0, 1]."
    )
  for shape in shapes(config):
    group_of(model, shape, config.seed)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the cases that are not done yet.

  Raises:
    ValueError: a config that cannot be run, or a workdir of another config.
  """
  workdir = pathlib.Path(workdir).resolve()
  model = br.ModelConfig(**config.model)
  _check(config, model)
  done = record.resume(workdir, config)
  known = {speed.shape_of(case) for case in done}
  waiting = [shape for shape in shapes(config) if shape not in known]
  decoder, params = load_lib.random(model, config.seed)
  with tqdm.tqdm(waiting, desc="cases") as bar:
    for shape in bar:
      bar.set_description("P={} G={} T={}".format(*shape))
      done.append(measure(
          config, decoder, params, shape, bar.set_postfix_str
      ))
      record.append(workdir, done[-1])
  results = record.begin(config, cases=sorted(done, key=speed.shape_of))
  results["growth"] = speed.growth(results["cases"])
  return record.finish(workdir, results, table=speed.table, draw=speed.draw)


if __name__ == "__main__":
  cli.main(run, "configs/bench_step.py")
