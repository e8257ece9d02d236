# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from results."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import numpy as np


def markdown(
    columns: dict[str, Callable[[Any], str] | str], rows: Iterable
) -> str:
  """A table, a line a row, ending in a newline.

  Args:
    columns: by their heads, what makes a cell of a row: a function, or a
      format string of the row's fields, as in "{seconds:.2f} s".
    rows: dicts where a column is a format string, anything otherwise.
  """
  def cell(column, row):
    made = column(row) if callable(column) else column.format_map(row)
    return str(made)

  lines = [list(columns)] + [
      [cell(column, row) for column in columns.values()] for row in rows
  ]
  head, *rest = ("| " + " | ".join(cells) + " |\n" for cells in lines)
  return head + "|" + "---|" * len(columns) + "\n" + "".join(rest)


def number(row: dict, field: str, form: str, unit: str = "") -> str:
  """A field of a row; a dash where the row has none."""
  value = row.get(field)
  return "–" if value is None else f"{value:{form}}{unit}"


def spread(values) -> dict:
  """Mean, sample standard deviation, extremes and count, rounded."""
  values = np.asarray(values, float)
  return {
      "mean": round(float(values.mean()), 4),
      "std": round(float(values.std(ddof=1)), 4) if len(values) > 1 else None,
      "min": round(float(values.min()), 4),
      "max": round(float(values.max()), 4),
      "n": len(values),
  }


def plus_minus(of: dict, digits: int = 2) -> str:
  """Mean and standard deviation of a `spread`."""
  return f"{of['mean']:.{digits}f} ± {of['std'] or 0:.{digits}f}"
