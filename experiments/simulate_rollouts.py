# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A SIMULATION of a rollout on several workers: who waits, who trains.

Nothing here is measured on several workers. Each samples one group; a step ends
when the last row of the last worker does. How long answers are is an assumption
(log-normal, capped). What a round of so many rows costs, with and without
drafts, how many tokens of a row it gives, and what an update of the drafter
costs, are read from a benchmark of one machine (`experiments.bench_rollout`).

  python -m experiments.simulate_rollouts --config=configs/simulate_rollouts.py
"""

import json
import pathlib
from typing import NamedTuple

import matplotlib
import ml_collections
import numpy as np

from experiments import cli
from experiments import record

_ROOT = pathlib.Path(__file__).resolve().parent.parent


class Costs(NamedTuple):
  """Measured, of one machine.

  Attributes:
    seconds: of a round, by draft length and bucket of rows.
    accept_length: tokens of a row a round, by draft length.
    update: seconds of an update of the drafter.
  """

  seconds: dict[int, dict[int, float]]
  accept_length: dict[int, float]
  update: float


def costs(bench: dict, drafter: str) -> Costs:
  """Costs of a drafter, and of drafting nothing, from a benchmark's results.

  Raises:
    ValueError: the benchmark has no such runs.
  """
  seconds, accept_length = {}, {}
  for one in bench["runs"]:
    wanted = "none" if one["draft_length"] == 0 else drafter
    if not one["compact"] or one["drafter"] != wanted or (
        one["draft_length"] == "tuned"
    ):
      continue
    columns = zip(
        one["buckets"], one["bucket_seconds"], one["bucket_rounds"],
        strict=True,
    )
    by_bucket = {
        bucket: total / rounds for bucket, total, rounds in columns if rounds
    }
    seconds[one["draft_length"]] = by_bucket
    accept_length[one["draft_length"]] = one["accept_length"]
  if 0 not in seconds or len(seconds) < 2:
    raise ValueError(
        f"The benchmark has no compacted runs both without drafts and with "
        f"{drafter!r} at a fixed draft length."
    )
  # A bucket counts if it was measured with and without drafts: the others are
  # charged alike, as the next larger one.
  shared = set.intersection(*map(set, seconds.values()))
  return Costs(
      {
          length: {bucket: of[bucket] for bucket in shared}
          for length, of in seconds.items()
      },
      accept_length, bench["training"]["seconds_per_update"],
  )


def round_seconds(by_bucket: dict[int, float], rows: int) -> float:
  """Of the smallest measured bucket that holds the rows, or the largest."""
  holds = [bucket for bucket in by_bucket if bucket >= rows]
  return by_bucket[min(holds, default=max(by_bucket))]


def best_length(of: Costs, rows: int) -> int:
  """The draft length with the most tokens a second, as a tuner finds it."""
  return max(of.seconds, key=lambda k: (
      of.accept_length[k] / round_seconds(of.seconds[k], rows)
  ))


class Stretch(NamedTuple):
  """A time in which as many rows of a worker run.

  Attributes:
    rows: unfinished ones.
    draft_length: tokens drafted a round.
    seconds: it lasts.
  """

  rows: int
  draft_length: int
  seconds: float


def worker(lengths, of: Costs, *, speculate: bool) -> list[Stretch]:
  """What one worker does until its last row ends."""
  ends, stretches, done = np.sort(lengths), [], 0.0
  for finished, length in enumerate(ends):
    if length <= done:
      continue
    rows = len(ends) - finished
    draft_length = best_length(of, rows) if speculate else 0
    rounds = (length - done) / of.accept_length[draft_length]
    cost = round_seconds(of.seconds[draft_length], rows)
    stretches.append(Stretch(rows, draft_length, rounds * cost))
    done = length
  return stretches


def step(rng: np.random.Generator, config, of: Costs) -> dict:
  """One rollout of all workers, with and without drafts, of equal lengths."""
  lengths = np.minimum(
      config.most_tokens,
      np.ceil(rng.lognormal(
          np.log(config.median_tokens), config.spread,
          (config.workers, config.branches),
      )),
  )
  timelines, found = {}, {}
  for name, speculate in (("plain", False), ("drafts", True)):
    timelines[name] = [
        worker(row, of, speculate=speculate) for row in lengths
    ]
    busy = np.array([
        sum(stretch.seconds for stretch in one) for one in timelines[name]
    ])
    waits = busy.max() - busy
    found[name] = {
        "seconds": busy.max(),
        "idle": waits.sum() / (busy.max() * config.workers),
        # Whole updates that fit each wait, done by the worker that waits.
        "updates_in_idle": float(np.sum(waits // of.update)),
    }
  return {"timelines": timelines, "found": found}


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Simulates; see the module.

  Args:
    config: configs/simulate_rollouts.py.
    workdir: where results.json and the figure go.

  Returns:
    What results.json holds.

  Raises:
    ValueError: the benchmark's results are missing, or lack what is needed.
  """
  file = pathlib.Path(config.bench)
  file = file if file.is_absolute() else _ROOT / file
  if not file.exists():
    raise ValueError(
        f"{file} is not there: run experiments.bench_rollout, or name its "
        "results.json in `bench`."
    )
  of = costs(json.loads(file.read_text()), config.drafter)
  rng = np.random.default_rng(config.seed)
  steps = [step(rng, config, of) for _ in range(config.steps)]

  def mean(name, field):
    return float(np.mean([one["found"][name][field] for one in steps]))

  plain, drafts = mean("plain", "seconds"), mean("drafts", "seconds")
  results = {
      "simulated": True,
      "environment": record.environment(),
      "config": config.to_dict(),
      "costs": {
          "seconds": of.seconds, "accept_length": of.accept_length,
          "seconds_per_update": of.update,
      },
      "plain": {
          name: mean("plain", name) for name in steps[0]["found"]["plain"]
      },
      "drafts": {
          name: mean("drafts", name) for name in steps[0]["found"]["drafts"]
      },
      "speedup_free_training": plain / drafts,
      "speedup_counted_training": plain / (
          drafts + config.updates * of.update
      ),
  }
  workdir = pathlib.Path(workdir)
  record.write_json(workdir / "results.json", results)
  draw(steps[0]["timelines"], config, workdir / "timeline.png")
  print(table(results))
  print(f"Wrote {workdir / 'results.json'} and timeline.png beside it.")
  return results


