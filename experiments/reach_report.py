# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Figure of the plans: memory against P, and what a larger group costs.

Beside them stands what LongStraw (arXiv 2607.14952) reports of its own system,
experiments/results/published.json: another model on other devices, so what may
be compared is how numbers grow, not the numbers.
"""

import dataclasses
import json
import pathlib
import types

import matplotlib

from branch_replay import plan
from experiments import plan as planner

PUBLISHED = pathlib.Path(__file__).parent / "results" / "published.json"
_COLORS = {"exact": "#1b7f5c", "stop": "#c8553d"}
_PREFIXES = tuple(2**power for power in range(15, 23))


def curve(flags: dict) -> list[tuple[int, float]]:
  """(P, planned GiB a device) of a plan's step at other lengths."""
  step = planner.step_of(types.SimpleNamespace(**flags))
  return [
      (
          prefix,
          plan.bytes_per_device(dataclasses.replace(step, prefix=prefix))[
              "total"
          ] / plan.GIB,
      )
      for prefix in _PREFIXES
  ]


def of_groups(results: dict, published: dict) -> dict[str, dict[str, float]]:
  """What G = 8 takes beyond G = 2, of our exact step and of theirs.

  Returns:
    "ours" and "theirs", each with gigabytes a device more, and a ratio: of
    analytic operations for ours, which was not run on such devices, and of
    seconds a step for theirs.
  """
  def ours(branches):
    return next(
        one for one in results["plans"]
        if one["mode"] == "exact" and one["branches"] == branches
        and one["prefix"] == published["positions"]
        and one["trainable"] == "all" and "compiled_bytes_per_device" in one
    )

  def seconds(branches):
    return next(
        step["seconds"] for step in published["steps"]
        if step["branches"] == branches
    )

  eight, two = ours(8), ours(2)
  peak = "compiled_bytes_per_device"
  return {
      "ours": {
          "gigabytes": (eight[peak] - two[peak]) / 1e9,
          "ratio": eight["flops"] / two["flops"],
      },
      "theirs": {
          "gigabytes": published["gigabytes_more_for_8_than_for_2"],
          "ratio": seconds(8) / seconds(2),
      },
  }


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes the figure from plan.json and published.json."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  published = json.loads(PUBLISHED.read_text())
  figure, (left, middle, right) = plt.subplots(
      1, 3, figsize=(11, 4), width_ratios=(2.4, 1, 1), layout="constrained"
  )
  _draw_memory(left, results, published)
  labels = "branch replay\n(exact)", "LongStraw\n(stop)"
  colors = _COLORS["exact"], "gray"
  groups = of_groups(results, published).values()
  middle.bar(labels, [one["gigabytes"] for one in groups], color=colors)
  middle.set_title("GB a device more\nfor G = 8 than for G = 2", fontsize=9)
  right.bar(labels, [one["ratio"] for one in groups], color=colors)
  right.set_title(
      "G = 8 over G = 2: ours operations,\ntheirs seconds", fontsize=9
  )
  for axis in (middle, right):
    axis.bar_label(axis.containers[0], fmt="%.2f", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _draw_memory(axis, results, published):
  drawn = set()
  for one in results["plans"]:
    mode, flags = one["mode"], one["flags"]
    if (one["trainable"], one["branches"]) != ("all", 8):
      continue
    if flags["accumulator_dtype"] != "bfloat16":
      continue
    if mode not in drawn:
      axis.plot(
          *zip(*curve(flags), strict=True), color=_COLORS[mode],
          label=f"{mode}, planned",
      )
      drawn.add(mode)
    if "compiled_bytes_per_device" in one:
      axis.plot(
          one["prefix"], one["compiled_bytes_per_device"] / plan.GIB, "o",
          color=_COLORS[mode],
      )
  axis.plot(
      published["positions"], published["device_bytes"] / plan.GIB, "v",
      color="gray", markersize=9,
      label="LongStraw (arXiv 2607.14952) ran;\nits devices have so much",
  )
  axis.set_xscale("log", base=2)
  axis.set_yscale("log", base=2)
  axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
  axis.set_xlabel("P, positions of the prefix (dots: compiled)")
  axis.set_title("GiB on each of eight devices, 8B, G = 8", fontsize=9)
  axis.legend(fontsize=8)
