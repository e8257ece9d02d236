# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes results, with the versions, device and command that made them."""

from collections.abc import Callable
from collections.abc import Sequence
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import shlex
import sys

import jax
import ml_collections

from branch_replay.training import json_lines

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def _command() -> str:
  """The command that started this process, as one would type it."""
  script = pathlib.Path(sys.argv[0])
  room = RESULTS.parent
  if script.is_absolute() and script.is_relative_to(room):
    parts = script.relative_to(room.parent).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__main__")
    return shlex.join(["python", "-m", module, *sys.argv[1:]])
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
      "processor": _processor(),
      "command": _command(),
  }


def _processor() -> str:
  """The name of the processor, "" where the system does not tell."""
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  if not cpuinfo.exists():
    return platform.processor()
  found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
  return found[1] if found else platform.processor()


def begin(config: ml_collections.ConfigDict, **fields) -> dict:
  """The results of a run that has none yet: environment, config, `fields`."""
  return {
      "environment": environment(), "config": config.to_dict(), **fields
  }


def save(workdir: pathlib.Path, results: dict) -> None:
  """Writes results.json, so that an interrupt loses nothing."""
  write_json(workdir / "results.json", results)


def finish(
    workdir: pathlib.Path, results: dict, *, table: Callable[[dict], str],
    draw: Callable[[dict, pathlib.Path], None] | None = None,
) -> dict:
  """Writes results.json and figure.png, prints the table, returns results."""
  save(workdir, results)
  if draw is not None:
    draw(results, workdir / "figure.png")
  print(table(results))
  beside = " and figure.png beside it" if draw is not None else ""
  print(f"Wrote {workdir / 'results.json'}{beside}.")
  return results


def committed(name: str) -> dict:
  """A result file of experiments/results, by its name without .json."""
  return json.loads((RESULTS / f"{name}.json").read_text())


def peak_rss_bytes() -> int:
  """The most memory this process has had resident so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def resume(workdir: pathlib.Path, config: ml_collections.ConfigDict):
  """Cases that an earlier run of the same config has finished.

  The workdir holds config.json and cases.jsonl, one case a line; it is made if
  needed.

  Raises:
    ValueError: the workdir holds cases of another config, or a damaged line.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  file, log = workdir / "config.json", workdir / "cases.jsonl"
  mine = json.loads(json.dumps(config.to_dict()))
  if file.exists():
    differ = differences(json.loads(file.read_text()), mine)
    if differ:
      raise ValueError(
          f"{workdir} holds cases of another config: {'; '.join(differ)}. Take "
          "another --workdir."
      )
  write_json(file, mine)
  # A kill may leave half a line at the end: that case is run again.
  json_lines.mend(log)
  return json_lines.read(log)


def differences(
    saved: dict, mine: dict, *, free: Sequence[str] = ()
) -> list[str]:
  """Fields in which two configs differ, each with both values.

  Args:
    saved: the config of an earlier run, as JSON gives it back.
    mine: of this one.
    free: names of fields that may differ, by their dotted paths.

  Returns:
    As in "reinforce.steps: 40 there, 60 here"; empty if nothing differs.
  """
  there, here = flat(saved), flat(mine)

  def shown(fields, name):
    return repr(fields[name]) if name in fields else "missing"

  pairs = {
      name: (shown(there, name), shown(here, name))
      for name in dict.fromkeys([*there, *here]) if name not in free
  }
  return [
      f"{name}: {old} there, {new} here"
      for name, (old, new) in pairs.items() if old != new
  ]


def flat(config: dict, path: str = "") -> dict:
  """The fields of a nested config by their dotted paths."""
  found = {}
  for name, value in config.items():
    if isinstance(value, dict) and value:
      found |= flat(value, f"{path}{name}.")
    else:
      found[f"{path}{name}"] = value
  return found


def append(workdir: pathlib.Path, case: dict) -> None:
  """Adds a finished case to those that `resume` finds."""
  with (workdir / "cases.jsonl").open("a") as file:
    file.write(json_lines.dumps(case) + "\n")


def write_json(path: pathlib.Path, value) -> None:
  """Writes in one step: an interrupt leaves the old file or the new one.

  Numbers that are not finite are null, with a note: see `json_lines`.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix(path.suffix + ".partial")
  temporary.write_text(json_lines.dumps(value, indent=1) + "\n")
  temporary.replace(path)
