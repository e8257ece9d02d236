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
import ml_collections
import numpy as np
import tqdm

from branch_replay.planning import compare
from branch_replay.rl import advantages
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import step as step_lib
from experiments import cli
from experiments import learning_curves
from experiments import train
from experiments.reporting import record
from experiments.reporting import training

_TRIES = 4  # prompts that are drawn for one that is used, at most


def measure(learner: learner_lib.Learner, train_state, batch, known) -> dict:
  """Stale replay against fresh capture of a batch, at the same parameters.

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
        phase.learner.model, params, phase.task, next(examples), phase.rollouts,
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
  """Drift after so many updates (`counts`) on one captured batch."""
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
  """Warms a model up unless that is done, and measures."""
  workdir = pathlib.Path(workdir).resolve()
  problem = train.build(learning_curves.base_of(config, config.seed))
  _, params = learning_curves.warm_up(config, config.seed, workdir)
  results = record.begin(config, rows=record.resume(workdir, config))
  there = {row["batch"] for row in results["rows"]}
  for number in tqdm.tqdm(range(config.batches), unit="batch"):
    if number in there:
      continue
    for row in of_batch(problem.run.phases[-1], params, number, config.updates):
      record.append(workdir, row)
      results["rows"].append(row)
    record.save(workdir, results)
  return record.finish(
      workdir, results, table=training.drift_table, draw=training.draw_drift
  )


if __name__ == "__main__":
  cli.main(run, "configs/staleness.py")
