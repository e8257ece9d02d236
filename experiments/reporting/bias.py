# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Distance of `stop` and of estimators from the exact gradient."""

import pathlib
import statistics

import numpy as np

from experiments.reporting import plots
from experiments.reporting import tables

MATRICES = {
    "query": "layers/project/query/kernel", "key": "layers/project/key/kernel",
    "value": "layers/project/value/kernel",
    "output": "layers/join/output/kernel", "gate": "layers/expand/gate/kernel",
    "up": "layers/expand/up/kernel", "down": "layers/contract/down/kernel",
    "embedding": "embed/table",
}
MEASURES = ("cosine", "relative_error", "norm_ratio")
LAWS = ("importance", "top")  # others of older results are not shown
_SHAPE = ("prompt_tokens", "tail_tokens", "branches", "advantages", "depth")
_AXES = {"prompt_tokens": "prompt", "tail_tokens": "T", "branches": "G"}
_BASE = {"prompt_tokens": 512, "tail_tokens": 32, "branches": 4}


def sixteenths(profile: list[float]) -> np.ndarray:
  """Shares of the squared cotangent in sixteenths of the prefix."""
  return np.asarray(profile).reshape(16, -1).sum(axis=1)


def _against_stop(pairs) -> dict:
  """Summary of an estimator, from pairs of its distances and those of stop."""
  errors = [(one["relative_error"], stop["relative_error"])
            for one, stop in pairs]
  return {
      **{name: tables.spread([one[name] for one, _ in pairs])
         for name in MEASURES},
      "median_relative_error": round(
          float(np.median([mine for mine, _ in errors])), 4
      ),
      "stop_relative_error": tables.spread([stop for _, stop in errors]),
      "closer_than_stop": round(
          float(np.mean([mine < stop for mine, stop in errors])), 3
      ),
  }


def _stop_of_shape(members: list[dict]) -> dict:
  """Means and spreads of stop over the cases of one shape."""
  def mean(rows, digits):
    return np.mean(rows, axis=0).round(digits).tolist()

  stops = [case["stop"] for case in members]
  return {
      **{name: tables.spread([stop[name] for stop in stops])
         for name in MEASURES},
      "adam_cosine": tables.spread([c["stop_adam_cosine"] for c in members]),
      "per_matrix_cosine": {
          name: tables.spread([one["per_matrix_cosine"][name] for one in stops])
          for name in stops[0]["per_matrix_cosine"]
      },
      "per_layer_cosine": {
          name: mean([one["per_layer_cosine"][name] for one in stops], 4)
          for name in stops[0]["per_layer_cosine"]
      },
      **{name: mean([case[name] for case in members], 5)
         for name in ("profile", "profile_tails")},
      "share_of_two_largest_sixteenths": tables.spread(
          [np.sort(sixteenths(c["profile"]))[-2:].sum() for c in members]
      ),
  }


def summarize(cases: list[dict]) -> dict:
  """Means and spreads over documents and seeds, shape by shape.

  Returns:
    {"stop": [...], "estimators": [...], "overall": [...], "cases": n,
    "dead_groups": n}; "overall" is of the estimators that every case has.
  """
  alive = [case for case in cases if not case.get("dead")]
  shapes, estimators, overall = {}, {}, {}
  for case in alive:
    shape = tuple(case[name] for name in _SHAPE)
    shapes.setdefault(shape, []).append(case)
    for one in case["estimators"]:
      law = one["law"], round(one["budget"], 2)
      estimators.setdefault((*shape, *law), []).append((one, case["stop"]))
      overall.setdefault(law, []).append((one, case["stop"]))
  studied = [case["stop"] for case in alive if case["estimators"]]
  whole = {("stop", 0.0): [(stop, stop) for stop in studied]} if studied else {}
  whole |= {
      law: pairs for law, pairs in sorted(overall.items())
      if len(pairs) == len(studied)
  }
  fields = (*_SHAPE, "law", "budget")
  return {
      "stop": [
          dict(zip(_SHAPE, shape, strict=True)) | _stop_of_shape(members)
          for shape, members in sorted(shapes.items(), key=str)
      ],
      "estimators": [
          {
              **dict(zip(fields, at, strict=True)), **_against_stop(pairs),
              "chunks_run": tables.spread(
                  [one["chunks_run"] for one, _ in pairs]
              ),
          }
          for at, pairs in sorted(estimators.items(), key=str)
      ],
      "overall": [
          {"law": law, "budget": budget, **_against_stop(pairs)}
          for (law, budget), pairs in whole.items()
      ],
      "cases": len(cases),
      "dead_groups": len(cases) - len(alive),
  }


