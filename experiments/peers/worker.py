# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts one peer: pins its threads, then imports it and serves.

  python -m experiments.peers.worker --peer=torch_full --problem=FILE

Threads and memory are limited before a framework is imported, because thread
pools are sized at import.
"""

import argparse
import importlib
import os
import pathlib
import resource
import sys

from experiments.peers import problem as problem_lib
from experiments.peers import serve

_MODULES = {
    "torch_full": "torch_full", "torch_full_batched": "torch_full",
    "prefix_grouper": "grouper", "tunix": "tunix_full",
}


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--peer", required=True)
  parser.add_argument("--problem", required=True, type=pathlib.Path)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--memory_gib", type=float, default=16.0)
  options = parser.parse_args()
  if hasattr(os, "sched_setaffinity"):  # XLA makes a thread for each core
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)
    limit = int(options.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  os.environ["OMP_NUM_THREADS"] = str(options.threads)
  os.environ["JAX_PLATFORMS"] = "cpu"
  # Answers go to the real standard output; what libraries print does not.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  module = importlib.import_module(
      f"experiments.peers.{_MODULES.get(options.peer, 'ours')}"
  )
  peer = module.load(
      problem_lib.load(options.problem), name=options.peer,
      threads=options.threads, memory_bytes=int(options.memory_gib * 2**30),
  )
  serve.serve(peer, sys.stdin, answers)


if __name__ == "__main__":
  main()
