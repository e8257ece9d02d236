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


class Stored:
  """What the file holds; saved whenever something is added.

  Attributes:
    made_by: the command and the versions.
    cases: by number, a description and the names of the parameters.
    steps: figures by name.
    gradients: by number, what `cases.gradients` gave.
  """

  def __init__(self, made_by, cases, steps, gradients):
    self.made_by, self.cases = made_by, cases
    self.steps, self.gradients = steps, gradients

  @classmethod
  def new(cls):
    return cls(made_by(), {}, {}, {})

  @classmethod
  def load(cls):
    with np.load(FILE) as file:
      notes = json.loads(str(file["notes"]))
      gradients = {number: file[number] for number in notes["cases"]}
    return cls(notes["made_by"], notes["cases"], notes["steps"], gradients)

  def save(self):
    notes = dict(made_by=self.made_by, cases=self.cases, steps=self.steps)
    np.savez_compressed(
        FILE, notes=np.str_(json.dumps(notes)), **self.gradients
    )


def described(case):
  """As JSON gives it back."""
  return json.loads(json.dumps(dataclasses.asdict(case)))


def write(picked, stored: Stored):
  for case in picked:
    names, numbers = cases_lib.gradients(case)
    number = str(case.number)
    stored.cases[number] = dict(case=described(case), names=names)
    stored.gradients[number] = numbers
    stored.save()
    print(f"case {number}: {len(names)} leaves", flush=True)


def write_steps(stored: Stored):
  for name in steps_lib.STEPS:
    stored.steps[name] = steps_lib.figures(name)
    stored.save()
    print(name, stored.steps[name], flush=True)


def compare(picked, stored: Stored) -> bool:
  """Prints the worst difference of every kind; whether all are small."""
  worst, good = collections.defaultdict(float), True
  for case in picked:
    entry = stored.cases.get(str(case.number))
    if entry is None or entry["case"] != described(case):
      print(f"WRONG case {case.number} is not the one that was stored")
      good = False
      continue
    off = gradient_error(case, entry, stored.gradients[str(case.number)])
    kind = f"{case.kind}, {case.mode}, devices={case.devices}"
    worst[kind] = max(worst[kind], off)
    if not off <= GRADIENT:
      good = False
      print(f"WRONG by {off:.2e}: {case}", flush=True)
  for kind in sorted(worst):
    print(f"gradients of {kind}: {worst[kind]:.2e}")
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


def compare_steps(stored: Stored) -> bool:
  worst, good = collections.defaultdict(float), True
  for name in steps_lib.STEPS:
    if name not in stored.steps:
      print(f"WRONG {name} was not stored")
      good = False
      continue
    found = steps_lib.figures(name)
    for kind, value in stored.steps[name].items():
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
  parser.add_argument(
      "--cases", default=None,
      help="first:end of the cases alone; written, they replace these",
  )
  parser.add_argument(
      "--steps", action="store_true", help="the compiled steps alone"
  )
  arguments = parser.parse_args()
  start, picked = time.monotonic(), cases_lib.cases()
  everything = not (arguments.cases or arguments.steps)
  if arguments.cases:
    first, _, end = arguments.cases.partition(":")
    picked = picked[int(first) : int(end) if end else int(first) + 1]
  elif arguments.steps:
    picked = []
  fresh = arguments.write and (everything or not FILE.exists())
  stored, good = Stored.new() if fresh else Stored.load(), True
  if stored.made_by["jax"] != jax.__version__:
    print(f"made by jax {stored.made_by['jax']}, this is {jax.__version__}")
  if arguments.write:
    write(picked, stored)
  else:
    good = compare(picked, stored)
  if everything or arguments.steps:
    if arguments.write:
      write_steps(stored)
    else:
      good &= compare_steps(stored)
  print(
      f"{len(picked)} cases of {cases_lib.DATA} gradients, "
      f"{(time.monotonic() - start) / 60:.1f} minutes, "
      f"{time.process_time() / 60:.1f} of a core"
  )
  return not good


if __name__ == "__main__":
  sys.exit(main())
