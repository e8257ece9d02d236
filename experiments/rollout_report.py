# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Figure of the rollout benchmark, drawn from its results alone."""

import pathlib

import matplotlib

_COLORS = {
    "none": "#555555", "ngram": "#4060a0", "untrained": "#c8553d",
    "learned": "#1b7f5c",
}


def name_of(run: dict) -> str:
  """A variant in a few words."""
  if run["drafter"] == "none":
    return "compacted" if run["compact"] else "plain"
  return f"{run['drafter']}, {run['draft_length']}"


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: tokens a second, accept length and drafts accepted."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  runs = results["runs"]
  colors = [_COLORS[run["drafter"]] for run in runs]
  figure, axes = plt.subplots(
      1, 3, figsize=(11, 3.8), sharey=True, layout="constrained"
  )
  panels = {
      "tokens a second (and over the first)": (
          [run["tokens_per_second"] for run in runs],
          [f"{run['speedup']:.2f}×" for run in runs],
      ),
      "tokens of a row per forward pass": (
          [run["accept_length"] for run in runs],
          [f"{run['accept_length']:.2f}" for run in runs],
      ),
      "share of the drafts that was accepted": (
          [run["accepted"] / max(1, run["drafted"]) for run in runs],
          [
              f"{run['accepted'] / run['drafted']:.0%}" if run["drafted"]
              else "no drafts"
              for run in runs
          ],
      ),
  }
  for axis, (title, (values, labels)) in zip(axes, panels.items(), strict=True):
    bars = axis.barh(range(len(runs)), values, color=colors)
    axis.bar_label(bars, labels, fontsize=8, padding=2)
    axis.margins(x=0.18)
    axis.set_title(title, fontsize=9)
  axes[0].set_yticks(range(len(runs)), [name_of(run) for run in runs])
  axes[0].invert_yaxis()
  figure.savefig(path, dpi=120)
  plt.close(figure)
