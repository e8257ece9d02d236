# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Ratios, table and figure of the comparison with other systems."""

import pathlib
import statistics

from experiments.reporting import plots
from experiments.reporting import tables

_OURS = ("ours_exact_keep", "ours_exact_recompute", "ours_stop")
_SYSTEMS = {  # in words, and a colour
    "torch_full": ("PyTorch, whole sequences, one at a time", "#c8553d"),
    "torch_full_batched": ("PyTorch, whole sequences, all at once", "#e6a48f"),
    "prefix_grouper": ("Prefix Grouper", "#8a5aa8"),
    "tunix": ("Tunix, whole sequences", "#4060a0"),
    "ours_full": ("`full`", "#555555"),
    "ours_exact_keep": ("`exact`, activations kept", "#1b7f5c"),
    "ours_exact_recompute": ("`exact`, recomputed", "#58b897"),
    "ours_stop": ("`stop`", "#b0a030"),
}


def relate(entry: dict) -> None:
  """Adds medians to the rows of an entry, and ratios to ours.

  `time_ratio` and `memory_ratio` are, by name of one of ours, what the row
  takes over what that takes; memory above the loaded weights.
  """
  for row in entry["peers"]:
    row.pop("seconds_median", None)
    if row["seconds"]:
      row["seconds_median"] = statistics.median(row["seconds"])
  timed = {
      row["peer"]: row for row in entry["peers"] if "seconds_median" in row
  }
  ours = {name: timed[name] for name in _OURS if name in timed}
  for row in timed.values():
    for ratio, field in (("time_ratio", "seconds_median"),
                         ("memory_ratio", "extra_rss_bytes")):
      row[ratio] = {name: row[field] / mine[field]
                    for name, mine in ours.items()}


def table(results: dict) -> str:
  """Seconds and memory by system and prompt length, or why there are none."""
  def column(entry):
    rows = {row["peer"]: row for row in entry["peers"]}

    def cell(name):
      row = rows.get(name, {})
      if "seconds_median" in row:
        return (f"{row['seconds_median']:.1f} s, "
                f"{row['extra_rss_bytes'] / 2**30:.1f} GiB")
      reason = row.get("not_run", "")
      if "out of memory" in reason:
        return "out of memory"
      limit = results["config"]["limit_seconds"]
      return f"over {limit:.0f} s" if "would take" in reason else "–"
    return cell

  return tables.markdown(
      {"system": lambda name: _SYSTEMS[name][0]} | {
          f"{entry['prompt_tokens']:,} tokens": column(entry)
          for entry in results["prefixes"] if entry["finished"]
      },
      _SYSTEMS,
  )


def remarks(results: dict) -> list[str]:
  """Lines that say what was not run and why, and which gradients differ."""
  found = []
  for entry in results["prefixes"]:
    for row in entry["peers"]:
      of = f"{entry['prompt_tokens']} {row['peer']}"
      if "seconds_median" not in row:
        found.append(f"{of}: not run: {row.get('not_run', 'not finished')}")
      elif row.get("agrees") is False:
        found.append(
            f"{of}: another gradient, by {row['gradient_relative_error']:.1e}"
        )
  return found


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time and memory against the prompt's length."""
  fields = (
      ("seconds_median", 1, "seconds a gradient"),
      ("extra_rss_bytes", 2**20, "peak memory above loaded weights, MiB"),
  )
  with plots.axes(path, 1, 2, size=(11, 4.5)) as (figure, axes):
    for axis, (field, unit, title) in zip(axes, fields, strict=True):
      for name, (_, color) in _SYSTEMS.items():
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
        *axes[0].get_legend_handles_labels(), loc="outside lower center",
        ncol=4, fontsize=8,
    )
    shape = results["config"]
    figure.suptitle(
        f"G={shape['branches']}, T={shape['tail_tokens']}, "
        f"{shape['threads']} threads, float32"
    )
