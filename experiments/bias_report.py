# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Summary, table and figures of the bias study, from its cases alone."""

import pathlib

import matplotlib
import numpy as np

_PARTS = (
    "project/query", "project/key", "project/value", "join/output",
    "expand/gate", "expand/up", "contract/down",
)
_SHAPE = ("prompt_tokens", "tail_tokens", "branches", "advantages", "depth")


def spread(values) -> dict:
  values = np.asarray(values, float)
  return {
      "mean": round(float(values.mean()), 4),
      "std": round(float(values.std(ddof=1)), 4) if len(values) > 1 else None,
      "min": round(float(values.min()), 4),
      "max": round(float(values.max()), 4),
      "n": len(values),
  }


def summarize(cases: list[dict]) -> dict:
  """Means and spreads over documents and seeds, shape by shape.

  Args:
    cases: lines of cases.jsonl.

  Returns:
    {"stop": [...], "estimators": [...], "overall": [...], "cases": n,
    "dead_groups": n}.
  """
  shapes, estimators = {}, {}
  for case in cases:
    shape = tuple(case[name] for name in _SHAPE)
    if not case.get("dead"):
      shapes.setdefault(shape, []).append(case)
  rows = []
  for shape, members in sorted(shapes.items(), key=str):
    row = dict(zip(_SHAPE, shape, strict=True))
    stops = [case["stop"] for case in members]
    for name in ("cosine", "relative_error", "norm_ratio"):
      row[name] = spread([stop[name] for stop in stops])
    row["adam_cosine"] = spread([c["stop_adam_cosine"] for c in members])
    row["per_matrix_cosine"] = {
        name: spread([stop["per_matrix_cosine"][name] for stop in stops])
        for name in stops[0]["per_matrix_cosine"]
    }
    row["per_layer_cosine"] = {
        name: np.mean(
            [stop["per_layer_cosine"][name] for stop in stops], axis=0
        ).round(4).tolist()
        for name in stops[0]["per_layer_cosine"]
    }
    for name in ("profile", "profile_tails"):
      row[name] = np.mean(
          [case[name] for case in members], axis=0
      ).round(5).tolist()
    sixteenths = [
        np.asarray(case["profile"]).reshape(16, -1).sum(axis=1)
        for case in members
    ]
    row["share_of_two_largest_sixteenths"] = spread(
        [np.sort(share)[-2:].sum() for share in sixteenths]
    )
    rows.append(row)
    for case in members:
      for one in case["estimators"]:
        at = (*shape, one["law"], round(one["budget"], 2))
        estimators.setdefault(at, []).append((one, case["stop"]))
  return {
      "stop": rows,
      "estimators": [
          {
              **dict(zip(_SHAPE, at[:5], strict=True)),
              "law": at[5], "budget": at[6],
              **{
                  name: spread([one[name] for one, _ in members])
                  for name in (
                      "cosine", "relative_error", "norm_ratio", "chunks_run")
              },
              "stop_relative_error": spread(
                  [stop["relative_error"] for _, stop in members]
              ),
              "closer_than_stop": round(float(np.mean([
                  one["relative_error"] < stop["relative_error"]
                  for one, stop in members
              ])), 3),
          }
          for at, members in sorted(estimators.items(), key=str)
      ],
      "overall": overall(cases),
      "cases": len(cases),
      "dead_groups": sum(bool(case.get("dead")) for case in cases),
  }


def overall(cases: list[dict]) -> list[dict]:
  """Estimators that every case has, over all shapes together, and stop."""
  cases = [c for c in cases if not c.get("dead") and c["estimators"]]
  found = {}
  for case in cases:
    for one in case["estimators"]:
      at = one["law"], round(one["budget"], 2)
      found.setdefault(at, []).append((one, case["stop"]))
  rows = [("stop", 0.0, [(case["stop"], case["stop"]) for case in cases])]
  rows += [
      (*at, members) for at, members in sorted(found.items())
      if len(members) == len(cases)
  ]
  return [
      {
          "law": law, "budget": budget,
          "relative_error": spread([one["relative_error"] for one, _ in pairs]),
          "median_relative_error": round(float(np.median(
              [one["relative_error"] for one, _ in pairs]
          )), 4),
          "cosine": spread([one["cosine"] for one, _ in pairs]),
          "closer_than_stop": round(float(np.mean([
              one["relative_error"] < stop["relative_error"]
              for one, stop in pairs
          ])), 3),
      }
      for law, budget, pairs in rows if pairs
  ]


