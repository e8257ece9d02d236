# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Redraws the README's tables from experiments/results.

  python -m experiments.readme
"""

import json
import pathlib
import re

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def comparison(results: dict) -> str:
  """A comparison as a Markdown table, a line a mode."""
  head = (
      "| mode | s | speed-up | ideal | temporaries | cosine | relative error "
      "| worst parameter |\n|---|---|---|---|---|---|---|---|\n"
  )
  lines = [
      f"| {run['mode']} | {run['seconds_median']:.2f} "
      f"| {run['speedup']:.2f}× | {run['ideal_speedup']:.2f}× "
      f"| {run['temp_bytes'] / 2**20:,.0f} MiB "
      f"| {run['gradient_cosine']:.4f} "
      f"| {run['gradient_relative_error']:.1e} "
      f"| {run['worst_parameter']['relative_error']:.1e} |\n"
      for run in results["runs"]
  ]
  return head + "".join(lines)


def render(text: str) -> str:
  """The text with every marked table drawn from its result file."""
  def table(match):
    file = _ROOT / "experiments" / "results" / f"{match[1]}.json"
    drawn = comparison(json.loads(file.read_text()))
    return f"<!-- table: {match[1]} -->\n{drawn}<!-- end -->"

  return _TABLE.sub(table, text)


if __name__ == "__main__":
  readme = _ROOT / "README.md"
  readme.write_text(render(readme.read_text()))
  print(f"Wrote {readme}")
