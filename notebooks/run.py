# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Executes every notebook here from its first cell, and keeps no output.

  python notebooks/run.py [name ...]
"""

import os
import pathlib
import sys
import time

import nbclient
import nbformat

_FOLDER = pathlib.Path(__file__).resolve().parent


def main(names: list[str]) -> None:
  # As for the tests: much is compiled here and little is run.
  os.environ.setdefault(
      "XLA_FLAGS",
      "--xla_cpu_use_fusion_emitters=false"
      " --xla_backend_optimization_level=0"
      " --xla_llvm_disable_expensive_passes=true",
  )
  for path in sorted(_FOLDER.glob("*.ipynb")):
    if names and path.stem not in names:
      continue
    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(_FOLDER)}},
    ).execute()
    print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
