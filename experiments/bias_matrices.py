# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Bias of stopping at the prefix, matrix by matrix, against P, T and G."""

import pathlib

import matplotlib

MATRICES = {
    "query": "layers/project/query/kernel",
    "key": "layers/project/key/kernel",
    "value": "layers/project/value/kernel",
    "output": "layers/join/output/kernel",
    "gate": "layers/expand/gate/kernel",
    "up": "layers/expand/up/kernel",
    "down": "layers/contract/down/kernel",
    "embedding": "embed/table",
}
_AXES = {"prompt_tokens": "prompt", "tail_tokens": "T", "branches": "G"}
_BASE = {"prompt_tokens": 512, "tail_tokens": 32, "branches": 4}


def along(results: dict, axis: str) -> list[dict]:
  """Rows of the summary along one axis, the others at their base.

  Args:
    results: of experiments.bias_sweep.
    axis: "prompt_tokens", "tail_tokens" or "branches".

  Returns:
    Rows with random advantages, in the order of the axis.
  """
  fixed = {name: value for name, value in _BASE.items() if name != axis}
  rows = [
      row for row in results["summary"]["stop"]
      if row["advantages"] == "random" and row["depth"] is None
      and all(row[name] == value for name, value in fixed.items())
  ]
  return sorted(rows, key=lambda row: row[axis])


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: the cosine of every kind of matrix along each axis."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axes = plt.subplots(
      1, 3, figsize=(11, 3.8), sharey=True, layout="constrained"
  )
  for plot, (axis, letter) in zip(axes, _AXES.items(), strict=True):
    rows = along(results, axis)
    for name, parameter in MATRICES.items():
      found = [row["per_matrix_cosine"][parameter] for row in rows]
      plot.errorbar(
          [row[axis] for row in rows], [one["mean"] for one in found],
          [one["std"] or 0 for one in found], marker=".", capsize=2,
          label=name,
      )
    at = ", ".join(
        f"{_AXES[other]} = {_BASE[other]}" for other in _AXES if other != axis
    )
    plot.set_xscale("log", base=2)
    plot.set_xlabel(f"{letter} ({at})")
  axes[0].set_ylabel("cosine of stop with exact (mean, std)")
  handles = axes[0].get_legend_handles_labels()
  figure.legend(*handles, loc="outside right center", fontsize=8)
  figure.savefig(path, dpi=120)
  plt.close(figure)
