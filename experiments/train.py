# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a model: by reward, after a supervised warm-up where it needs one.

Writes metrics.jsonl (one object a step), TensorBoard's event files, checkpoints
and, at the end, the model in Hugging Face's format. The same command goes on
where an earlier one was stopped.

  python -m experiments.train --config.task.name=file \
    --config.task.train=prompts.jsonl --config.task.reward=reward.py:score

The config's fields are those of `training.settings.RunSettings`; --help lists
them.
"""

from collections.abc import Sequence
import json
import pathlib

import ml_collections

from branch_replay.training import build as build_lib
from branch_replay.training import metrics
from branch_replay.training import run_config
from experiments import cli
from experiments.reporting import record
from experiments.reporting import training

# Fields that may change when a run goes on: what it learns does not depend on
# them. The library checks what may become of the phases and of their steps.
_HARMLESS = (
    "devices", "data_dir", "export", "checkpoint_every", "most_skipped",
    "warn_after", "evaluation.every", "phases", "completions_every",
    "completion_prompts", "wandb.project", "wandb.name", "task.workers",
)
_HARMLESS_OF_PHASE = ("steps", "hold")


def build(config: ml_collections.ConfigDict) -> build_lib.PreparedRun:
  """Everything a config says, checked, before any training is done.

  Raises:
    ValueError: a config that cannot be run.
  """
  return build_lib.build(run_config.of_config(config))


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, *,
    may_differ: Sequence[str] = (),
) -> list[dict]:
  """Trains, or goes on training, and returns the rows of metrics.jsonl.

  `may_differ` is of `loop.train`.

  Raises:
    ValueError: a config that cannot be run, before anything is trained, or a
      workdir of another config.
  """
  workdir = pathlib.Path(workdir).resolve()
  mine = json.loads(json.dumps(config.to_dict()))
  file = workdir / "config.json"
  if file.exists():
    check_same(json.loads(file.read_text()), mine, workdir)
  prepared = build(config)
  if not file.exists():
    record.write_json(file, mine)
  params = prepared.train(workdir, may_differ=may_differ)
  record.write_json(file, mine)
  rows = metrics.read(workdir)
  if params is None:
    return rows
  if config.export:
    prepared.export(workdir / "model", params)
  record.finish(workdir, summary(config, rows), table=training.learned)
  return rows


def check_same(saved: dict, mine: dict, workdir: pathlib.Path) -> None:
  """ValueError, all fields named, for the workdir of another config."""
  free = [*_HARMLESS, *(
      f"{name}.{field}" for name in {*saved["phases"], *mine["phases"]}
      for field in _HARMLESS_OF_PHASE
  )]
  if mine["task"]["name"] == "file":  # a checkpoint knows their content
    free += ["task.train", "task.validation", "task.test", "task.timeout"]
  differ = record.differences(saved, mine, free=free)
  if differ:
    raise ValueError(
        f"{workdir} holds a run of another config: {'; '.join(differ)}. Take "
        "another --workdir, or the values of there."
    )


def summary(config, rows: list[dict]) -> dict:
  """Summarises the rows of metrics.jsonl.

  Returns:
    `curve`, every evaluation with the seconds spent until then, compilation
    included and starting up not; `phases`, the last evaluation of each.
  """
  curve, seconds = [], 0.0
  for row in rows:
    seconds += sum(x for name, x in row.items() if name.startswith("time/"))
    if "eval/reward" in row:
      curve.append({
          "step": row["step"], "name": row["phase"],
          "reward": row["eval/reward"], "seconds": round(seconds, 1),
      })
  last = {at["name"]: at for at in curve}
  return record.begin(
      config, curve=curve,
      # None without an evaluation, as in learning from given answers alone.
      phases=[
          last[name] for name in ("before", *config.phases) if name in last
      ],
      mismatch_max=max(row.get("mismatch_max", 0.0) for row in rows),
  )


if __name__ == "__main__":
  cli.main(run, "configs/train.py")