def _kind(row: dict) -> str:
  if row["depth"] is not None:
    return f"fact at depth {row['depth']}"
  return row["advantages"]


_SHAPE_COLUMNS = {
    "prompt": "{prompt_tokens}", "T": "{tail_tokens}", "G": "{branches}",
    "advantages": _kind,
}


def _spread(field: str):
  return lambda row: tables.plus_minus(row[field])


def by_shape(results: dict) -> str:
  """Stop against exact by shape, mean and spread over groups."""
  def matrix(name):
    return lambda row: f"{row['per_matrix_cosine'][MATRICES[name]]['mean']:.2f}"

  rows = sorted(
      results["summary"]["stop"],
      key=lambda row: (
          row["depth"] is not None, row["advantages"], row["tail_tokens"] != 32,
          row["branches"] != 4, row["prompt_tokens"], row["tail_tokens"],
          row["branches"], row["depth"] or 0,
      ),
  )
  return tables.markdown(_SHAPE_COLUMNS | {
      "n": "{cosine[n]}",
      "cosine": _spread("cosine"),
      "relative error": _spread("relative_error"),
      "norm ratio": _spread("norm_ratio"),
      "key": matrix("key"), "value": matrix("value"),
      "Adam": "{adam_cosine[mean]:.2f}",
      "two largest of 16": _spread("share_of_two_largest_sixteenths"),
  }, rows)


def by_estimator(results: dict) -> str:
  """Estimators by prompt length: error, and how often it is below stop's."""
  rows = [
      row for row in results["summary"]["estimators"]
      if row["depth"] is None and row["advantages"] == "random"
      and (row["tail_tokens"], row["branches"]) == (32, 4)
      and row["law"] in LAWS
  ]
  rows.sort(key=lambda row: (row["prompt_tokens"], row["law"], row["budget"]))
  return tables.markdown(_SHAPE_COLUMNS | {
      "n": "{relative_error[n]}", "law": "{law}",
      "chunks of 16": "{chunks_run[mean]:.1f}",
      "relative error": _spread("relative_error"),
      "stop": "{stop_relative_error[mean]:.2f}",
      "closer than stop": "{closer_than_stop:.0%}",
  }, rows)


def over_shapes(results: dict) -> str:
  """Estimators over all shapes together."""
  return tables.markdown({
      "estimator": "{law}", "chunks of 16": "{budget:.1f}",
      "n": "{relative_error[n]}",
      "relative error": _spread("relative_error"),
      "median": "{median_relative_error:.2f}",
      "cosine": _spread("cosine"),
      "closer than stop": lambda row: (
          "–" if row["law"] == "stop" else f"{row['closer_than_stop']:.0%}"
      ),
  }, [
      row for row in results["summary"]["overall"]
      if row["law"] in ("stop", *LAWS)
  ])


def table(results: dict) -> str:
  """All tables of the sweep."""
  return "\n".join((
      by_shape(results), by_estimator(results), over_shapes(results)
  ))


def groups(results: dict) -> str:
  """Estimators on single groups: mean, spread and extremes."""
  rows = []
  expected = {"stop": 0.0} | results["config"]["estimators"]
  for name, chunks in expected.items():
    far = [group["estimators"][name] for group in results["groups"]
           if not group.get("dead")]
    rows.append({
        "name": name, "chunks": chunks,
        **{measure: tables.spread([one[measure] for one in far])
           for measure in MEASURES},
    })
  return tables.markdown({
      "estimator": "{name}", "chunks of 16": "{chunks:.1f}",
      "relative error": _spread("relative_error"),
      "range": "{relative_error[min]:.2f} to {relative_error[max]:.2f}",
      "cosine": _spread("cosine"),
  }, rows)


