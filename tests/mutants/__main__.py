# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts faults into copies of the code and says which no test notices.

  python -m tests.mutants [--only=NAME] [--match=ROOM] [--jobs=2]

Each fault is put into a copy of the tree, never into the tree itself; then its
tests run there, and it is taken out. One that keeps its module from being
imported, or its tests from being found, is invalid and counts as not noticed.
Before, all tests have to pass on the code as it is.

Ends with 1 if less than 95 % are noticed, or a test fails without a fault.
"""

import argparse
from concurrent import futures
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests import mutants

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PARTS = ("branch_replay", "tests", "experiments", "configs", "docs")
_FILES = ("pyproject.toml", "README.md")
_INVALID = 97  # exit code: the module of the fault cannot be imported
_SECONDS = 600  # longer is a hang, which is noticed
_LEAST = 0.95
_RUN = f"""
import importlib, sys
module, *arguments = sys.argv[1:]
try:
  if module:
    importlib.import_module(module)
except Exception:
  raise SystemExit({_INVALID})
import pytest
raise SystemExit(pytest.main(arguments))
"""


def main(arguments=None) -> int:
  parser = argparse.ArgumentParser(
      prog="tests.mutants", description=__doc__.split("\n")[0]
  )
  parser.add_argument("--only", help="the fault of this name")
  parser.add_argument(
      "--match", default="", help="faults of files whose path this regular "
      "expression is found in: rl/, ^rollout, ^engine/"
  )
  parser.add_argument("--jobs", type=int, default=2, help="at the same time")
  parser.add_argument("--list", action="store_true", help="name them, run none")
  options = parser.parse_args(arguments)
  chosen = [
      fault for fault in mutants.ALL
      if re.search(options.match, fault.file)
      and options.only in (None, fault.name)
  ]
  if not chosen:
    parser.error("No such fault; --list names them.")
  if options.list:
    for fault in chosen:
      print(f"{fault.file}: {fault.name}")
    return 0
  with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
    return _run(chosen, pathlib.Path(folder), options.jobs)


def _run(chosen, folder: pathlib.Path, jobs: int) -> int:
  copies = queue.Queue()
  for number in range(jobs):
    copies.put(_copy(folder / f"copy{number}"))
  cache = folder / "programs"
  with futures.ThreadPoolExecutor(jobs) as pool:
    if not _sound(chosen, pool, copies, cache):
      return 1
    waiting = [pool.submit(_try, fault, copies, cache) for fault in chosen]
    for done in futures.as_completed(waiting):
      fault, outcome, seconds = done.result()
      print(f"{outcome:9} {seconds:4.0f} s  {fault.file}: {fault.name}",
            flush=True)
  missed = [one.result() for one in waiting if one.result()[1] != "noticed"]
  noticed = len(chosen) - len(missed)
  print(f"\n{noticed} of {len(chosen)} faults noticed.")
  for fault, outcome, _ in missed:
    print(f"  {outcome}: {fault.file}: {fault.name}")
  return 0 if noticed >= _LEAST * len(chosen) else 1


def _copy(folder: pathlib.Path) -> pathlib.Path:
  for part in _PARTS:
    shutil.copytree(
        _ROOT / part, folder / part,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
  for file in _FILES:
    shutil.copy(_ROOT / file, folder / file)
  return folder


def _sound(chosen, pool, copies, cache) -> bool:
  """Whether all tests pass without a fault; one process a file."""
  by_file = {}
  for test in sorted({test for fault in chosen for test in fault.tests}):
    by_file.setdefault(test.partition("::")[0], []).append(test)

  def one(tests):
    copy = copies.get()
    try:
      return _pytest(copy, "", tests, cache)
    finally:
      copies.put(copy)

  print(f"{sum(map(len, by_file.values()))} tests without a fault", flush=True)
  sound = True
  for code, output in pool.map(one, by_file.values()):
    if code:
      print(output)
      sound = False
  return sound


def _try(fault, copies, cache):
  """(fault, outcome, seconds) of one fault in the next free copy."""
  copy = copies.get()
  file = copy / "branch_replay" / fault.file
  text = file.read_text()
  start = time.monotonic()
  try:
    if text.count(fault.old) != 1:
      return fault, "invalid", 0
    file.write_text(text.replace(fault.old, fault.new))
    name = f"branch_replay/{fault.file}".removesuffix(".py").replace("/", ".")
    code, _ = _pytest(copy, name, fault.tests, cache)
  finally:
    file.write_text(text)
    copies.put(copy)
  outcome = {0: "survived", 1: "noticed"}.get(code, "invalid")
  return fault, outcome, time.monotonic() - start


def _pytest(copy, module: str, tests, cache):
  """Exit code and output of tests, in a process of their own."""
  environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      # A fault may take no longer to write than files' times can tell apart.
      "PYTHONDONTWRITEBYTECODE": "1",
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
      # As in `tests.conftest`, which the module may be imported before.
      "XLA_FLAGS": os.environ.get("XLA_FLAGS") or (
          "--xla_cpu_use_fusion_emitters=false"
          " --xla_backend_optimization_level=0"
          " --xla_llvm_disable_expensive_passes=true"
      ),
  }
  process = subprocess.Popen(
      [sys.executable, "-c", _RUN, module, "-x", "-n", "0", "-q",
       "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)],
      cwd=copy, env=environment, start_new_session=True, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )
  try:
    output, _ = process.communicate(timeout=_SECONDS)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return 1, output + "\nTook too long."
  return process.returncode, output


if __name__ == "__main__":
  sys.exit(main())
