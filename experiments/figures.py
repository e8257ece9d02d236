# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws every figure of README, docs and notebooks from committed results.

  python -m experiments.figures

Writes docs/figures/<name>.png. A figure whose result file is not there yet is
named, with the command that makes the file, and left out.
"""

from collections.abc import Callable
import json
import pathlib
import tempfile
from typing import NamedTuple

from absl import app
import PIL.Image

from experiments import adapting
from experiments import bench_report
from experiments import bias_batch
from experiments import bias_matrices
from experiments import bias_report
from experiments import bias_training
from experiments import cli
from experiments import learning_curves
from experiments import peers_report
from experiments import reach_report
from experiments import report
from experiments import rollout_report
from experiments import simulate_rollouts
from experiments import staleness
from experiments import time_breakdown

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "experiments" / "results"


class Figure(NamedTuple):
  """A figure.

  Attributes:
    results: name of the file in experiments/results, without .json.
    command: makes that file.
    draw: (results, path) -> None.
  """

  results: str
  command: str
  draw: Callable[[dict, pathlib.Path], None]


def _of(name: str, module: str, draw) -> Figure:
  """Of an experiment whose config has the name of its result file."""
  file = f"{name}.py"
  if module == "learning_curves":
    file = name.replace("_", ".py:", 1)
  return Figure(
      name, f"python -m experiments.{module} --config=configs/{file}", draw
  )


FIGURES = {
    "compare_smollm2": Figure("compare_smollm2", "make compare", report.draw),
    "reach": Figure(
        "plan", "python -m experiments.plan_table", reach_report.draw
    ),
    "bias_sweep": _of("bias_sweep", "bias_sweep", bias_report.draw),
    "bias_matrices": _of("bias_sweep", "bias_sweep", bias_matrices.draw),
    "bias_batch": _of("bias_batch", "bias_batch", bias_batch.draw),
    "bias_training": _of("bias_training", "bias_training", bias_training.draw),
    "bench_step": _of("bench_step", "bench_step", bench_report.draw),
    "peers": Figure("peers", "make peers", peers_report.draw),
    "time_breakdown": _of(
        "time_breakdown", "time_breakdown", time_breakdown.draw
    ),
    "staleness": _of("staleness", "staleness", staleness.draw),
    **{
        name: _of(name, "learning_curves", learning_curves.draw)
        for name in ("learning_modes", "learning_algorithms", "learning_stale",
                     "learning_drafts")
    },
    "bench_rollout": _of("bench_rollout", "bench_rollout", rollout_report.draw),
    "adapting": _of("adapting", "adapting", adapting.draw),
    "simulate_rollouts": _of(
        "simulate_rollouts", "simulate_rollouts",
        simulate_rollouts.draw_first_step,
    ),
}


def missing(name: str) -> str | None:
  """What to do where a figure's result file is not there; None if it is."""
  figure = FIGURES[name]
  if (RESULTS / f"{figure.results}.json").exists():
    return None
  return (
      f"experiments/results/{figure.results}.json is not there yet. This makes "
      f"it (a results.json is copied there): {figure.command}"
  )


def draw(name: str, path: pathlib.Path) -> None:
  """Draws a figure from its committed result file.

  Args:
    name: a key of `FIGURES`.
    path: the PNG to write.

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
  results = json.loads((RESULTS / f"{figure.results}.json").read_text())
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.draw(results, path)
  image = PIL.Image.open(path).convert("RGB")
  # Few colours: a third of the size in the repository.
  image.quantize(128, dither=PIL.Image.Dither.NONE).save(path, optimize=True)


def show(name: str):
  """The figure for a notebook, and where it comes from; or what makes it.

  Args:
    name: a key of `FIGURES`.

  Returns:
    An image that notebooks display, or None where the result file is missing.
  """
  if missing(name):
    print(missing(name))
    return None
  from IPython import display  # of notebooks alone

  figure = FIGURES[name]
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "figure.png"
    draw(name, path)
    image = display.Image(data=path.read_bytes())
  print(
      f"Drawn from experiments/results/{figure.results}.json, which this made: "
      f"{figure.command}"
  )
  return image


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
