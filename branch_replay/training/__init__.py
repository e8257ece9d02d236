# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Training a model on a task.

  start = br.load("smollm2")
  task = tasks.from_files(
      train="prompts.jsonl", reward=score, text=tasks.Chat(start)
  )
  trained = training.train(
      start, task, training.ReinforceSettings(steps=50), "runs/mine"
  )
  br.save_pretrained("runs/mine/model", trained)

`train` does this with settings that have defaults; `settings` are the values,
`build` makes a run of them, `loop` runs it. A phase of one's own, or an
optimizer, algorithm or schedule that the settings do not name, goes into a
`loop.TrainingRun` directly.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import pathlib

from branch_replay import tasks
from branch_replay.tasks import task as _task
from branch_replay.training import build as _build
from branch_replay.training.settings import AdapterSettings
from branch_replay.training.settings import AlgorithmSettings
from branch_replay.training.settings import EvaluationSettings
from branch_replay.training.settings import OptimizerSettings
from branch_replay.training.settings import PairwiseSettings
from branch_replay.training.settings import PhaseSettings
from branch_replay.training.settings import ReinforceSettings
from branch_replay.training.settings import RunSettings
from branch_replay.training.settings import SpeculationSettings
from branch_replay.training.settings import StudySettings
from branch_replay.training.settings import SupervisedSettings
from branch_replay.training.settings import WandbSettings
from branch_replay.weights.pretrained import Pretrained

__all__ = [
    "AdapterSettings",
    "AlgorithmSettings",
    "EvaluationSettings",
    "OptimizerSettings",
    "PairwiseSettings",
    "PhaseSettings",
    "ReinforceSettings",
    "RunSettings",
    "SpeculationSettings",
    "StudySettings",
    "SupervisedSettings",
    "WandbSettings",
    "train",
]


def train(
    start: Pretrained,
    task: _task.Task,
    phases: PhaseSettings | Sequence[PhaseSettings],
    workdir: pathlib.Path | str,
    **settings,
) -> Pretrained | None:
  """Trains a model on a task, or goes on where an earlier call stopped.

  Args:
    start: the model to begin with; `br.load` loads one.
    task: prompts and rewards; `tasks.from_files` makes one of files.
    phases: what to do, one after the other: `ReinforceSettings`,
      `SupervisedSettings`, `PairwiseSettings`.
    workdir: folder of checkpoints and logs. What is there must be of the same
      run.
    **settings: other fields of `RunSettings`, as in seed=1.

  Returns:
    The trained model, adapters merged; None if a signal stopped the run, after
    its state was saved.

  Raises:
    ValueError: settings that cannot be run, or a workdir of another run.
  """
  for name in ("pretrained", "model", "task", "data_dir", "export"):
    if name in settings:
      raise ValueError(
          f"{name}={settings[name]!r} is for a run that loads its model and "
          "task by name; here both are given."
      )
  if not isinstance(phases, Sequence):
    phases = (phases,)
  named = {}
  for phase in phases:
    if phase.task:
      raise ValueError(
          f"task={dict(phase.task)} of a phase changes a task that is made by "
          "name; here the task is given."
      )
    count = sum(other.kind == phase.kind for other in named.values())
    named[phase.kind if not count else f"{phase.kind}_{count + 1}"] = phase

  def task_of(changes: Mapping) -> _task.Task:
    del changes  # none, see above
    return task

  decode = None
  if start.tokenizer is not None:
    decode = tasks.Chat(start).decode
  run = _build.prepare(
      RunSettings(phases=named, **settings), start, task_of, decode=decode
  )
  params = run.train(workdir)
  return None if params is None else run.trained(params)
