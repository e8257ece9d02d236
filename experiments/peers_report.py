# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Ratios, table and figure of the comparison with other systems."""

import pathlib
import statistics

import matplotlib

_OURS = ("ours_exact_keep", "ours_exact_recompute", "ours_stop")
_COLORS = {
    "torch_full": "#c8553d",
    "torch_full_batched": "#e6a48f",
    "prefix_grouper": "#8a5aa8",
    "tunix": "#4060a0",
    "ours_full": "#555555",
    "ours_exact_keep": "#1b7f5c",
    "ours_exact_recompute": "#58b897",
    "ours_stop": "#b0a030",
}


def relate(entry: dict) -> None:
  """Adds medians to the rows of an entry, and ratios to ours.

  `time_ratio` and `memory_ratio` are, by name of one of ours, what the row
  takes over what that takes; memory above the loaded weights.
  """
  rows = {row["peer"]: row for row in entry["peers"]}
  for row in rows.values():
    row.pop("seconds_median", None)
    if row["seconds"]:
      row["seconds_median"] = statistics.median(row["seconds"])
  ours = {
      name: rows[name]
      for name in _OURS
      if name in rows and "seconds_median" in rows[name]
  }
  for row in rows.values():
    if "seconds_median" in row:
      row["time_ratio"] = {
          name: row["seconds_median"] / mine["seconds_median"]
          for name, mine in ours.items()
      }
      row["memory_ratio"] = {
          name: row["extra_rss_bytes"] / mine["extra_rss_bytes"]
          for name, mine in ours.items()
      }


def table(results: dict) -> str:
  """A line a system and prompt length, as aligned text."""
  rows = [[
      "P", "system", "seconds", "min", "max", "/ exact keep", "/ recompute",
      "/ stop", "peak MiB", "above weights", "loss", "rel. error", "agrees",
  ]]
  notes = []
  for entry in results["prefixes"]:
    for row in entry["peers"]:
      head = [str(entry["prompt_tokens"]), row["peer"]]
      if "seconds_median" not in row:
        reason = row.get("not_run", "not finished")
        rows.append(head + ["–"] * (len(rows[0]) - 2))
        notes.append(f"{' '.join(head)}: not run: {reason}")
        continue
      rows.append([
          *head,
          *(f"{of(row['seconds']):.3f}" for of in (statistics.median, min,
                                                   max)),
          *(_ratio(row, name) for name in _OURS),
          f"{row['peak_rss_bytes'] / 2**20:,.0f}",
          f"{row['extra_rss_bytes'] / 2**20:,.0f}",
          f"{row['loss']:.6f}",
          f"{row['gradient_relative_error']:.1e}"
          if "gradient_relative_error" in row else "–",
          {True: "yes", False: "NO", None: "–"}[row.get("agrees")],
      ])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  aligned = (
      "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  )
  return "\n".join([*aligned, *notes])


def _ratio(row: dict, name: str) -> str:
  value = row["time_ratio"].get(name)
  return "–" if value is None else f"{value:.2f}×"


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time and memory against the prompt's length."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
  fields = (
      ("seconds_median", 1, "seconds a gradient"),
      ("extra_rss_bytes", 2**20, "peak memory above loaded weights, MiB"),
  )
  for axis, (field, unit, title) in zip(axes, fields, strict=True):
    for name, color in _COLORS.items():
      points = [
          (entry["prompt_tokens"], row[field] / unit)
          for entry in results["prefixes"]
          for row in entry["peers"]
          if row["peer"] == name and "seconds_median" in row
      ]
      if points:
        axis.plot(*zip(*points, strict=True), "o-", color=color, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("prompt tokens")
    axis.set_title(title, fontsize=10)
  figure.legend(
      *axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=4,
      fontsize=8,
  )
  shape = results["config"]
  figure.suptitle(
      f"G={shape['branches']}, T={shape['tail_tokens']}, "
      f"{shape['threads']} threads, float32"
  )
  figure.savefig(path, dpi=120)
  plt.close(figure)
