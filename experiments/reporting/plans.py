# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of training steps: memory of a device by P, and by G.

Beside them stands what LongStraw (arXiv 2607.14952) reports of its own system,
experiments/results/published.json: another model on other devices, so what may
be compared is how numbers grow, not the numbers.
"""

import dataclasses
import pathlib
import types

import matplotlib

from branch_replay.planning import plan
from experiments import plan as planner
from experiments.reporting import plots
from experiments.reporting import record
from experiments.reporting import tables

_PREFIXES = tuple(2**power for power in range(15, 23))


def _gib(size: float, unit: str = "") -> str:
  return f"{size / plan.GIB:.1f}{unit}"


def _compiled(one: dict, unit: str = "") -> str:
  """The compiler's peak."""
  size = one.get("compiled_bytes_per_device")
  return _gib(size, unit) if size else "–"


def _trains(one: dict) -> str:
  rank = one["flags"]["adapter_rank"]
  return f"adapters, rank {rank}" if rank else "all"


def table(results: dict) -> str:
  """Plans of the 8B decoder, those that were compiled first."""
  def kernel(one):
    return "loops" if one["flags"]["attention"] == "loops" else "kernel"

  def accumulator(one):
    return "–" if one["mode"] == "stop" else one["flags"]["accumulator_dtype"]

  return tables.markdown({
      "mode": "{mode}", "trains": _trains, "parameters": "{flags[param_dtype]}",
      "attention": kernel, "G": "{branches}", "P": "{prefix:,}",
      "accumulator": accumulator,
      "planned": lambda one: _gib(one["bytes_per_device"]["total"], " GiB"),
      "compiled": lambda one: _compiled(one, " GiB"),
      "longest P at 88 GiB": "{longest_prefix:,}",
  }, [one for one in results["plans"] if one["model"] == "qwen3-8b"])


def hybrid(results: dict) -> str:
  """Plans of the 27B hybrid: what each part of a device's memory holds."""
  def size(*kinds):
    return lambda one: _gib(sum(one["bytes_per_device"][x] for x in kinds))

  mine = [one for one in results["plans"] if one["model"] == "qwen3.5-27b"]
  mine.sort(key=lambda one: (
      one["prefix"], one["flags"]["adapter_rank"],
      one["flags"]["param_dtype"], one["mode"],
  ))
  return tables.markdown({
      "mode": "{mode}", "trains": _trains, "parameters": "{flags[param_dtype]}",
      "P": "{prefix:,}",
      "weights": size("parameters", "gradients", "optimizer"),
      **{x: size(x) for x in ("state", "accumulator", "kept", "working")},
      "planned": size("total"), "compiled": _compiled,
      "fits 88 GiB": lambda one: "yes" if one["fits"] else "no",
      "longest P that does": "{longest_prefix:,}",
  }, mine)


def of_groups(results: dict, published: dict) -> dict[str, dict[str, float]]:
  """Cost of G = 8 beyond that of G = 2, for our exact step and for theirs.

  Returns:
    "ours" and "theirs", each with gigabytes a device more, and a ratio: of
    analytic operations for ours, which was not run on such devices, and of
    seconds a step for theirs.
  """
  eight, two = (
      next(
          one for one in results["plans"]
          if one["mode"] == "exact" and one["branches"] == branches
          and one["prefix"] == published["positions"]
          and one["trainable"] == "all" and "compiled_bytes_per_device" in one
      )
      for branches in (8, 2)
  )
  seconds = {one["branches"]: one["seconds"] for one in published["steps"]}
  peak = "compiled_bytes_per_device"
  return {
      "ours": {
          "gigabytes": (eight[peak] - two[peak]) / 1e9,
          "ratio": eight["flops"] / two["flops"],
      },
      "theirs": {
          "gigabytes": published["gigabytes_more_for_8_than_for_2"],
          "ratio": seconds[8] / seconds[2],
      },
  }


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes the figure from plan.json and published.json."""
  published = record.committed("published")
  labels = "branch replay\n(exact)", "LongStraw\n(stop)"
  colors = plots.COLORS["exact"], "gray"
  groups = of_groups(results, published).values()
  with plots.axes(
      path, 1, 3, size=(11, 4), width_ratios=(2.4, 1, 1)
  ) as (_, (left, middle, right)):
    _draw_memory(left, results, published)
    middle.bar(labels, [one["gigabytes"] for one in groups], color=colors)
    middle.set_title("GB a device more\nfor G = 8 than for G = 2", fontsize=9)
    right.bar(labels, [one["ratio"] for one in groups], color=colors)
    right.set_title(
        "G = 8 over G = 2: ours operations,\ntheirs seconds", fontsize=9
    )
    for axis in (middle, right):
      axis.bar_label(axis.containers[0], fmt="%.2f", fontsize=8)
      axis.tick_params(axis="x", labelsize=7)


def _draw_memory(axis, results, published):
  drawn = set()
  for one in results["plans"]:
    mode, flags = one["mode"], one["flags"]
    case = one["model"], one["trainable"], one["branches"]
    if case != ("qwen3-8b", "all", 8):
      continue
    if flags["accumulator_dtype"] != "bfloat16":
      continue
    if mode not in drawn:
      step = planner.step_of(types.SimpleNamespace(**flags))
      planned = [
          plan.bytes_per_device(dataclasses.replace(step, prefix=prefix))[
              "total"
          ] / plan.GIB
          for prefix in _PREFIXES
      ]
      axis.plot(
          _PREFIXES, planned, color=plots.COLORS[mode], label=f"{mode}, planned"
      )
      drawn.add(mode)
    if "compiled_bytes_per_device" in one:
      axis.plot(
          one["prefix"], one["compiled_bytes_per_device"] / plan.GIB, "o",
          color=plots.COLORS[mode],
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
