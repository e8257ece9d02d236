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

import matplotlib
import ml_collections
import numpy as np

from branch_replay.training import loop
from branch_replay.training import metrics
from configs import train as train_config
from experiments import cli
from experiments import record
from experiments import train


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
      *parents, name = path.split(".")
      at = config
      for parent in parents:
        at = at[parent]
      if name not in at and "settings" not in parents:
        raise ValueError(f"The base config has no field {path!r}.")
      at[name] = value
  return config


def warm_up(config, seed: int, workdir: pathlib.Path):
  """Runs the phases before the last one; their folder, or None without any."""
  base = base_of(config, seed)
  *before, _ = base.phases
  if not before:
    return None
  folder = workdir / f"seed{seed}" / "warmup"
  train.run(changed(base, {"phases": tuple(before)}), folder)
  return folder


def warmed_up(config, seed: int, workdir: pathlib.Path):
  """The parameters after `warm_up`."""
  base = base_of(config, seed)
  *before, _ = base.phases
  problem = train.build(changed(base, {"phases": tuple(before)}))
  folder = workdir / f"seed{seed}" / "warmup"
  return loop.train(problem.run, problem.params, folder)


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

  Args:
    config: e.g. configs/learning.py:modes.
    workdir: where results.json, learning_curves.png and all runs go.

  Returns:
    What results.json holds.

  Raises:
    ValueError: a config that cannot be run, before anything is trained.
  """
  workdir = pathlib.Path(workdir).resolve()
  for changes in variants(config).values():
    train.build(changed(base_of(config, config.seeds[0]), changes))
  done = record.resume(workdir, config)
  results = {
      "environment": record.environment(), "config": config.to_dict(),
      "runs": done,
  }
  there = {(one["variant"], one["seed"]) for one in done}
  for seed in config.seeds:
    for name in variants(config):
      if (name, seed) in there:
        continue
      print(f"seed {seed}, {name}")
      warm = warm_up(config, seed, workdir)
      one = run_variant(config, name, seed, warm, workdir)
      record.append(workdir, one)
      results["runs"].append(one)
      record.write_json(workdir / "results.json", results)
  record.write_json(workdir / "results.json", results)
  draw(results, workdir / "learning_curves.png")
  print(table(results))
  print(f"Wrote {workdir / 'results.json'} and learning_curves.png beside it.")
  return results


def by_variant(results: dict) -> dict[str, list[dict]]:
  """Runs by variant, in the config's order."""
  found = {name: [] for name, _ in results["config"]["variants"]}
  for one in results["runs"]:
    found[one["variant"]].append(one)
  return {name: runs for name, runs in found.items() if runs}


def final(one: dict) -> float:
  """Held-out reward at the end of a run."""
  return one["evaluated"][-1][1]


def seconds_a_step(runs: list[dict], part: str) -> float:
  """Median of a part of a step, over steps and then over runs."""
  return float(np.median([np.median(one[f"{part}_seconds"]) for one in runs]))


def table(results: dict) -> str:
  """Final held-out reward and time a step, mean and spread over seeds."""
  lines = [
      "variant  seeds  warmed up  final held-out reward  rollout s  draft s  "
      "learn s"
  ]
  for name, runs in by_variant(results).items():
    ends = [final(one) for one in runs]
    starts = [one["warmed_up"] for one in runs]
    lines.append(
        f"{name}  {len(runs)}  {np.mean(starts):.3f}  {np.mean(ends):.3f} ± "
        f"{np.std(ends):.3f}  " + "  ".join(
            f"{seconds_a_step(runs, part):.2f}"
            for part in ("rollout", "draft", "learn")
        )
    )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: held-out reward by step and by seconds of training."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, (left, right) = plt.subplots(
      1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
  )
  for color, (name, runs) in enumerate(by_variant(results).items()):
    curves = np.array([
        [one["warmed_up"], *(reward for _, reward in one["evaluated"])]
        for one in runs
    ])
    steps = [0, *(step for step, _ in runs[0]["evaluated"])]
    mean, spread = curves.mean(axis=0), curves.std(axis=0)
    left.plot(steps, mean, color=f"C{color}", label=name)
    left.fill_between(
        steps, mean - spread, mean + spread, color=f"C{color}", alpha=0.2
    )
    for one, curve in zip(runs, curves, strict=True):
      seconds = [0, *(one["seconds"][step - 1] for step, _ in one["evaluated"])]
      right.plot(seconds, curve, color=f"C{color}", alpha=0.6)
  left.set_xlabel("step (mean, and standard deviation over seeds)")
  right.set_xlabel("seconds of sampling and learning (a line a seed)")
  left.set_ylabel("held-out reward")
  left.legend()
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  cli.main(run, "configs/learning.py:modes")
