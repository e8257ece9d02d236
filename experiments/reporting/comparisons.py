# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient by several modes: tables and figure; rounding of a sum."""

import pathlib

from experiments.reporting import plots
from experiments.reporting import tables


def table(results: dict) -> str:
  """A comparison, a line a mode."""
  def column(field, form, unit=""):
    return lambda run: tables.number(run, field, form, unit)

  def temporaries(run):
    return f"{run['temp_bytes'] / 2**20:,.0f} MiB" if run["temp_bytes"] else "–"

  return tables.markdown({
      "mode": "{mode}",
      "s": column("seconds_median", ".2f"),
      "speed-up": column("speedup", ".2f", "×"),
      "ideal": column("ideal_speedup", ".2f", "×"),
      "temporaries": temporaries,
      "cosine": column("gradient_cosine", ".4f"),
      "relative error": column("gradient_relative_error", ".1e"),
      "worst parameter": lambda run: tables.number(
          run.get("worst_parameter", {}), "relative_error", ".1e"
      ),
  }, results["runs"])


def trees(results: dict) -> str:
  """A comparison over architectures and trees, a line a run."""
  def column(field, form, unit=""):
    return lambda run: tables.number(run, field, form, unit)

  rows = [
      {"architecture": case["architecture"], "tree": case["tree"], **run}
      for case in results["cases"] for run in case["runs"]
  ]
  return tables.markdown({
      "architecture": "{architecture}", "tree": "{tree}", "mode": "{mode}",
      "s": "{seconds_median:.3f}",
      "speed-up": column("speedup", ".2f", "×"),
      "ideal": column("ideal_speedup", ".2f", "×"),
      "token ratio": column("token_ratio", ".2f"),
      "of it": column("speedup_of_token_ratio", ".2f"),
      "cosine": column("gradient_cosine", ".4f"),
      "relative error": column("gradient_relative_error", ".1e"),
  }, rows)


def rounding(results: dict) -> str:
  """Errors of a bfloat16 accumulator by number of chunks."""
  return tables.markdown({
      "chunks": "{chunks}", "relative error": "{relative_error:.1e}",
      "worst parameter": "{worst_parameter:.1e}",
  }, results["cases"])


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time against its ideal, memory, and cosines by matrix."""
  runs = results["runs"]
  modes, full = [run["mode"] for run in runs], runs[0]
  colors = [plots.COLORS[mode] for mode in modes]
  with plots.axes(
      path, 1, 3, size=(13, 4.2), dpi=130, width_ratios=(1, 1, 2)
  ) as (figure, (time, memory, cosine)):
    time.bar(modes, [run["seconds_median"] for run in runs], color=colors)
    for at, run in enumerate(runs):
      if full["mode"] == "full":
        ideal = full["seconds_median"] / run["ideal_speedup"]
        time.hlines(ideal, at - 0.4, at + 0.4, color="black", linewidth=2)
        time.annotate(
            f"{run['speedup']:.1f}×", (at, run["seconds_median"]),
            ha="center", va="bottom",
        )
    time.set_title("seconds a gradient (line: ideal by FLOPs)", fontsize=9)
    memory.bar(
        modes, [(run["temp_bytes"] or 0) / 2**20 for run in runs], color=colors
    )
    memory.set_title("compiled temporaries, MiB", fontsize=9)
    names = [
        name for name in full.get("per_matrix_cosine", {})
        if not name.endswith(("scale", "bias"))
    ]
    for run, color in zip(runs[1:], colors[1:], strict=True):
      values = [run["per_matrix_cosine"][name] for name in names]
      cosine.plot(
          values, range(len(names)), "o", color=color, label=run["mode"]
      )
    cosine.set_yticks(
        range(len(names)),
        [name.removeprefix("layers/").removesuffix("/kernel")
         for name in names],
        fontsize=8,
    )
    cosine.set_title("cosine with the full gradient, by matrix", fontsize=9)
    if len(runs) > 1:
      cosine.legend(fontsize=8)
    figure.suptitle(
        f"P={full['prefix_tokens']}, G={full['branches']}, "
        f"T={full['tail_tokens']}, {results['environment']['device_kind']}"
    )
