# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Table and figure of a comparison, drawn from its results alone."""

import pathlib

import matplotlib

_COLORS = {"full": "#555555", "exact": "#1b7f5c", "stop": "#c8553d"}


def _number(run: dict, name: str, form: str) -> str:
  value = run.get(name)
  return "–" if value is None else format(value, form)


def table(results: dict) -> str:
  """The comparison as aligned text, a line a mode."""
  columns = {
      "mode": lambda r: r["mode"],
      "seconds": lambda r: _number(r, "seconds_median", ".2f"),
      "speed-up": lambda r: _number(r, "speedup", ".2f"),
      "ideal": lambda r: _number(r, "ideal_speedup", ".2f"),
      "tokens": lambda r: _number(r, "model_tokens", ",d"),
      "temp MiB": lambda r: _number(
          {"mib": r.get("temp_bytes") and r["temp_bytes"] / 2**20}, "mib",
          ",.0f",
      ),
      "loss": lambda r: _number(r, "loss", ".6f"),
      "cosine": lambda r: _number(r, "gradient_cosine", ".6f"),
      "rel. error": lambda r: _number(r, "gradient_relative_error", ".1e"),
      "worst parameter": lambda r: (
          f"{r['worst_parameter']['relative_error']:.1e} "
          f"{r['worst_parameter']['name']}"
          if "worst_parameter" in r
          else "–"
      ),
  }
  rows = [list(columns)] + [
      [cell(run) for cell in columns.values()] for run in results["runs"]
  ]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = (
      "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time against its ideal, memory, and cosines by matrix."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  runs = results["runs"]
  modes = [run["mode"] for run in runs]
  colors = [_COLORS.get(mode, "#4060a0") for mode in modes]
  figure, (time, memory, cosine) = plt.subplots(
      1, 3, figsize=(13, 4.2), width_ratios=(1, 1, 2), layout="constrained"
  )
  time.bar(modes, [run["seconds_median"] for run in runs], color=colors)
  full = runs[0]
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
      name
      for name in full.get("per_matrix_cosine", {})
      if not name.endswith(("scale", "bias"))
  ]
  for run, color in zip(runs[1:], colors[1:], strict=True):
    values = [run["per_matrix_cosine"][name] for name in names]
    cosine.plot(values, range(len(names)), "o", color=color, label=run["mode"])
  cosine.set_yticks(
      range(len(names)),
      [name.removeprefix("layers/").removesuffix("/kernel") for name in names],
      fontsize=8,
  )
  cosine.set_title("cosine with the full gradient, by matrix", fontsize=9)
  if len(runs) > 1:
    cosine.legend(fontsize=8)
  shape = f"P={full['prefix_tokens']}, G={full['branches']}, "
  figure.suptitle(
      f"{shape}T={full['tail_tokens']}, {results['environment']['device_kind']}"
  )
  figure.savefig(path, dpi=130)
  plt.close(figure)
