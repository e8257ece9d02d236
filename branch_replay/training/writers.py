# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writers, which show the numbers and sampled answers of a run somewhere.

A run is given functions that open writers, each with the `Place` it is told
about. The files metrics.jsonl and completions.jsonl are written in any case,
see `metrics.Log`; the writer to the terminal is `terminal.Terminal`.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
from typing import NamedTuple
from typing import Protocol
import uuid

import tensorboardX


class Place(NamedTuple):
  """Where a run writes, and how far it is.

  Attributes:
    directory: the run's folder.
    done: last step that is done; −1 for a run that begins. Later steps will run
      again, and what was written of them is to be replaced.
    steps: all steps of the run.
  """

  directory: pathlib.Path
  done: int
  steps: int


class Writer(Protocol):
  """What a run calls. Of one step, `completions` comes before `write`."""

  def write(self, step: int, phase: str, scalars: Mapping[str, float]) -> None:
    """Writes the numbers of one step.

    Args:
      step: number of the step, counted from 1 over all phases.
      phase: name of the phase.
      scalars: numbers by name; they need not be finite.
    """

  def completions(self, step: int, rows: Sequence[dict]) -> None:
    """Writes answers that were sampled in a step; see `completions.rows`."""

  def close(self) -> None:
    """Ends writing."""


Open = Callable[[Place], Writer]


class TensorBoard:
  """Writes TensorBoard's event files, in the folder `tensorboard`.

  A "/" in a number's name groups it. Sampled answers are under "Text".
  """

  def __init__(self, place: Place):
    self._board = tensorboardX.SummaryWriter(
        str(place.directory / "tensorboard"), purge_step=place.done + 1
    )

  def write(self, step: int, phase: str, scalars: Mapping[str, float]) -> None:
    del phase
    for name, value in scalars.items():
      self._board.add_scalar(name, value, step)
    self._board.flush()  # a checkpoint must not get ahead of the log

  def completions(self, step: int, rows: Sequence[dict]) -> None:
    for number, row in enumerate(rows):
      self._board.add_text(f"completions/{number}", _markdown(row), step)

  def close(self) -> None:
    self._board.close()


def _markdown(row: dict) -> str:
  """A prompt and its answers as blocks of code, so that no mark-up is read."""
  def block(text):
    return "\n".join(f"    {line}" for line in str(text).split("\n"))

  parts = [f"{row['phase']}, {row['example']}", block(row["prompt"])]
  for answer in row["answers"]:
    parts += [
        f"**reward {answer['reward']:.3f}**, {answer['length']} tokens",
        block(answer["text"]),
    ]
  return "\n\n".join(parts)


def weights_and_biases(
    *,
    project: str = "branch_replay",
    name: str | None = None,
    config: Mapping | None = None,
) -> Open:
  """A writer to Weights & Biases, to be given to a run.

  The environment variables of `wandb` are respected: WANDB_MODE=offline writes
  to the run's folder alone. A run that goes on is the same run there, whose id
  is kept in the run's folder. Steps that run again after a stop were sent
  before and are not sent twice.

  Args:
    project: name of the project.
    name: name of the run; None lets Weights & Biases choose one.
    config: settings to show with the run, as JSON values.

  Raises:
    ValueError: the package `wandb` is not installed.
  """
  try:
    import wandb  # not a dependency, and slow to import
  except ImportError as error:
    raise ValueError(
        "Weights & Biases is not installed. Install it with `pip install "
        "wandb`, or leave this writer out."
    ) from error

  def make(place: Place) -> _WeightsAndBiases:
    return _WeightsAndBiases(
        wandb, place, project=project, name=name, config=dict(config or {})
    )

  return make


class _WeightsAndBiases:
  """See `weights_and_biases`."""

  def __init__(self, wandb, place: Place, **settings):
    self._wandb = wandb
    self._note = place.directory / "wandb_run.json"
    self._id, self._sent = uuid.uuid4().hex[:12], -1
    if place.done >= 0 and self._note.exists():
      known = json.loads(self._note.read_text())
      self._id, self._sent = known["id"], known["step"]
    self._run = wandb.init(
        id=self._id, resume="allow", dir=str(place.directory), **settings
    )
    self._remember()

  def _remember(self) -> None:
    partial = self._note.with_suffix(".partial")
    partial.write_text(json.dumps({"id": self._id, "step": self._sent}))
    partial.replace(self._note)

  def write(self, step: int, phase: str, scalars: Mapping[str, float]) -> None:
    if step <= self._sent:
      return
    self._run.log({"phase": phase, **scalars}, step=step, commit=True)
    self._sent = step
    self._remember()

  def completions(self, step: int, rows: Sequence[dict]) -> None:
    if step <= self._sent:
      return
    table = self._wandb.Table(
        columns=["example", "prompt", "answer", "reward", "length", "finished"],
        data=[
            [
                row["example"], row["prompt"], answer["text"],
                answer["reward"], answer["length"], answer["finished"],
            ]
            for row in rows for answer in row["answers"]
        ],
    )
    self._run.log({"completions": table}, step=step, commit=False)

  def close(self) -> None:
    self._run.finish()
