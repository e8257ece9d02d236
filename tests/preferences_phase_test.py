# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The phase of given preference pairs, against the same update by hand."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay import tasks
from branch_replay.rl import preference
from branch_replay.training import algorithms
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
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


def phase_of(model, loss=None, *, task=TASK, schedule=None, **changes):
  learner = learner_lib.Learner(
      model, algorithms.Preference(loss or preference.Dpo(BETA)),
      optax.adam(RATE), schedule=schedule or br.Schedule(chunk_size=4),
      **changes,
  )
  return pairwise.Pairwise(
      "pairs", task, learner, steps=2, prompts=2, max_tokens=8, seed=3,
      learning_rate=lambda update: RATE,
  )


def margins(model, params, reference, rows, prefix_gradient=None):
  """h of each row, by whole sequences and ordinary autodiff."""
  found = []
  for row in rows:
    group = br.Group.create(
        row.prompt_ids, [row.answer_ids, row.rejected_ids], config=model.config
    )

    def total(params, group=group):
      if prefix_gradient is None:
        log_probs = br.dense_log_probs(model, params, group)
      else:
        log_probs = br.log_probs(
            model, params, group, prefix_gradient=prefix_gradient
        )
      return jnp.sum(jnp.where(group.mask(), log_probs, 0), -1)

    better, worse = total(params) - total(reference)
    found.append(better - worse)
  return jnp.stack(found)


def dpo(h):
  return jnp.mean(jnp.log(1 + jnp.exp(-BETA * h)))


def ipo(h):
  return jnp.mean((h - 1 / (2 * BETA)) ** 2)


def updated(params, grads):
  optimizer = optax.adam(RATE)
  change, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, change)


@pytest.mark.parametrize(
    "mode,loss,wanted",
    [
        ("exact", preference.Dpo(BETA), dpo),
        ("full", preference.Dpo(BETA), dpo),
        ("stop", preference.Dpo(BETA), dpo),
        ("sampled", preference.Dpo(BETA), dpo),
        ("exact", preference.Ipo(BETA), ipo),
    ],
)
def test_an_update_is_the_one_by_hand(x64, mode, loss, wanted):
  model, params, reference = by_hand.model_in_float64()
  phase = phase_of(
      model, loss, prefix_gradient=mode,
      # Enough that every chunk is pulled back, with weight 1.
      sampling=br.Sampling(chunks=100.0),
  )
  stream = TASK.examples("train", seed=3, start=1)
  rows = [next(stream), next(stream)]
  h, pulled = jax.vjp(
      lambda params: margins(
          model, params, reference, rows, "stop" if mode == "stop" else None
      ),
      params,
  )
  value, slope = jax.value_and_grad(wanted)(h)
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
      scalars["grad_norm"], optax.global_norm(grads), rtol=1e-9
  )
  found = by_hand.leaves(outcome.train_state.params)
  start = by_hand.leaves(params)
  for path, x in by_hand.leaves(updated(params, grads)).items():
    moved = np.linalg.norm(x - start[path])
    assert moved and np.linalg.norm(found[path] - x) <= 1e-7 * moved, path


def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
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
  scope = {"pretrained": dataclasses.replace(pretrained, params=params)}
  exec(score, scope)
  exec(make, scope)
  (row,) = scope["task"].split("train")
  ids = tiny_tasks.chat().encode
  assert scope["task"].reward(row, ids(f"I count {row.details['result']}")) == 1
  assert scope["task"].reward(row, ids("About 25")) == 0
  assert "steps=500, prompts=16" in train
  exec(train.replace("steps=500, prompts=16", "steps=1, prompts=1"), scope)
  moved = jax.tree.map(lambda x, y: np.ptp(x - y), scope["params"], params)
  assert max(jax.tree.leaves(moved)) > 0


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


def test_a_run_of_files_goes_on_and_refuses_a_changed_file(tmp_path):
  """Without a reward there is no evaluation, and none is asked for."""
  path = tmp_path / "pairs.jsonl"
  rows = [
      {"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "note": n}
      for n in range(12)
  ]
  config = br.ModelConfig(
      vocab_size=100, width=8, num_layers=1, num_heads=1, num_kv_heads=1,
      head_dim=8, ffn_width=8, max_positions=64,
  )
  model = br.Decoder(config)
  params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]

  def run_of(steps):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    phase = phase_of(model, task=tasks.from_files(str(path)))
    phase = dataclasses.replace(phase, steps=steps)
    return loop.TrainingRun(model, (phase,), None, 0, 1)

  loop.train(run_of(2), params, tmp_path / "run")
  longer = loop.train(run_of(3), params, tmp_path / "run")
  straight = loop.train(run_of(3), params, tmp_path / "straight")
  jax.tree.map(np.testing.assert_array_equal, longer, straight)
  logged = metrics.read(tmp_path / "run")
  assert [row["step"] for row in logged] == [1, 2, 3]
  assert "margin" in logged[0] and "eval/reward" not in logged[0]
  rows[7]["note"] = -1
  with pytest.raises(ValueError, match=r"task.rows.train: '11 rows .* there"):
    loop.train(run_of(4), params, tmp_path / "run")
