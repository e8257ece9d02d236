# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Does a drafter that learns along with the policy stay ahead of a frozen one?

A model is trained by reinforcement while its drafter learns from the rollouts.
After some steps a copy of the drafter is put aside. From then on, every few
steps, both draft for the policy as it is now: the same held-out prompts, the
same noise, a fixed draft length, so that all that differs is what the drafter
knows. Drafts change no token, so there is one training run, not two.

  python -m experiments.adapting --config=configs/adapting.py

May be interrupted and started again.
"""

import dataclasses
import pathlib

import jax
import ml_collections
import numpy as np

import branch_replay as br
from branch_replay.rollout.drafters import files
from branch_replay.training import build
from branch_replay.training import loop
from branch_replay.training import metrics
from experiments import cli
from experiments import learning_curves
from experiments import train
from experiments.reporting import record
from experiments.reporting import training

_STEP_FIELDS = (
    "step", "reward/mean", "answer_length", "draft/accept_length", "draft/loss",
    "time/rollout", "time/draft", "time/learn", "eval/reward",
)


def probe(config, problem: build.PreparedRun, params, drafters: dict) -> dict:
  """Lets drafters draft for a policy on held-out prompts, and counts.

  Returns:
    By the drafter's name accept_length, tokens of a row per forward pass, of
    all rows and of the longest row of each group; accepted, share of the
    drafts; and rows_that_differ from those of the first drafter, by rounding.
  """
  phase = problem.run.phases[-1]
  totals, first = {}, []
  for number in range(config.probes):
    example = phase.task.split("validation")[number]
    state = br.capture(problem.run.model, params, example.prompt_ids)
    for name, drafter in drafters.items():
      rollout = br.sample(
          problem.run.model, params, example.prompt_ids,
          key=jax.random.key(number), branches=phase.rollouts.branches,
          max_tokens=phase.rollouts.max_tokens, law=phase.rollouts.law,
          stop_ids=phase.task.stop_ids, state=state, drafter=drafter,
          draft_length=config.draft_length, compact=False,
      )
      if len(first) == number:
        first.append(rollout.tails())
      lengths, rounds = np.asarray(rollout.lengths), np.asarray(rollout.rounds)
      longest = np.argmax(lengths)
      totals.setdefault(name, []).append((
          lengths.sum(), rounds.sum(), lengths[longest], rounds[longest],
          int(rollout.drafted.sum()), int(rollout.accepted.sum()),
          sum(a != b for a, b in zip(rollout.tails(), first[-1], strict=True)),
      ))
  found = {}
  for name, rows in totals.items():
    tokens, rounds, longest, its_rounds, drafted, accepted, differ = (
        np.sum(rows, axis=0).tolist()
    )
    found[name] = {
        "accept_length": tokens / rounds,
        "accept_length_of_longest": longest / its_rounds,
        "accepted": accepted / max(1, drafted),
        "mean_tokens": tokens / len(rows) / phase.rollouts.branches,
        "rows_that_differ": differ,
    }
  return found


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path):
  """Trains, and probes every `every` steps from `freeze_after` on.

  Returns:
    What results.json holds; None if the run was stopped by a signal.

  Raises:
    ValueError: a config that cannot be run.
  """
  base = learning_curves.base_of(config, config.seed)
  if base.reinforce.speculation.drafter != "learned":
    raise ValueError("speculation.drafter must be 'learned' to be frozen.")
  if config.freeze_after % config.every or config.freeze_after < 1:
    raise ValueError(
        f"freeze_after={config.freeze_after} must be a multiple of every="
        f"{config.every}."
    )
  workdir = pathlib.Path(workdir).resolve()
  problem = train.build(base)
  phase = problem.run.phases[-1]
  results = record.begin(config, cases=record.resume(workdir, config))
  done = max((case["step"] for case in results["cases"]), default=0)
  _, params = learning_curves.warm_up(config, config.seed, workdir)
  folder = workdir / "training"
  for steps in range(config.every, phase.steps + 1, config.every):
    if steps <= done:
      continue
    part = dataclasses.replace(
        problem.run, phases=(dataclasses.replace(phase, steps=steps),)
    )
    trained = loop.train(part, params, folder)
    if trained is None:
      return None
    adapting = phase.speculator.drafter
    if steps == config.freeze_after:
      files.save(workdir / "frozen", adapting)
    if steps < config.freeze_after:
      continue
    frozen = files.load(workdir / "frozen", problem.run.model, trained)
    case = {"step": steps, **probe(
        config, problem, trained, {"adapting": adapting, "frozen": frozen}
    )}
    record.append(workdir, case)
    results["cases"].append(case)
    files.save(workdir / "drafter", adapting)
  results["steps"] = [
      {name: row[name] for name in _STEP_FIELDS if name in row}
      for row in metrics.read(folder)
  ]
  return record.finish(
      workdir, results, table=training.adapted, draw=training.draw_adapted
  )


if __name__ == "__main__":
  cli.main(run, "configs/adapting.py")
