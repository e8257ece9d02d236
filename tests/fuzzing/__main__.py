# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs problems of many seeds, and says which are wrong.

  .venv/bin/python -m tests.fuzzing --seeds=0:1000 --minutes=60

Every failure is printed with the command that repeats it. It stops at the end
of the seeds or of the time, or when it is interrupted, and sums up.
"""

import argparse
import collections
import os
import pathlib
import signal
import sys
import time
import traceback

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

from tests.fuzzing import check  # noqa: E402
from tests.fuzzing import found  # noqa: E402
from tests.fuzzing import problems  # noqa: E402


def parse():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--seeds", default="0:100", help="one, or first:end")
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument(
      "--run", type=int, default=None, help="one of the problem's runs alone"
  )
  parser.add_argument(
      "--first", action="store_true", help="stop at the first that is wrong"
  )
  parser.add_argument(
      "--verbose", action="store_true", help="print every problem, and traces"
  )
  return parser.parse_args()


def described(problem, index) -> str:
  run = problem.runs[index]
  config = problem.config
  return (
      f"{problem.kind} {'/'.join(map(str, config.layer_pattern))} "
      f"{run.driver} {run.mode} devices={run.devices} {config.param_dtype}"
  )


def forget():
  """Programs hold memory maps, of which a process may have 65530."""
  maps = pathlib.Path("/proc/self/maps")
  if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
    jax.clear_caches()


def try_seed(seed: int, arguments, failures) -> int:
  """Runs of one seed; appends what is wrong."""
  problem = problems.draw(seed)
  if arguments.verbose:
    print(problem, flush=True)
  picked = range(len(problem.runs))
  if arguments.run is not None:
    picked = [arguments.run]
  forget()
  with found.sizes_of(problem):
    for index in picked:
      if arguments.first and failures:
        break
      start = time.monotonic()
      try:
        error = check.run(problem, index)
        wrong = None
        if not error.error <= error.allowed:
          wrong = (
              f"{error.what} is off by {error.error:.2e} (text {error.text})"
          )
        elif arguments.verbose:
          print(f"  {described(problem, index)}: {error} in "
                f"{time.monotonic() - start:.1f} s", flush=True)
      except Exception as exception:  # whatever it is, it is a finding
        wrong = f"{type(exception).__name__}: {str(exception)[:300]}"
        if arguments.verbose:
          traceback.print_exc()
      if wrong is not None:
        failures.append((seed, index, wrong))
        print(
            f"WRONG {described(problem, index)}: {wrong}\n"
            f"  .venv/bin/python -m tests.fuzzing --seeds={seed} --run={index}"
            " --verbose", flush=True,
        )
  return len(picked)


def main() -> int:
  arguments = parse()
  for number in (signal.SIGINT, signal.SIGTERM):  # in the background too
    signal.signal(number, signal.default_int_handler)
  first, _, end = arguments.seeds.partition(":")
  seeds = range(int(first), int(end) if end else int(first) + 1)
  start, failures, counts = time.monotonic(), [], collections.Counter()
  said = start
  try:
    for seed in seeds:
      if time.monotonic() - start > 60 * arguments.minutes:
        break
      if arguments.first and failures:
        break
      counts["runs"] += try_seed(seed, arguments, failures)
      counts["seeds"] += 1
      if time.monotonic() - said > 60:
        said = time.monotonic()
        minutes = (said - start) / 60
        print(
            f"{counts['seeds']} seeds (to {seed}), {counts['runs']} runs, "
            f"{len(failures)} wrong, {minutes:.1f} minutes", flush=True,
        )
  except KeyboardInterrupt:
    print("interrupted", flush=True)
  minutes = (time.monotonic() - start) / 60
  print(
      f"{counts['seeds']} seeds from {first}, {counts['runs']} runs, "
      f"{len(failures)} wrong, {minutes:.1f} minutes"
  )
  for seed, index, wrong in failures:
    print(f"  seed {seed} run {index}: {wrong}")
  return bool(failures)


if __name__ == "__main__":
  sys.exit(main())