def sums(results: dict) -> str:
  """Estimators on sums of groups: relative error, cosine of Adam."""
  def far(name):
    def cell(row):
      one = row["estimators"][name]
      return f"{one['relative_error']:.2f}, {one['adam_cosine']:.2f}"
    return cell

  names = ("stop", *results["config"]["estimators"])
  return tables.markdown(
      {"groups": "{n}"} | {name: far(name) for name in names}, results["sums"]
  )


def training(results: dict) -> str:
  """The bias in a model that is trained, means over training seeds."""
  rows = [
      [record for record in results["records"] if record["step"] == step]
      for step in results["config"]["steps"]
  ]

  def mean(value):
    return lambda row: f"{statistics.mean(map(value, row)):.2f}"

  def error(law):
    return mean(lambda record: next(
        one["relative_error"]["mean"] for one in record["estimators"]
        if one["law"] == law
    ))

  def share(part):
    return mean(lambda record: record["shares"]["profile"][part]["mean"])

  return tables.markdown({
      "step": lambda row: row[0]["step"],
      "nats a byte": mean(lambda record: record["validation_loss"]),
      "stop: cosine": mean(lambda record: record["stop"]["cosine"]["mean"]),
      "stop": mean(lambda record: record["stop"]["relative_error"]["mean"]),
      **{law: error(law) for law in LAWS},
      "first 1/16": share("first"), "last 1/16": share("last"),
  }, rows)


def along(results: dict, axis: str) -> list[dict]:
  """Rows of the sweep along one of `_AXES`, the others at their base.

  Those with random advantages, in the order of the axis.
  """
  fixed = {name: value for name, value in _BASE.items() if name != axis}
  rows = [
      row for row in results["summary"]["stop"]
      if row["advantages"] == "random" and row["depth"] is None
      and all(row[name] == value for name, value in fixed.items())
  ]
  return sorted(rows, key=lambda row: row[axis])


def _error_bars(axis, x, spreads, **options):
  axis.errorbar(
      x, [one["mean"] for one in spreads], [one["std"] or 0 for one in spreads],
      **options,
  )