def draw_first_step(results: dict, path: pathlib.Path) -> None:
  """The figure of the first step, simulated again from its results' costs."""
  config = ml_collections.ConfigDict(results["config"])
  given = results["costs"]
  of = Costs(
      {
          int(length): {int(rows): x for rows, x in by_bucket.items()}
          for length, by_bucket in given["seconds"].items()
      },
      {int(length): x for length, x in given["accept_length"].items()},
      given["seconds_per_update"],
  )
  first = step(np.random.default_rng(config.seed), config, of)
  draw(first["timelines"], config, path)


def table(results: dict) -> str:
  """The simulation as lines of text, labelled as one."""
  lines = ["simulated  s a step  workers idle  updates that fit the waits"]
  for name in ("plain", "drafts"):
    one = results[name]
    lines.append(
        f"{name:9}  {one['seconds']:8.1f}  {one['idle']:12.0%}  "
        f"{one['updates_in_idle']:.0f}"
    )
  lines.append(
      f"speed-up {results['speedup_free_training']:.2f}× with the drafter "
      f"trained in waits, {results['speedup_counted_training']:.2f}× with "
      f"{results['config']['updates']} updates after the rollout"
  )
  return "\n".join(lines)


def draw(timelines: dict, config, path: pathlib.Path) -> None:
  """Writes a figure: one step of all workers, without and with drafts."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axes = plt.subplots(
      2, 1, figsize=(9, 6), sharex=True, layout="constrained"
  )
  shades = plt.get_cmap("Blues")
  for axis, (name, workers) in zip(axes, timelines.items(), strict=True):
    last = max(sum(x.seconds for x in one) for one in workers)
    for number, stretches in enumerate(workers):
      at = 0.0
      for stretch in stretches:
        axis.barh(
            number, stretch.seconds, left=at,
            color=shades(0.25 + 0.7 * stretch.rows / config.branches),
        )
        at += stretch.seconds
      axis.barh(
          number, last - at, left=at, color="none", edgecolor="C1",
          hatch="//" if name == "drafts" else None, linewidth=0.5,
      )
    axis.set_ylabel("worker")
    axis.set_title({
        "plain": "without drafts: outlined time is spent waiting",
        "drafts": "with drafts: hatched time trains the drafter",
    }[name] + " (simulated; darker: more rows)", fontsize=10)
  axes[-1].set_xlabel("seconds")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  cli.main(run, "configs/simulate_rollouts.py")
