# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves of variants of one training run, over several seeds.

Every seed is warmed up once; all variants of a seed go on from its checkpoint
and see the same prompts. results.json is rewritten after every run; one that
was interrupted goes on where it stopped.

  python -m experiments.learning_curves --config=configs/learning.py:modes
"""

import copy
import pathlib
import shutil

import ml_collections
import numpy as np

from branch_replay.training import loop
from branch_replay.training import metrics
from configs import train as train_config
from experiments import cli
from experiments import train
from experiments.reporting import record
from experiments.reporting import training


def variants(config) -> dict[str, dict]:
  """Changes of the base config, by path, of every variant."""
  return {name: dict(changes) for name, changes in config.variants}


def base_of(config, seed: int) -> ml_collections.ConfigDict:
  """The training config of a seed, with the changes that all variants share."""
  base = train_config.get_config(config.base)
  return changed(base, {**dict(config.shared), "seed": seed, "export": False})


def changed(base, changes) -> ml_collections.ConfigDict:
  """A copy of a config with some fields set, by their dotted paths.

  Raises:
    ValueError: no such field.
  """
  config = copy.deepcopy(base)
  with config.unlocked():
    for path, value in dict(changes).items():
      train_config.switch(config, path, value)
      *parents, name = path.split(".")
      at = config
      for parent in parents:
        at = at[parent]
      if name not in at and "settings" not in parents:
        raise ValueError(f"The base config has no field {path!r}.")
      at[name] = value
  return config


def warm_up(config, seed: int, workdir: pathlib.Path):
  """Runs the phases before the last one.

  Returns:
    Their folder and the parameters after them; None and those of the start
    where the base has one phase.
  """
  base = base_of(config, seed)
  *before, _ = base.phases
  if not before:
    return None, train.build(base).start.params
  before = changed(base, {"phases": tuple(before)})
  folder = workdir / f"seed{seed}" / "warmup"
  train.run(before, folder)
  problem = train.build(before)
  return folder, loop.train(problem.run, problem.start.params, folder)


def run_variant(config, name: str, seed: int, warm, workdir) -> dict:
  """One variant of one seed, from the warm-up on."""
  variant = changed(base_of(config, seed), variants(config)[name])
  # Checkpoints are numbered by steps of the whole run.
  folder = workdir / f"seed{seed}" / name.replace(" ", "_")
  if warm is not None and not (folder / "config.json").exists():
    shutil.copytree(warm / "checkpoints", folder / "checkpoints",
                    dirs_exist_ok=True)
    shutil.copy(warm / metrics.FILE, folder / metrics.FILE)
  # The warm-up's checkpoint is of a run with other phases.
  rows = train.run(variant, folder, may_differ=("phases",))
  last = variant.phases[-1]
  start = [row for row in rows if row["phase"] != last][-1]
  mine = [row for row in rows if row["phase"] == last]
  return {
      "variant": name,
      "seed": seed,
      "warmed_up": start["eval/reward"],
      "step": [row["step"] - start["step"] for row in mine],
      "reward": [row["reward/mean"] for row in mine],
      "seconds": np.cumsum([
          row["time/rollout"] + row.get("time/draft", 0.0) + row["time/learn"]
          for row in mine
      ]).tolist(),
      "draft_seconds": [row.get("time/draft", 0.0) for row in mine],
      "accept_length": [row.get("draft/accept_length", 1.0) for row in mine],
      "learn_seconds": [row["time/learn"] for row in mine],
      "rollout_seconds": [row["time/rollout"] for row in mine],
      "grad_norm": [row["grad_norm"] for row in mine],
      "evaluated": [
          [row["step"] - start["step"], row["eval/reward"]]
          for row in mine if "eval/reward" in row
      ],
      "mismatch_max": max(row.get("mismatch_max", 0.0) for row in mine),
  }


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs every variant of every seed that has not been run.

  Raises:
    ValueError: a config that cannot be run, before anything is trained.
  """
  workdir = pathlib.Path(workdir).resolve()
  for changes in variants(config).values():
    train.build(changed(base_of(config, config.seeds[0]), changes))
  results = record.begin(config, runs=record.resume(workdir, config))
  there = {(one["variant"], one["seed"]) for one in results["runs"]}
  for seed in config.seeds:
    for name in variants(config):
      if (name, seed) in there:
        continue
      print(f"seed {seed}, {name}")
      warm, _ = warm_up(config, seed, workdir)
      one = run_variant(config, name, seed, warm, workdir)
      record.append(workdir, one)
      results["runs"].append(one)
      record.save(workdir, results)
  return record.finish(
      workdir, results, table=training.curves, draw=training.draw_curves
  )


if __name__ == "__main__":
  cli.main(run, "configs/learning.py")
