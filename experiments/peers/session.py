# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The workers of one prompt length: started, timed, compared, ended."""

import dataclasses
import pathlib
import sys

import ml_collections
import numpy as np

from branch_replay.planning import compare
from experiments.peers import client

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Of each system, the mode whose work it does.
MODES = {
    "torch_full": "full", "torch_full_batched": "full",
    "prefix_grouper": "exact", "tunix": "full", "ours_full": "full",
    "ours_exact_keep": "exact", "ours_exact_recompute": "exact",
    "ours_stop": "stop",
}
_START_SECONDS = 600  # imports, weights and compilation


def judge(row: dict, reference: dict, arrays: dict, tolerance: float) -> None:
  """Adds the distance of a system's result from the reference to its row.

  Both have log_probs, gradients by name, and a "loss": the row's is there. The
  tolerance is on loss, log-probs and, of exact systems, the gradient: whole,
  norm, and worst parameter.
  """
  def gradient(of):
    return {k: x for k, x in of.items() if k not in ("log_probs", "loss")}

  result = compare.compare(gradient(arrays), gradient(reference))
  errors = {
      "log_prob_error": float(
          np.max(np.abs(arrays["log_probs"] - reference["log_probs"]))
      ),
      "loss_error": abs(row["loss"] / reference["loss"] - 1),
  }
  of_gradient = {
      "gradient_norm_error": abs(result.norm_ratio - 1),
      "gradient_relative_error": result.relative_error,
      "worst_parameter_error": result.worst_error,
  }
  row |= errors | of_gradient
  row["worst_parameter"] = result.worst_parameter
  checked = errors if MODES[row["peer"]] == "stop" else errors | of_gradient
  row["agrees"] = all(error < tolerance for error in checked.values())


@dataclasses.dataclass
class Session:
  """The workers of one prompt length, and their rows.

  Attributes:
    config: see configs/peers.py.
    entry: of results.json; its rows are filled in.
    folder: for logs and gradients.
    workers: those that run, by name.
  """

  config: ml_collections.ConfigDict
  entry: dict
  folder: pathlib.Path
  workers: dict[str, client.Worker] = dataclasses.field(default_factory=dict)

  def row(self, name: str) -> dict:
    """The row of a system."""
    return next(r for r in self.entry["peers"] if r["peer"] == name)

  def start(self, name: str, file: pathlib.Path) -> None:
    """Starts a worker and runs its first gradient, which is not timed."""
    config = self.config
    python = str(_ROOT / config.peers_python)
    if name.startswith("ours_"):
      python = sys.executable
    worker = self.workers[name] = client.Worker(
        [
            python, "-m", "experiments.peers.worker", f"--peer={name}",
            f"--problem={file}", f"--threads={config.threads}",
            f"--memory_gib={config.memory_gib}",
        ],
        folder=_ROOT, log=self.folder / f"{name}.log",
    )
    answer = worker.answer(_START_SECONDS)
    if "not_run" not in answer:
      row = self.row(name)
      row["baseline_rss_bytes"] = answer["baseline_rss_bytes"]
      row["versions"] = answer["versions"]
      self.go(name, _START_SECONDS + config.limit_seconds)
      row["first_seconds"] = row["seconds"].pop() if row["seconds"] else None
    else:
      self.give_up(name, answer["not_run"])

  def slow(self, name: str) -> bool:
    """Whether a system is so slow that it is timed only once."""
    first = self.row(name).get("first_seconds")
    return first is not None and first > self.config.once_above_seconds

  def go(self, name: str, timeout: float) -> None:
    """One gradient; a system that cannot is given up."""
    answer = self.workers[name].ask("go", timeout)
    row = self.row(name)
    if "not_run" in answer:
      self.give_up(name, answer["not_run"])
      return
    row["seconds"].append(answer["seconds"])
    row["cpu_seconds"] = answer["cpu_seconds"]
    row["idle_cpu_seconds"] = max(
        row.get("idle_cpu_seconds", 0.0), answer["idle_cpu_seconds"]
    )
    for field in ("loss", "built_rss_bytes", "peak_rss_bytes", "settings"):
      row[field] = answer[field]
    row["extra_rss_bytes"] = row["peak_rss_bytes"] - row["baseline_rss_bytes"]
    if answer["seconds"] > self.config.limit_seconds:
      self.give_up(
          name, f"one gradient took {answer['seconds']:.0f} s; the limit is "
          f"{self.config.limit_seconds:.0f} s"
      )

  def give_up(self, name: str, reason: str) -> None:
    """Records why and ends the worker."""
    self.workers.pop(name).close()
    row = self.row(name)
    row["not_run"], row["seconds"] = reason, []

  def check(self) -> None:
    """Compares the last gradients with that of the first exact system."""
    order = sorted(self.workers, key=lambda name: name != "ours_exact_keep")
    order.sort(key=lambda name: MODES[name] == "stop")
    reference = None
    for name in order:
      file = self.folder / f"{name}.npz"
      answer = self.workers[name].ask(f"write {file}", _START_SECONDS)
      if "not_run" in answer:
        self.give_up(name, answer["not_run"])
        continue
      with np.load(file) as saved:
        arrays = dict(saved)
      file.unlink()
      row = self.row(name)
      if reference is None:
        self.entry["reference"] = name
        reference = arrays | {"loss": row["loss"]}
      judge(row, reference, arrays, self.config.tolerance)

  def close(self) -> None:
    """Ends all workers."""
    for worker in self.workers.values():
      worker.close()
