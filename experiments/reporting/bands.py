# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Distance of `banded` from the exact gradient, by band and prefix length."""

from experiments.reporting import bias
from experiments.reporting import tables

_MEASURES = ("relative_error", "cosine", "norm_ratio")


def summarize(cases: list[dict]) -> list[dict]:
  """Means and spreads over groups, by kind of prompt, its length and the band.

  Returns:
    Rows; `window` and `sinks` are None for stop.
  """
  found = {}
  for case in cases:
    stop = case["stop"] | {"window": None, "sinks": None}
    for far in (stop, *case["bands"]):
      at = case["kind"], case["prompt_tokens"], far["window"], far["sinks"]
      found.setdefault(at, []).append(far)
  names = "kind", "prompt_tokens", "window", "sinks"
  return [
      dict(zip(names, at, strict=True)) | {"groups": len(rows)} | {
          name: tables.spread([row[name] for row in rows])
          for name in _MEASURES
      } | {
          "per_matrix_cosine": {
              name: tables.spread(
                  [row["per_matrix_cosine"][of] for row in rows]
              )
              for name, of in bias.MATRICES.items()
              if of in rows[0]["per_matrix_cosine"]
          }
      }
      for at, rows in found.items()
  ]


def _band(row: dict) -> str:
  if row["window"] is None:
    return "`stop`"
  return f"W = {row['window']}, S = {row['sinks']}"


def table(results: dict) -> str:
  """Relative error (cosine) by band, a column for each length and kind."""
  rows = results["summary"]
  shapes = list(dict.fromkeys(
      (row["kind"], row["prompt_tokens"], row["groups"]) for row in rows
  ))
  bands = list(dict.fromkeys(_band(row) for row in rows))
  cells = {
      (_band(row), row["kind"], row["prompt_tokens"]):
      f"{row['relative_error']['mean']:.3f} ({row['cosine']['mean']:.3f})"
      for row in rows
  }
  heads = ["band", *(f"{kind}, P = {tokens}, {groups} groups"
                     for kind, tokens, groups in shapes)]
  lines = [heads, ["---"] * len(heads)]
  for band in bands:
    lines.append([band, *(
        cells.get((band, kind, tokens), "–") for kind, tokens, _ in shapes
    )])
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)
