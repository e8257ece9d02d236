# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures without a display."""

from collections.abc import Iterator
import contextlib
import pathlib

import matplotlib

# Of modes of the prefix's gradient.
COLORS = {
    "full": "#555555", "exact": "#1b7f5c", "stop": "#c8553d",
    "sampled": "#4060a0", "banded": "#c9a227",
}


@contextlib.contextmanager
def axes(
    path: pathlib.Path, rows: int = 1, columns: int = 1, *, size, dpi=120,
    **options,
) -> Iterator:
  """A figure and its axes, as `pyplot.subplots` has them, saved at the end.

  Args:
    path: the PNG to write.
    rows: of axes.
    columns: of axes.
    size: width and height in inches.
    dpi: pixels an inch.
    **options: of `pyplot.subplots`.
  """
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, found = plt.subplots(
      rows, columns, figsize=size, layout="constrained", **options
  )
  try:
    yield figure, found
    figure.savefig(path, dpi=dpi)
  finally:
    plt.close(figure)


def shade(share: float):
  """A blue, the darker the nearer to 1."""
  return matplotlib.colormaps["Blues"](share)
