# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of README, docs and notebooks from committed results.

  python -m experiments.reporting.figures

Writes docs/figures/<name>.png. A figure whose result file is missing is left
out, and the command that makes the file is printed.
"""

from collections.abc import Callable
import pathlib
import tempfile
from typing import NamedTuple

from absl import app
import PIL.Image

from experiments import cli
from experiments.peers import report as peers
from experiments.reporting import bias
from experiments.reporting import comparisons
from experiments.reporting import plans
from experiments.reporting import record
from experiments.reporting import rollouts
from experiments.reporting import speed
from experiments.reporting import training

FOLDER = record.RESULTS.parent.parent / "docs" / "figures"


class Figure(NamedTuple):
  """A result file by its name, the command that makes it, and its figure."""

  results: str
  command: str
  draw: Callable[[dict, pathlib.Path], None]


def _of(name: str, draw) -> Figure:
  """The figure of an experiment that has the name of its result file."""
  return Figure(
      name, f"python -m experiments.{name} --config=configs/{name}.py", draw
  )


def _curves(variant: str) -> Figure:
  return Figure(
      f"learning_{variant}", "python -m experiments.learning_curves "
      f"--config=configs/learning.py:{variant}", training.draw_curves,
  )


FIGURES = {
    "compare_smollm2": Figure(
        "compare_smollm2", "make compare", comparisons.draw
    ),
    "reach": Figure(
        "plan", "python -m experiments.plan --committed", plans.draw
    ),
    "bias_sweep": _of("bias_sweep", bias.draw),
    "bias_matrices": _of("bias_sweep", bias.draw_matrices),
    "bias_batch": _of("bias_batch", bias.draw_sums),
    "bias_training": _of("bias_training", bias.draw_training),
    "bench_step": _of("bench_step", speed.draw),
    "peers": Figure("peers", "make peers", peers.draw),
    "time_breakdown": _of("time_breakdown", speed.draw_breakdown),
    "staleness": _of("staleness", training.draw_drift),
    **{
        f"learning_{variant}": _curves(variant)
        for variant in ("modes", "algorithms", "stale", "drafts")
    },
    "bench_rollout": _of("bench_rollout", rollouts.draw),
    "adapting": _of("adapting", training.draw_adapted),
}


def missing(name: str) -> str | None:
  """The command that makes a missing result file; None if it is there."""
  figure = FIGURES[name]
  if (record.RESULTS / f"{figure.results}.json").exists():
    return None
  return (
      f"experiments/results/{figure.results}.json is not there yet. This makes "
      f"it (a results.json is copied there): {figure.command}"
  )


def draw(name: str, path: pathlib.Path) -> None:
  """Draws one of `FIGURES` from its committed result file.

  Raises:
    ValueError: no such figure, or its result file is not there.
  """
  if name not in FIGURES:
    raise ValueError(
        f"There is no figure {name!r}; there are {', '.join(FIGURES)}."
    )
  if missing(name):
    raise ValueError(missing(name))
  figure = FIGURES[name]
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.draw(record.committed(figure.results), path)
  shrink(path)


def shrink(path: pathlib.Path) -> None:
  """Reduces the colours of a PNG: a third of the size in the repository."""
  image = PIL.Image.open(path).convert("RGB")
  image.quantize(128, dither=PIL.Image.Dither.NONE).save(path, optimize=True)


def show(name: str):
  """The figure for a notebook, or None where the result file is missing.

  Prints where the figure comes from, or what makes the missing file.
  """
  if missing(name):
    print(missing(name))
    return None
  figure = FIGURES[name]
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "figure.png"
    draw(name, path)
    image = picture(path)
  print(
      f"Drawn from experiments/results/{figure.results}.json, which this made: "
      f"{figure.command}"
  )
  return image


def picture(path: pathlib.Path):
  """A PNG as notebooks display it."""
  from IPython import display  # of notebooks alone

  return display.Image(data=path.read_bytes())


def run(_):
  """Draws all that can be drawn."""
  for name in FIGURES:
    if missing(name):
      print(missing(name))
    else:
      draw(name, FOLDER / f"{name}.png")
      print(f"Wrote docs/figures/{name}.png")


if __name__ == "__main__":
  app.run(cli.without_words(run))
