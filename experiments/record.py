# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What every experiment writes down beside its numbers."""

import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shlex
import sys

import jax
import ml_collections

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def _command() -> str:
  """How this process was started, as one would type it."""
  script = pathlib.Path(sys.argv[0])
  if script.parent.name == "experiments":
    return shlex.join(
        ["python", "-m", f"experiments.{script.stem}", *sys.argv[1:]]
    )
  return shlex.join([script.name, *sys.argv[1:]])


def environment() -> dict:
  """Versions, device kind and count, and the command that was run."""
  devices = jax.devices()
  return {
      "python": platform.python_version(),
      **{name: importlib.metadata.version(name) for name in _PACKAGES},
      "platform": devices[0].platform,
      "device_kind": devices[0].device_kind,
      "device_count": len(devices),
      "cpu_count": os.cpu_count(),
      "machine": platform.machine(),
      "command": _command(),
  }


def peak_rss_bytes() -> int:
  """The most memory this process has had resident so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def resume(workdir: pathlib.Path, config: ml_collections.ConfigDict):
  """Cases that an earlier run of the same config has finished.

  Args:
    workdir: holds config.json and cases.jsonl, one case a line; made if needed.
    config: of this run.

  Returns:
    The cases.

  Raises:
    ValueError: the workdir holds cases of another config.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  file, log = workdir / "config.json", workdir / "cases.jsonl"
  mine = json.loads(json.dumps(config.to_dict()))
  if file.exists() and json.loads(file.read_text()) != mine:
    raise ValueError(
        f"{workdir} holds cases of another config: take another --workdir."
    )
  write_json(file, mine)
  # A kill may leave half a line at the end: that case is run again.
  lines = log.read_text().split("\n")[:-1] if log.exists() else []
  log.write_text("".join(line + "\n" for line in lines))
  return [json.loads(line) for line in lines]


def append(workdir: pathlib.Path, case: dict) -> None:
  """Adds a finished case to those that `resume` finds."""
  with (workdir / "cases.jsonl").open("a") as file:
    file.write(json.dumps(case) + "\n")


def write_json(path: pathlib.Path, value) -> None:
  """Writes in one step: an interrupt leaves the old file or the new one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(path.suffix + ".partial")
  temporary.write_text(json.dumps(value, indent=1) + "\n")
  temporary.replace(path)