def table(results: dict) -> str:
  """Cosines of stop and errors of estimators, as text."""
  summary, lines = results["summary"], []
  lines.append("stop:  P  T  G  advantages  cosine  rel. error  key  value")
  for row in summary["stop"]:
    key, value = (
        row["per_matrix_cosine"][f"layers/project/{name}/kernel"]["mean"]
        for name in ("key", "value")
    )
    depth = "" if row["depth"] is None else f" at {row['depth']}"
    lines.append(
        f"  {row['prompt_tokens']} {row['tail_tokens']} {row['branches']} "
        f"{row['advantages']}{depth}: {row['cosine']['mean']:.3f} "
        f"± {row['cosine']['std'] or 0:.3f} (n={row['cosine']['n']})  "
        f"{row['relative_error']['mean']:.3f}  {key:.2f}  {value:.2f}"
    )
  lines.append(
      "estimators:  P  T  G  advantages  law  budget  error  (stop)  cosine"
  )
  for row in summary["estimators"]:
    lines.append(
        f"  {row['prompt_tokens']} {row['tail_tokens']} {row['branches']} "
        f"{row['advantages']} {row['law']} "
        f"{row['budget']}: {row['relative_error']['mean']:.3f} "
        f"± {row['relative_error']['std'] or 0:.3f}  "
        f"({row['stop_relative_error']['mean']:.3f})  "
        f"{row['cosine']['mean']:.3f}, ran {row['chunks_run']['mean']:.1f}"
    )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: cosines, layers, profile, and error against cost."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  summary = results["summary"]
  base, estimators = (
      [
          row for row in summary[name]
          if (row["tail_tokens"], row["branches"], row["advantages"])
          == (32, 4, "random")
      ]
      for name in ("stop", "estimators")
  )
  base.sort(key=lambda row: row["prompt_tokens"])
  figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
  _draw_lengths(axes[0, 0], base)
  if base:
    _draw_layers(axes[0, 1], base[-1])
    _draw_profile(axes[1, 0], base)
  _draw_estimators(axes[1, 1], estimators)
  figure.savefig(path, dpi=120)
  plt.close(figure)


def _draw_lengths(axis, base):
  lengths = [row["prompt_tokens"] for row in base]
  for name in ("cosine", "adam_cosine"):
    axis.errorbar(
        lengths, [row[name]["mean"] for row in base],
        [row[name]["std"] or 0 for row in base], marker="o", capsize=3,
        label={"cosine": "gradient", "adam_cosine": "first Adam step"}[name],
    )
  for name in ("key", "value"):
    axis.plot(
        lengths,
        [r["per_matrix_cosine"][f"layers/project/{name}/kernel"]["mean"]
         for r in base],
        "--", marker=".", label=f"{name} projection",
    )
  axis.set_xscale("log", base=2)
  axis.set_xlabel("prompt tokens")
  axis.set_title("cosine of stop with exact (mean, std)", fontsize=10)
  axis.legend(fontsize=8)


def _draw_layers(axis, row):
  for part in _PARTS:
    axis.plot(row["per_layer_cosine"][f"layers/{part}/kernel"], label=part)
  axis.set_xlabel("layer")
  axis.set_title(f"the same by layer, P={row['prompt_tokens']}", fontsize=10)
  axis.legend(fontsize=7)


def _draw_profile(axis, base):
  for row in base:
    bins = len(row["profile"])
    axis.semilogy(
        np.arange(bins) / bins, row["profile"], drawstyle="steps-post",
        label=f"P={row['prompt_tokens']}",
    )
  axis.set_xlabel("position in the prefix")
  axis.set_title("share of the squared cotangent, 1/64 each", fontsize=10)
  axis.legend(fontsize=8)


def _draw_estimators(axis, rows):
  longest = max((row["prompt_tokens"] for row in rows), default=0)
  for law in ("importance", "uniform", "top"):
    chosen = [
        row for row in rows
        if row["law"] == law and row["prompt_tokens"] == longest
    ]
    axis.errorbar(
        [row["chunks_run"]["mean"] for row in chosen],
        [row["relative_error"]["mean"] for row in chosen],
        [row["relative_error"]["std"] or 0 for row in chosen],
        marker="o", capsize=3, label=law,
    )
    if chosen:
      axis.axhline(
          chosen[0]["stop_relative_error"]["mean"], color="gray",
          linestyle=":",
      )
  axis.set_xlabel("chunks run, of 16")
  axis.set_title(f"relative error, P={longest} (dotted: stop)", fontsize=10)
  axis.legend(fontsize=8)
