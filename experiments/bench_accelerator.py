# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient by every implementation of attention, on whatever is here.

  python -m experiments.bench_accelerator

Prefixes from short to long; of each, every mode by every implementation that
runs on this device. A case that runs out of memory, that fails, or that would
not end in time is recorded with its reason, and the others go on; results.json
is written after every case.
"""

import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import ml_collections
import tqdm

import branch_replay as br
from branch_replay.engine.schedule import check_mode
from branch_replay.ops.attention import kernels
from branch_replay.planning import compare
from branch_replay.planning import flops
from branch_replay.weights import load as load_lib
from experiments import bench_step
from experiments import cli
from experiments.reporting import record
from experiments.reporting import speed
from experiments.reporting import timing

_POLICY = "recompute"


@dataclasses.dataclass(frozen=True)
class Case:
  """One program that is compiled and timed."""

  prefix: int
  mode: str
  attention: str


def implementations(config) -> tuple[list[str], dict[str, str]]:
  """Those of the config that run here, and why the others do not."""
  model = br.ModelConfig(**config.model)
  here, not_here = [], {}
  for name in config.attention:
    try:
      kernel = kernels.choose(
          name, kernels.platform(), model.compute_dtype, model.head_dim
      )
    except ValueError as error:
      not_here[name] = str(error)
      continue
    if kernel is not None and kernel.interpret and not config.interpret:
      not_here[name] = "would run in an interpreter: --config.interpret"
    else:
      here.append(name)
  return here, not_here


def _compiled(config, case: Case, dtype: str):
  model = dataclasses.replace(
      br.ModelConfig(**config.model), compute_dtype=dtype
  )
  schedule = br.Schedule(
      chunk_size=config.chunk_size, branches_at_once=1, activations=_POLICY,
      attention=case.attention,
  )
  return bench_step.compiled(
      *load_lib.random(model, config.seed),
      (case.prefix, config.branches, config.tail_tokens), case.mode,
      schedule=schedule, seed=config.seed,
  )


@functools.lru_cache(maxsize=2)  # of one prefix
def _reference(config, prefix: int, mode: str):
  """In float32, products too, by the loops; exact's is that of whole rows."""
  case = Case(prefix, {"exact": "full"}.get(mode, mode), "loops")
  with jax.default_matmul_precision("highest"):
    call, _ = _compiled(config, case, "float32")
    return compare.named(call()[1])


def _work(config, case: Case) -> int:
  return flops.gradient(
      br.ModelConfig(**config.model), prefix=case.prefix,
      branches=config.branches, tail=config.tail_tokens, mode=case.mode,
      policy=_POLICY,
  )


def measure(config, case: Case) -> dict:
  """Times one case; returns the fields of a run, see docs/formats.md.

  The first run is not among the timed ones, unless it alone takes the time of
  a case (`warm` is then false).
  """
  call, known = _compiled(
      config, case, br.ModelConfig(**config.model).compute_dtype
  )
  seconds = [timing.seconds(call)]
  warm = seconds[0] < config.case_seconds
  if warm:
    first = seconds.pop()
    while len(seconds) < config.repeats and (
        not seconds or first + sum(seconds) < config.case_seconds
    ):
      seconds.append(timing.seconds(call))
  work, median = _work(config, case), statistics.median(seconds)
  stats = jax.local_devices()[0].memory_stats() or {}
  run = known | {
      "seconds": seconds, "seconds_median": median, "warm": warm,
      "flops": work,
      "flops_per_second": work / median,
      "peak_bytes_so_far": stats.get("peak_bytes_in_use"),
  }
  if case.prefix <= config.reference_up_to:
    _, grads = call()
    distance = compare.compare(grads, _reference(
        ml_collections.FrozenConfigDict(config), case.prefix, case.mode
    ))
    run |= {
        "relative_error": distance.relative_error,
        "worst_parameter": distance.worst_parameter,
        "worst_parameter_error": distance.worst_error,
    }
  return run


def left_out(
    config, case: Case, before: dict | None, left: float
) -> str | None:
  """Why a case is not run, or None.

  Args:
    config: see configs/bench_accelerator.py.
    case: the one in question.
    before: the run of the same mode and attention on the prefix before.
    left: seconds.
  """
  if before is None:
    return None if left > 0 else "no time was left"
  if "seconds" not in before:
    return f"not at P={before['prefix_tokens']} either"
  expected = _work(config, case) / before["flops_per_second"]
  runs = 1 if expected >= config.case_seconds else 2
  needed = runs * expected + before["compile_seconds"]
  if needed > left:
    return f"would take {needed:.0f} s of {max(left, 0):.0f} s that are left"
  return None


def attempt(config, case: Case) -> dict:
  """`measure`, or why there is nothing measured."""
  try:
    return measure(config, case)
  except Exception as error:  # one that fails must not lose the others
    text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    if "RESOURCE_EXHAUSTED" in text:
      return {"out_of_memory": text}
    return {"failed": text}


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the cases; ValueError for a config that cannot be run."""
  start = time.perf_counter()
  workdir = pathlib.Path(workdir).resolve()
  for mode in config.modes:
    check_mode(mode)
  timing.check(config.repeats)
  here, not_here = implementations(config)
  cases = [
      Case(prefix, mode, name)
      for prefix in sorted(config.prefixes)
      for mode in config.modes
      for name in here
  ]
  results = record.begin(config, not_here=not_here, runs=[])
  last = {}
  with tqdm.tqdm(cases, desc="cases") as bar:
    for case in bar:
      bar.set_description(f"P={case.prefix} {case.mode} {case.attention}")
      left = config.total_seconds - (time.perf_counter() - start)
      of = case.mode, case.attention
      reason = left_out(config, case, last.get(of), left)
      found = {"left_out": reason} if reason else attempt(config, case)
      last[of] = {
          "prefix_tokens": case.prefix, "mode": case.mode,
          "attention": case.attention, **found,
      }
      results["runs"].append(last[of])
      record.save(workdir, results)
  return record.finish(workdir, results, table=speed.attention)


if __name__ == "__main__":
  cli.main(run, "configs/bench_accelerator.py")
