# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of rollouts by compaction, drafter and draft length."""

import pathlib

from experiments.reporting import plots
from experiments.reporting import tables

_COLORS = {
    "none": "#555555", "ngram": "#4060a0", "untrained": "#c8553d",
    "learned": "#1b7f5c",
}


def name_of(run: dict) -> str:
  """A variant in a few words."""
  if run["drafter"] == "none":
    return "compacted" if run["compact"] else "plain"
  return f"{run['drafter']}, {run['draft_length']}"


def _drafts(run: dict) -> str:
  """The draft length, or those that a tuner took, largest bucket first."""
  if run["draft_length"] != "tuned":
    return str(run["draft_length"])
  return "tuned: " + ", ".join(map(str, run["bucket_draft_lengths"]))


def _accepted(run: dict) -> float:
  return run["accepted"] / max(1, run["drafted"])


def table(results: dict) -> str:
  """Tokens per second by compaction, drafter and draft length."""
  scanned = results["scanned"]
  first = results["runs"][0]["tokens_per_second"]
  runs = [*results["runs"], scanned | {
      "drafter": "none, layers scanned",
      "speedup": scanned["tokens_per_second"] / first,
  }]
  return tables.markdown({
      "compacted": lambda run: "yes" if run["compact"] else "no",
      "drafter": "{drafter}", "drafts": _drafts,
      "tokens/s": "{tokens_per_second:.1f}", "speed-up": "{speedup:.2f}×",
      "accept length": "{accept_length:.2f}",
      "drafts accepted": lambda run: f"{_accepted(run):.0%}",
      "rows that differ": "{rows_that_differ}",
  }, runs)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: tokens a second, accept length and drafts accepted."""
  runs = results["runs"]
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
          [_accepted(run) for run in runs],
          [
              f"{_accepted(run):.0%}" if run["drafted"] else "no drafts"
              for run in runs
          ],
      ),
  }
  colors = [_COLORS[run["drafter"]] for run in runs]
  with plots.axes(path, 1, 3, size=(11, 3.8), sharey=True) as (_, axes):
    for axis, (title, (values, labels)) in zip(
        axes, panels.items(), strict=True
    ):
      bars = axis.barh(range(len(runs)), values, color=colors)
      axis.bar_label(bars, labels, fontsize=8, padding=2)
      axis.margins(x=0.18)
      axis.set_title(title, fontsize=9)
    axes[0].set_yticks(range(len(runs)), [name_of(run) for run in runs])
    axes[0].invert_yaxis()


def simulated(results: dict) -> str:
  """The simulated rollout of several workers (notebooks/06_rollouts.ipynb)."""
  plain, drafts = results["plain"], results["drafts"]
  counted = results["speedup_counted_training"]
  after = f"{results['config']['updates']} updates after the rollout"

  def row(name, seconds, speedup, of=None):
    return {
        "name": name, "seconds": seconds, "speedup": speedup,
        "idle": f"{of['idle']:.0%}" if of else "–",
        "fit": f"{of['updates_in_idle']:.0f}" if of else "–",
    }

  return tables.markdown({
      "simulated": "{name}", "s": "{seconds:.1f}", "speed-up": "{speedup:.2f}×",
      "workers idle": "{idle}", "updates that fit the waits": "{fit}",
  }, [
      row("without drafts", plain["seconds"], 1.0, plain),
      row("with drafts, the drafter trained in waits", drafts["seconds"],
          results["speedup_free_training"], drafts),
      row(f"with drafts, {after}", plain["seconds"] / counted, counted),
  ])
