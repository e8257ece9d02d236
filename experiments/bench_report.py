# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Growth, table and figure of a benchmark, from its cases alone."""

import pathlib

import matplotlib

AXES = ("prefix_tokens", "branches", "tail_tokens")
_LETTERS = dict(zip(AXES, "PGT", strict=True))
_COLORS = {
    "full": "#555555", "exact": "#1b7f5c", "stop": "#c8553d",
    "sampled": "#4060a0",
}
_STYLES = {"keep": "-", "recompute": "--", "recompute_layers": ":"}


def shape_of(case: dict) -> tuple[int, int, int]:
  """P, G, T of a case."""
  return tuple(case[axis] for axis in AXES)


def lines(cases: list[dict], axis: str) -> list[dict]:
  """Runs of one variant along one axis, the other two held fixed.

  Args:
    cases: of results.json.
    axis: one of `AXES`.

  Returns:
    {"mode", "activations", "fixed", "points"}, the longest first; points are
    (value on the axis, run), two or more.
  """
  found = {}
  others = [other for other in AXES if other != axis]
  for case in sorted(cases, key=shape_of):
    for run in case["runs"]:
      if "left_out" not in run:
        fixed = tuple(case[other] for other in others)
        key = (run["mode"], run["activations"], fixed)
        found.setdefault(key, []).append((case[axis], run))
  result = [
      {
          "mode": mode,
          "activations": policy,
          "fixed": dict(zip(others, fixed, strict=True)),
          "points": points,
      }
      for (mode, policy, fixed), points in found.items()
      if len(points) > 1
  ]
  return sorted(result, key=lambda line: -len(line["points"]))


def growth(cases: list[dict]) -> list[dict]:
  """Measured against analytic growth from each point of an axis to the next.

  `measured` and `analytic` are ratios of median times and of FLOPs as they are
  run, `excess` is their quotient: 1 where time follows the formula.
  """
  rows = []
  for axis in AXES:
    for line in lines(cases, axis):
      points = line["points"]
      for (low, before), (high, after) in zip(points, points[1:], strict=False):
        measured = after["seconds_median"] / before["seconds_median"]
        analytic = after["flops"] / before["flops"]
        rows.append({
            "axis": axis,
            "from": low,
            "to": high,
            **line["fixed"],
            "mode": line["mode"],
            "activations": line["activations"],
            "measured": measured,
            "analytic": analytic,
            "excess": measured / analytic,
        })
  return rows


def _aligned(rows: list[list[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
      "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
  )


def table(results: dict) -> str:
  """The runs, a line each, and the growth from shape to shape."""
  rows = [[
      "P", "G", "T", "mode", "activations", "seconds", "min", "max",
      "useful GFLOP/s", "of matrix", "temp MiB",
  ]]
  for case in results["cases"]:
    shape = list(map(str, shape_of(case)))
    for run in case["runs"]:
      row = [*shape, run["mode"], run["activations"]]
      if "left_out" in run:
        rows.append([*row, "–", "", "", "", "", run["left_out"]])
        continue
      rows.append([
          *row,
          *(f"{run[f'seconds_{name}']:.3f}" for name in ("median", "min",
                                                         "max")),
          f"{run['useful_flops_per_second'] / 1e9:.1f}",
          f"{run['share_of_matrix']:.2f}",
          "–" if run["temp_bytes"] is None
          else f"{run['temp_bytes'] / 2**20:,.0f}",
      ])
  steps = [["growth", "at", "mode", "activations", "time", "FLOPs", "excess"]]
  for row in results["growth"]:
    letter = _LETTERS[row["axis"]]
    at = [
        f"{_LETTERS[axis]}={row[axis]}" for axis in AXES if axis in row
    ]
    steps.append([
        f"{letter} {row['from']}→{row['to']}", " ".join(at), row["mode"],
        row["activations"], f"{row['measured']:.2f}×",
        f"{row['analytic']:.2f}×", f"{row['excess']:.2f}",
    ])
  return f"{_aligned(rows)}\n\n{_aligned(steps)}"


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time, rate and memory along the longest lines."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
  cases = results["cases"]
  _draw_time(axes[0, 0], cases, "prefix_tokens")
  _draw_time(axes[0, 1], cases, "branches")
  _draw_line(
      axes[1, 0], cases, lambda run: run["share_of_matrix"],
      "useful FLOP/s, share of a large matrix product's",
  )
  _draw_line(
      axes[1, 1], cases, lambda run: (run["temp_bytes"] or 0) / 2**20,
      "compiled temporaries, MiB",
  )
  axes[1, 1].set_yscale("log")
  figure.suptitle(results["environment"]["device_kind"])
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _longest(cases, axis):
  """The lines through the fixed values that most runs share."""
  found = lines(cases, axis)
  return [line for line in found if line["fixed"] == found[0]["fixed"]]


def _plot(axis, line, y, **options):
  x = [at for at, _ in line["points"]]
  axis.plot(x, y, color=_COLORS[line["mode"]], **options)


def _draw_time(axis, cases, along):
  """Median and range, and the analytic curve through the first point."""
  for line in _longest(cases, along):
    runs = [run for _, run in line["points"]]
    name = f"{line['mode']}, {line['activations']}"
    style = _STYLES[line["activations"]]
    _plot(
        axis, line, [run["seconds_median"] for run in runs], linestyle=style,
        marker="o", markersize=4, label=name,
    )
    axis.fill_between(
        [at for at, _ in line["points"]],
        [run["seconds_min"] for run in runs],
        [run["seconds_max"] for run in runs],
        color=_COLORS[line["mode"]], alpha=0.15, linewidth=0,
    )
    scale = runs[0]["seconds_median"] / runs[0]["flops"]
    _plot(
        axis, line, [scale * run["flops"] for run in runs], linewidth=0.7,
        alpha=0.7,
    )
  _finish(axis, cases, along, "seconds (thin: by FLOPs from the first point)")
  axis.set_yscale("log")
  if axis.lines:
    axis.legend(fontsize=7)


def _draw_line(axis, cases, value, title):
  for line in _longest(cases, "prefix_tokens"):
    _plot(
        axis, line, [value(run) for _, run in line["points"]], marker="o",
        markersize=4, linestyle=_STYLES[line["activations"]],
    )
  _finish(axis, cases, "prefix_tokens", title)


def _finish(axis, cases, along, title):
  found = _longest(cases, along)
  fixed = found[0]["fixed"] if found else {}
  at = ", ".join(f"{_LETTERS[name]}={value}" for name, value in fixed.items())
  axis.set_xscale("log", base=2)
  axis.set_xlabel(f"{_LETTERS[along]} ({at})")
  axis.set_title(title, fontsize=10)
