# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares gradients, memory and operations with the committed ones.

  .venv/bin/python -m tests.witness          compares, fails if they differ
  .venv/bin/python -m tests.witness --write  makes tests/goldens/witness.npz

Numbers are those of unoptimized code on a CPU of eight virtual devices.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
import time

# Not a default: memory depends on them.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)

from tests.witness import cases as cases_lib  # noqa: E402
from tests.witness import steps as steps_lib  # noqa: E402

FILE = pathlib.Path(__file__).parent.parent / "goldens" / "witness.npz"
GRADIENT, FIGURE = 1e-11, 0.01  # relative


def made_by() -> dict:
  return dict(
      command="python -m tests.witness --write", jax=jax.__version__,
      numpy=np.__version__,
  )


def write(picked):
  arrays, described = {}, []
  for case in picked:
    names, numbers = cases_lib.gradients(case)
    arrays[f"gradients/{case.number}"] = numbers
    described.append(dict(case=dataclasses.asdict(case), names=names))
    print(f"case {case.number}: {len(names)} leaves", flush=True)
  figures = {name: steps_lib.figures(name) for name in steps_lib.STEPS}
  notes = dict(made_by=made_by(), cases=described, steps=figures)
  np.savez_compressed(FILE, notes=np.str_(json.dumps(notes)), **arrays)
  print(f"{FILE}: {FILE.stat().st_size / 1024:.0f} KiB")


def compare(picked, with_steps: bool) -> bool:
  """Prints the worst difference of every kind; whether all are small."""
  with np.load(FILE) as file:
    stored = {name: file[name] for name in file.files}
  notes = json.loads(str(stored["notes"]))
  if notes["made_by"]["jax"] != jax.__version__:
    print(f"made by jax {notes['made_by']['jax']}, this is {jax.__version__}")
  known = {entry["case"]["number"]: entry for entry in notes["cases"]}
  worst, good = collections.defaultdict(float), True
  for case in picked:
    entry = known.get(case.number)
    if entry is None or entry["case"] != json.loads(
        json.dumps(dataclasses.asdict(case))
    ):
      print(f"WRONG case {case.number} is another one than was stored")
      good = False
      continue
    off = gradient_error(case, entry, stored[f"gradients/{case.number}"])
    kind = f"{case.kind}, {case.mode}, devices={case.devices}"
    worst[kind] = max(worst[kind], off)
    if not off <= GRADIENT:
      good = False
      print(f"WRONG by {off:.2e}: {case}", flush=True)
  for kind in sorted(worst):
    print(f"gradients of {kind}: {worst[kind]:.2e}")
  if with_steps:
    good &= compare_steps(notes["steps"])
  return good


def gradient_error(case, entry, wanted) -> float:
  try:
    names, found = cases_lib.gradients(case)
  except Exception as exception:  # a case that no longer runs is a difference
    print(f"{type(exception).__name__}: {exception}")
    return float("inf")
  if names != entry["names"]:
    different = sorted(set(names) ^ set(entry["names"]))
    print(f"other parameters: {different[:6]}")
    return float("inf")
  return float(np.nan_to_num(
      max(map(cases_lib.error, found, wanted)), nan=np.inf
  ))


def compare_steps(wanted) -> bool:
  worst, good = collections.defaultdict(float), True
  for name in steps_lib.STEPS:
    found = steps_lib.figures(name)
    for kind, value in wanted[name].items():
      off = abs(found[kind] / value - 1)
      worst[kind] = max(worst[kind], off)
      if off > FIGURE:
        good = False
        print(
            f"WRONG {name}: {kind} {found[kind]:.0f}, was {value:.0f} "
            f"({found[kind] / value - 1:+.1%})", flush=True,
        )
  for kind in sorted(worst):
    print(f"{kind} of compiled steps: {worst[kind]:.2%}")
  return good


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--write", action="store_true")
  parser.add_argument("--cases", default=None, help="first:end, of 40")
  arguments = parser.parse_args()
  picked, start = cases_lib.cases(), time.monotonic()
  if arguments.cases:
    if arguments.write:
      parser.error("--write writes all cases: leave --cases out")
    first, _, end = arguments.cases.partition(":")
    picked = picked[int(first) : int(end) if end else int(first) + 1]
  if arguments.write:
    write(picked)
    good = True
  else:
    good = compare(picked, with_steps=not arguments.cases)
  print(
      f"{len(picked)} cases of {cases_lib.DATA} gradients, "
      f"{(time.monotonic() - start) / 60:.1f} minutes, "
      f"{time.process_time() / 60:.1f} of a core"
  )
  return not good


if __name__ == "__main__":
  sys.exit(main())