def draw_matrices(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: the cosine of every kind of matrix along each axis."""
  with plots.axes(path, 1, 3, size=(11, 3.8), sharey=True) as (figure, axes):
    for plot, (axis, letter) in zip(axes, _AXES.items(), strict=True):
      rows = along(results, axis)
      for name, parameter in MATRICES.items():
        _error_bars(
            plot, [row[axis] for row in rows],
            [row["per_matrix_cosine"][parameter] for row in rows],
            marker=".", capsize=2, label=name,
        )
      at = ", ".join(
          f"{_AXES[other]} = {_BASE[other]}" for other in _AXES if other != axis
      )
      plot.set_xscale("log", base=2)
      plot.set_xlabel(f"{letter} ({at})")
    axes[0].set_ylabel("cosine of stop with exact (mean, std)")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", fontsize=8)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: cosines, layers, profile, and error against cost."""
  base, estimators = (
      [
          row for row in results["summary"][name]
          if (row["tail_tokens"], row["branches"], row["advantages"])
          == (32, 4, "random")
      ]
      for name in ("stop", "estimators")
  )
  base.sort(key=lambda row: row["prompt_tokens"])
  with plots.axes(path, 2, 2, size=(11, 8)) as (_, axes):
    _draw_lengths(axes[0, 0], base)
    if base:
      _draw_layers(axes[0, 1], base[-1])
      _draw_profile(axes[1, 0], base)
    _draw_estimators(axes[1, 1], estimators)


def _draw_lengths(axis, base):
  lengths = [row["prompt_tokens"] for row in base]
  for name, label in (
      ("cosine", "gradient"), ("adam_cosine", "first Adam step")
  ):
    _error_bars(
        axis, lengths, [row[name] for row in base], marker="o", capsize=3,
        label=label,
    )
  for name in ("key", "value"):
    axis.plot(
        lengths,
        [row["per_matrix_cosine"][MATRICES[name]]["mean"] for row in base],
        "--", marker=".", label=f"{name} projection",
    )
  axis.set_xscale("log", base=2)
  axis.set_xlabel("prompt tokens")
  axis.set_title("cosine of stop with exact (mean, std)", fontsize=10)
  axis.legend(fontsize=8)


def _draw_layers(axis, row):
  for matrix in MATRICES.values():
    if matrix in row["per_layer_cosine"]:
      label = matrix.removeprefix("layers/").removesuffix("/kernel")
      axis.plot(row["per_layer_cosine"][matrix], label=label)
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
  for law in LAWS:
    chosen = [
        row for row in rows
        if row["law"] == law and row["prompt_tokens"] == longest
    ]
    _error_bars(
        axis, [row["chunks_run"]["mean"] for row in chosen],
        [row["relative_error"] for row in chosen], marker="o", capsize=3,
        label=law,
    )
    if chosen:
      axis.axhline(
          chosen[0]["stop_relative_error"]["mean"], color="gray", linestyle=":"
      )
  axis.set_xlabel("chunks run, of 16")
  axis.set_title(f"relative error, P={longest} (dotted: stop)", fontsize=10)
  axis.legend(fontsize=8)


def draw_sums(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: each measure of the sums against their size."""
  titles = {
      "cosine": "cosine of the sum with exact's",
      "relative_error": "relative error of the sum",
      "adam_cosine": "cosine of Adam's direction with exact's",
      "error_coherence": "coherence of errors: 1 independent, n equal",
  }
  of = results["sums"]
  counts = [row["n"] for row in of]
  with plots.axes(path, 2, 2, size=(11, 8)) as (figure, axes):
    for axis, (measure, title) in zip(axes.flat, titles.items(), strict=True):
      for name in of[0]["estimators"]:
        axis.plot(
            counts, [row["estimators"][name][measure] for row in of],
            marker="o", label=name,
        )
      axis.set_xscale("log", base=2)
      axis.set_xticks(counts, counts)
      axis.set_xlabel("groups added")
      axis.set_title(title, fontsize=10)
    axes[1, 1].plot(
        counts, [row["exact_coherence"] for row in of], "k:",
        label="the exact gradients",
    )
    axes[1, 1].legend(fontsize=8)
    figure.suptitle(
        f"{results['config']['advantages']} advantages", fontsize=10
    )


def draw_training(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: loss, distance of stop, matrices, cotangent, by step."""
  def of_stop(measure):
    return lambda row: row["stop"][measure]["mean"]

  def of_matrix(name):
    return lambda row: row["stop"]["per_matrix_cosine"][MATRICES[name]]["mean"]

  def of_share(part):
    return lambda row: row["shares"]["profile"][part]["mean"]

  panels = {
      "validation loss, nats a byte": {
          "validation": lambda row: row["validation_loss"],
      },
      "stop against exact, mean over groups": {
          name: of_stop(name) for name in (*MEASURES, "adam_cosine")
      },
      "cosine of stop with exact, by matrix": {
          name: of_matrix(name) for name in ("query", "key", "value")
      },
      "share of the squared cotangent, sixteenths of the prefix": {
          part: of_share(part) for part in ("first", "last", "two_largest")
      },
  }
  seeds = sorted({row["train_seed"] for row in results["records"]})
  steps = results["config"]["steps"]
  with plots.axes(path, 2, 2, size=(11, 8)) as (_, axes):
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=True):
      for color, (name, value) in enumerate(lines.items()):
        for seed in seeds:
          rows = [r for r in results["records"] if r["train_seed"] == seed]
          axis.plot(
              [row["step"] for row in rows], [value(row) for row in rows],
              marker="o", color=f"C{color}", alpha=0.7,
              label=name if seed == seeds[0] else None,
          )
      axis.set_xscale("symlog", linthresh=30)
      axis.set_xticks(steps, steps)
      axis.set_xlabel("training step (a line a training seed)")
      axis.set_title(title, fontsize=10)
      axis.legend(fontsize=8)
