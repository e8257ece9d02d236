# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How far a captured prefix drifts from the parameters that replay it.

A group's prefix is captured once and replayed while the parameters are updated
on it. After every so many updates the stale replay is compared with one of a
fresh capture, at the same parameters: log-probs, loss and gradient.

  python -m experiments.staleness --config=configs/staleness.py
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import ml_collections
import numpy as np
import tqdm

from branch_replay import compare
from branch_replay.rl import advantages
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import step as step_lib
from experiments import bias_report
from experiments import cli
from experiments import learning_curves
from experiments import record
from experiments import train

_TRIES = 4  # prompts that are drawn for one that is used, at most


def measure(learner: learner_lib.Learner, train_state, batch, known) -> dict:
  """Stale replay against fresh capture of a batch, at the same parameters.

  Args:
    learner: what takes the gradient.
    train_state: parameters now.
    batch: experiences whose states may be older.
    known: of `Learner.know`.

  Returns:
    log_prob_drift_mean, log_prob_drift_max: of |Δ log p| of the answers'
    tokens; answer_loss_difference: of the mean −log p of an answer's token,
    relative; gradient_cosine and gradient_relative_error, of the whole batch.
  """
  batch, args = learner.algorithm.prepare(batch, learner_lib.joined(known))

  def taken(batch):
    _, outputs, grads = learner.batch_gradient(
        train_state.params, batch, args, version=int(train_state.step),
        key=jax.random.key(0), stale=True,
    )
    return np.asarray(outputs), grads

  stale, stale_grads = taken(batch)
  fresh, fresh_grads = taken([experience.bare(one) for one in batch])
  mask = np.stack([np.asarray(one.group.mask()) for one in batch])
  drift = np.abs(stale - fresh)[mask]
  distance = compare.compare(stale_grads, fresh_grads)
  return {
      "log_prob_drift_mean": float(drift.mean()),
      "log_prob_drift_max": float(drift.max()),
      "answer_loss_difference": float(
          abs(stale[mask].mean() / fresh[mask].mean() - 1)
      ),
      "gradient_cosine": distance.cosine,
      "gradient_relative_error": distance.relative_error,
  }


def sampled(phase, params, number: int) -> list[experience.Experience]:
  """A batch of groups whose answers differ in reward.

  Raises:
    ValueError: there are hardly any.
  """
  examples = phase.task.examples(
      "train", seed=phase.seed, start=number * _TRIES * phase.prompts
  )
  batch = []
  for place in range(_TRIES * phase.prompts):
    one = experience.collect(
        phase.learner.model, params, phase.task, next(examples),
        phase.rollouts,
        key=jax.random.fold_in(jax.random.key(number), place),
        version=0, schedule=phase.learner.schedule,
    )
    if not advantages.is_dead(one.rewards, one.counted):
      batch.append(experience.learnt(one))
    if len(batch) == phase.prompts:
      return batch
  raise ValueError(
      f"{_TRIES * phase.prompts} prompts gave {len(batch)} groups whose "
      "answers differ in reward: warm the model up for longer."
  )


def of_batch(phase, params, number: int, counts) -> list[dict]:
  """Drift over the updates that are made on one captured batch.

  Args:
    phase: of reinforcement.
    params: before any update.
    number: of the batch.
    counts: of updates to measure after.
  """
  learner = phase.learner
  train_state = step_lib.create(
      jax.tree.map(jnp.copy, params), learner.optimizer,
      trainable=learner.trainable,
  )
  batch = sampled(phase, params, number)
  known, rows = learner.know(params, batch, version=0), []
  for updates in range(max(counts) + 1):
    if updates in counts:
      rows.append({
          "batch": number, "updates": updates,
          **measure(learner, train_state, batch, known),
      })
    if updates == max(counts):
      break
    train_state = learner.update(
        train_state, batch, known, version=updates, key=jax.random.key(0),
        stale=True,
    ).train_state
  return rows


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Warms a model up unless that is done, and measures.

  Args:
    config: configs/staleness.py.
    workdir: where results.json and the warm-up go.

  Returns:
    What results.json holds.

  Raises:
    ValueError: a config that cannot be run.
  """
  workdir = pathlib.Path(workdir).resolve()
  base = learning_curves.base_of(config, config.seed)
  problem = train.build(base)
  params = problem.params
  if len(problem.run.phases) > 1:
    learning_curves.warm_up(config, config.seed, workdir)
    params = learning_curves.warmed_up(config, config.seed, workdir)
  phase = problem.run.phases[-1]
  done = record.resume(workdir, config)
  there = {row["batch"] for row in done}
  results = {
      "environment": record.environment(), "config": config.to_dict(),
      "rows": done,
  }
  for number in tqdm.tqdm(range(config.batches), unit="batch"):
    if number in there:
      continue
    for row in of_batch(phase, params, number, config.updates):
      record.append(workdir, row)
      results["rows"].append(row)
    record.write_json(workdir / "results.json", results)
  record.write_json(workdir / "results.json", results)
  print(table(results))
  print(f"Wrote {workdir / 'results.json'}.")
  return results


def summary(results: dict) -> list[dict]:
  """Means and spreads over batches, by number of updates."""
  found = []
  for updates in results["config"]["updates"]:
    rows = [row for row in results["rows"] if row["updates"] == updates]
    found.append({
        "updates": updates,
        **{
            name: bias_report.spread([row[name] for row in rows])
            for name in rows[0] if name not in ("batch", "updates")
        },
    })
  return found


def table(results: dict) -> str:
  """The summary as text."""
  lines = ["updates  log-prob drift  answer loss  gradient cosine"]
  for row in summary(results):
    drift, loss, cosine = (
        row[name]["mean"] for name in (
            "log_prob_drift_mean", "answer_loss_difference", "gradient_cosine"
        )
    )
    lines.append(
        f"{row['updates']}  {drift:.2e}  {loss:.2%}  {cosine:.4f} ± "
        f"{row['gradient_cosine']['std'] or 0:.4f}"
    )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: drift, loss and gradient against updates on a capture."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  titles = {
      "log_prob_drift_mean": "mean |Δ log p| of an answer's token",
      "answer_loss_difference": "relative difference of the answer loss",
      "gradient_cosine": "cosine of the gradient with a fresh capture's",
  }
  rows = summary(results)
  figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), layout="constrained")
  for axis, (name, title) in zip(axes, titles.items(), strict=True):
    for one in results["rows"]:
      axis.plot(one["updates"], one[name], ".", color="C0", alpha=0.4)
    axis.plot(
        [row["updates"] for row in rows], [row[name]["mean"] for row in rows],
        marker="o", color="C0",
    )
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("updates (a dot a batch; line: mean)")
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  cli.main(run, "configs/staleness.py")
