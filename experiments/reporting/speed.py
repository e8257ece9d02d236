# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How fast a gradient is: over shapes, by parts of a step, at great length."""

import pathlib
import statistics

from experiments.reporting import plots
from experiments.reporting import tables

AXES = ("prefix_tokens", "branches", "tail_tokens")
_LETTERS = dict(zip(AXES, "PGT", strict=True))
_STYLES = {"keep": "-", "recompute": "--", "recompute_layers": ":"}
# Parts of a training step on one group, by mode.
STEP_PARTS = {
    "full": ("capture", "rollout", "whole sequences", "optimizer"),
    "exact": ("capture", "rollout", "replay", "prefix pass", "optimizer"),
    "stop": ("capture", "rollout", "replay", "optimizer"),
}


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
          "mode": mode, "activations": policy, "points": points,
          "fixed": dict(zip(others, fixed, strict=True)),
      }
      for (mode, policy, fixed), points in found.items() if len(points) > 1
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
            "axis": axis, "from": low, "to": high, **line["fixed"],
            "mode": line["mode"], "activations": line["activations"],
            "measured": measured, "analytic": analytic,
            "excess": measured / analytic,
        })
  return rows


def growth_table(results: dict) -> str:
  """Measured against analytic growth by axis and variant."""
  found = {}
  for row in results["growth"]:
    key = row["axis"], row["mode"], row["activations"]
    found.setdefault(key, []).append(row["excess"])
  return tables.markdown({
      "axis": lambda row: row[0][0].split("_")[0],
      "mode": lambda row: row[0][1], "activations": lambda row: row[0][2],
      "steps": lambda row: len(row[1]),
      "time over FLOPs, median": lambda row: f"{statistics.median(row[1]):.2f}",
      "least": lambda row: f"{min(row[1]):.2f}",
      "most": lambda row: f"{max(row[1]):.2f}",
  }, found.items())


def rates(results: dict) -> str:
  """A line a variant and prefix length, at the group of most cases."""
  usual = statistics.mode(shape_of(case)[1:] for case in results["cases"])
  rows = [
      case | run
      for case in results["cases"] if shape_of(case)[1:] == usual
      for run in case["runs"] if "left_out" not in run
  ]
  return tables.markdown({
      "P": "{prefix_tokens:,}", "mode": "{mode}",
      "activations": "{activations}", "s": "{seconds_median:.2f}",
      "useful GFLOP/s": lambda r: f"{r['useful_flops_per_second'] / 1e9:.0f}",
      "of a matrix product": "{share_of_matrix:.2f}",
      "temporaries": lambda r: f"{(r['temp_bytes'] or 0) / 2**20:,.0f} MiB",
  }, rows)


def table(results: dict) -> str:
  """Both tables of a grid of shapes."""
  return f"{rates(results)}\n{growth_table(results)}"


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: time, rate and memory along the longest lines."""
  cases = results["cases"]
  with plots.axes(path, 2, 2, size=(11, 8)) as (figure, axes):
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


def _longest(cases, axis):
  """The lines through the fixed values that most runs share."""
  found = lines(cases, axis)
  return [line for line in found if line["fixed"] == found[0]["fixed"]]


def _plot(axis, line, y, **options):
  x = [at for at, _ in line["points"]]
  axis.plot(x, y, color=plots.COLORS[line["mode"]], **options)


def _draw_time(axis, cases, along):
  """Median and range, and the analytic curve through the first point."""
  for line in _longest(cases, along):
    runs = [run for _, run in line["points"]]
    _plot(
        axis, line, [run["seconds_median"] for run in runs], marker="o",
        markersize=4, linestyle=_STYLES[line["activations"]],
        label=f"{line['mode']}, {line['activations']}",
    )
    axis.fill_between(
        [at for at, _ in line["points"]],
        [run["seconds_min"] for run in runs],
        [run["seconds_max"] for run in runs],
        color=plots.COLORS[line["mode"]], alpha=0.15, linewidth=0,
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


def parts(results: dict) -> str:
  """Seconds and operations of the parts of a step."""
  def operations(part):
    return f"{part['flops'] / 1e9:,.0f}" if part["flops"] else "–"

  return tables.markdown({
      "part": "{name}", "s": "{seconds:.2f}", "Gflop": operations,
      "Gflop/s": lambda part: tables.number(part, "gflops_per_second", ".0f"),
  }, [{"name": name, **part} for name, part in results["parts"].items()])


def less_time(results: dict) -> str:
  """Modes: less compute against less time."""
  return tables.markdown({
      "mode": "{name}", "gradient s": "{gradient_seconds:.2f}",
      "less compute": "{less_compute:.2f}×", "less time": "{less_time:.2f}×",
      "step s": "{step_seconds:.2f}", "faster step": "{step_speedup:.2f}×",
  }, [{"name": name, **one} for name, one in results["modes"].items()])


def breakdown(results: dict) -> str:
  """Both tables of the parts of a step."""
  return f"{parts(results)}\n{less_time(results)}"


def draw_breakdown(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: a bar a mode, a colour a part."""
  names = list(results["parts"])
  with plots.axes(path, size=(8, 3)) as (_, axis):
    bars = {}
    for place, (mode, mine) in enumerate(reversed(STEP_PARTS.items())):
      at = 0.0
      for name in mine:
        width = results["parts"][name]["seconds"]
        bars[name] = axis.barh(
            place, width, left=at, color=f"C{names.index(name)}"
        )
        at += width
      axis.text(at, place, f" {results['modes'][mode]['step_speedup']:.1f}×",
                va="center")
    axis.set_yticks(range(len(STEP_PARTS)), list(reversed(STEP_PARTS)))
    axis.legend(
        [bars[name] for name in names], names, loc="lower right", fontsize=8
    )
    axis.set_xlabel("seconds of a training step on one group")


def long_run(results: dict) -> str:
  """A table of one run over a very long prefix."""
  of, model = results["config"], results["config"]["model"]
  layers = ", ".join(model.get("layer_pattern", ("full",)))
  return tables.markdown({
      "P": f"{of['prefix']:,}", "mode": of["mode"],
      "layers": f"{model['num_layers']}: {layers}",
      "CPU time": lambda one: f"{one['cpu_seconds'] / 60:.1f} min",
      "resident at the peak":
          lambda one: f"{one['peak_rss_bytes'] / 2**30:.2f} GiB",
      "before": lambda one: f"{one['rss_before_bytes'] / 2**30:.2f} GiB",
      "gradient norm": "{gradient_norm:,.0f}",
  }, [results])


def attention(results: dict) -> str:
  """Runs by implementation of attention, and why others have no time."""
  def rate(one):
    return f"{one['flops_per_second'] / 1e12:.2f}" if "seconds" in one else "–"

  def temporaries(one):
    return f"{(one.get('temp_bytes') or 0) / 2**20:,.0f} MiB"

  def remark(one):
    return "; ".join(
        f"{key.replace('_', ' ')}: {one[key]}"
        for key in ("left_out", "out_of_memory", "failed") if key in one
    )

  of = results["environment"]["device_kind"]
  why_not = [f"{x}: {reason}" for x, reason in results["not_here"].items()]
  return "\n".join([
      f"{of}, {results['config']['model']['compute_dtype']}", *why_not,
      tables.markdown({
          "P": "{prefix_tokens:,}", "mode": "{mode}",
          "attention": "{attention}",
          "s": lambda one: tables.number(one, "seconds_median", ".3f"),
          "TFLOP/s": rate, "temporaries": temporaries,
          "error": lambda one: tables.number(one, "relative_error", ".1e"),
          "remark": remark,
      }, results["runs"]),
  ])
