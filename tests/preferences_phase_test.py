# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The phase of given preference pairs, against the same update by hand."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay import tasks
from branch_replay import training
from branch_replay.rl import preference
from branch_replay.training import algorithms
from branch_replay.training import learner as learner_lib
from branch_replay.training import metrics
from branch_replay.training import pairwise
from branch_replay.training import step as step_lib
from tests import by_hand
from tests import tiny_tasks

STOP, BETA, RATE = 5, 0.3, 0.05


def rows_of() -> list[tasks.Example]:
  """Prompts and answers of different lengths."""
  random = np.random.default_rng(7)

  def ids(size):
    return random.integers(6, 64, size).astype(np.int32)

  return [
      tasks.Example(
          f"pair-{n}", ids(11 + n), np.append(ids(1 + n), STOP), None, {},
          np.append(ids(4 - n), STOP),
      )
      for n in range(3)
  ]


ROWS = rows_of()
TASK = tasks.Task("pairs", 64, (STOP,), None, {"train": ROWS})


def phase_of(model, *, task=TASK, schedule=None, **changes):
  learner = learner_lib.Learner(
      model, algorithms.Preference(preference.Dpo(BETA)),
      optax.adam(RATE), schedule=schedule or br.Schedule(chunk_size=4),
      **changes,
  )
  return pairwise.Pairwise(
      "pairs", task, learner, steps=2, prompts=2, max_tokens=8, seed=3,
      learning_rate=lambda update: RATE,
  )


@functools.cache
def by_dense(model):
  """h of two rows, and its pullback: whole sequences, ordinary autodiff."""
  _, params, reference = by_hand.model_in_float64()
  stream = TASK.examples("train", seed=3, start=1)
  rows = [next(stream), next(stream)]

  def margins(params):
    found = []
    for row in rows:
      group = br.Group.create(
          row.prompt_ids, [row.answer_ids, row.rejected_ids],
          config=model.config,
      )
      ratio = br.dense_log_probs(model, params, group) - br.dense_log_probs(
          model, reference, group
      )
      better, worse = jnp.sum(jnp.where(group.mask(), ratio, 0), -1)
      found.append(better - worse)
    return jnp.stack(found)

  return rows, *jax.vjp(jax.jit(margins), params)


def dpo(h):
  return jnp.mean(jnp.log(1 + jnp.exp(-BETA * h)))


def updated(params, grads):
  optimizer = optax.adam(RATE)
  change, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, change)


@pytest.mark.parametrize("mode", ("exact", "full"))
def test_an_update_is_the_one_by_hand(x64, mode):
  model, params, reference = by_hand.model_in_float64()
  phase = phase_of(model, prefix_gradient=mode)
  rows, h, pulled = by_dense(model)
  value, slope = jax.value_and_grad(dpo)(h)
  (grads,) = pulled(slope)
  outcome = phase.step(
      step_lib.create(jax.tree.map(jnp.copy, params), phase.learner.optimizer),
      reference, 1, jax.random.key(0),
  )
  assert outcome.position == 3
  assert outcome.examples == tuple(row.id for row in rows)
  scalars = outcome.scalars
  np.testing.assert_allclose(scalars["loss"], value, rtol=1e-9)
  np.testing.assert_allclose(scalars["margin"], h.mean(), rtol=1e-9)
  assert scalars["ordered"] == np.mean(h > 0)
  np.testing.assert_allclose(
      scalars["grad_norm"], optax.tree.norm(grads), rtol=1e-9
  )
  found = by_hand.leaves(outcome.train_state.params)
  start = by_hand.leaves(params)
  for path, x in by_hand.leaves(updated(params, grads)).items():
    moved = np.linalg.norm(x - start[path])
    assert moved and np.linalg.norm(found[path] - x) <= 1e-7 * moved, path


def test_phases_that_cannot_be():
  model, _, _ = by_hand.model_in_float64()
  with pytest.raises(ValueError, match="not by MaximumLikelihood"):
    dataclasses.replace(phase_of(model), learner=learner_lib.Learner(
        model, algorithms.MaximumLikelihood(), optax.adam(RATE)
    ))
  with pytest.raises(ValueError, match="branches_at_once=1 would divide"):
    phase_of(model, schedule=br.Schedule(branches_at_once=1))
  with pytest.raises(ValueError, match="max_tokens=4.*'pair-0' has .* of 5"):
    dataclasses.replace(phase_of(model), max_tokens=4)
  with pytest.raises(ValueError, match="prompts must be at least 1, not 0"):
    dataclasses.replace(phase_of(model), prompts=0)

  def with_row(**changes):
    row = dataclasses.replace(ROWS[0], **changes)
    rows = {"train": [ROWS[1], row]}
    return phase_of(model, task=dataclasses.replace(TASK, rows=rows))

  with pytest.raises(ValueError, match="'pair-0' has no rejected_ids"):
    with_row(rejected_ids=None)
  with pytest.raises(ValueError, match="'pair-0' are the same"):
    with_row(rejected_ids=ROWS[0].answer_ids)
  with pytest.raises(ValueError, match="exceed the model's max_positions=256"):
    with_row(prompt_ids=np.ones(255, np.int32))


def test_the_examples_of_the_page_run_and_go_on(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = (pathlib.Path(__file__).parent.parent / "docs" / "data.md").read_text()
  blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
  score, make, train = [code for kind, code in blocks if kind == "python"]
  rows = [code for _, code in blocks if code.startswith('{"')]
  pathlib.Path("prompts.jsonl").write_text(rows[0])
  other = rows[-1].replace("Explain", "Define")
  pathlib.Path("pairs.jsonl").write_text(rows[-1] + other)
  pretrained = tiny_tasks.chat().pretrained
  params = pretrained.model.init(
      jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  start = dataclasses.replace(pretrained, params=params)
  scope = {"start": start}
  exec(score, scope)
  exec(make, scope)
  (row,) = scope["task"].split("train")
  ids = tiny_tasks.chat().encode
  assert scope["task"].reward(row, ids(f"I count {row.details['result']}")) == 1
  assert scope["task"].reward(row, ids("About 25")) == 0
  assert "steps=500, prompts=16" in train
  exec(train.replace("steps=500, prompts=16", "steps=1, prompts=1"), scope)
  moved = jax.tree.map(
      lambda x, y: np.ptp(x - y), scope["trained"].params, params
  )
  assert max(jax.tree.leaves(moved)) > 0

  longer = training.PairwiseSettings(steps=2, prompts=1)
  training.train(start, scope["task"], longer, "runs/pairs")
  logged = metrics.read(pathlib.Path("runs/pairs"))
  assert [row["step"] for row in logged] == [1, 2]
  assert "margin" in logged[1] and "eval/reward" not in logged[1]
  pathlib.Path("pairs.jsonl").write_text(rows[-1] + other.replace("}", " }"))
  task = tasks.from_files("pairs.jsonl", text=tiny_tasks.chat())
  with pytest.raises(ValueError, match="task.rows.train: '1 rows .* there"):
    training.train(start, task, longer, "runs/pairs")
