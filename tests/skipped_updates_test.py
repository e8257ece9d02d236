# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates that a learner skips, and those that narrow parameters lose."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branch_replay import tasks
from branch_replay.rl import objectives
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import phases
from tests import tiny

SMALL = dataclasses.replace(tiny.BASE, num_layers=1)
ROLLOUTS = experience.Rollouts(2, 3)


@dataclasses.dataclass(frozen=True)
class Poisoned(algorithms.PolicyGradient):
  """GRPO whose advantages are no numbers in updates that are to be bad."""

  bad: list[bool] = dataclasses.field(default_factory=list)  # by update

  def prepare(self, batch, known):
    batch, (answers,) = super().prepare(batch, known)
    if self.bad and self.bad.pop(0):
      nan = jnp.full_like(answers.advantages, jnp.nan)
      answers = dataclasses.replace(answers, advantages=nan)
    return batch, (answers,)


def example(number: int) -> tasks.Example:
  ids = np.random.default_rng(number).integers(3, SMALL.vocab_size, 6)
  return tasks.Example(
      f"row-{number}", ids.astype(np.int32), np.array([1, 0], np.int32), "1",
      {},
  )


TASK = task_lib.Task(
    "toy", SMALL.vocab_size, (0, 5, 6, 7, 8, 9), lambda _, ids: sum(ids) % 7,
    {"train": [example(0), example(1)]},
)


def phase(model, **changes):
  algorithm = Poisoned(objectives.grpo(kl_coefficient=0.0))
  learner = learner_lib.Learner(model, algorithm, optax.sgd(1e-2), **changes)
  return phases.Reinforce(
      name="rl", task=TASK, learner=learner, rollouts=ROLLOUTS, steps=1,
      prompts=2, epochs=2, updates=2, capture_every=2, most_prompts=None,
      seed=0, learning_rate=lambda _: 1e-2,
  )


def test_a_skipped_update_makes_no_version_and_others_go_on():
  model, params = tiny.model(SMALL)
  one = phase(model)

  def after(*bad):
    one.learner.algorithm.bad.extend(bad)
    train_state = one.learner.create(jax.tree.map(jnp.copy, params))
    return one.step(train_state, None, 0, jax.random.key(7)).train_state

  # The captures of the third update are those of parameters updated once.
  found = after(True, False, False, False)
  assert found.step == 3 and found.skipped == 0
  found = after(False, False, True, True)
  assert found.step == 2 and found.skipped == 2
  found = after(True, True, True, True)
  assert found.step == 0 and found.skipped == 4
  chex.assert_trees_all_equal(found.params, params)


@pytest.mark.exhaustive
def test_a_learner_says_what_narrow_parameters_lose():
  model, params = tiny.model(
      dataclasses.replace(SMALL, param_dtype="bfloat16")
  )
  with pytest.warns(UserWarning, match="updates smaller than half a step"):
    narrow = dataclasses.replace(
        phase(model, param_dtype="file"), updates=1, capture_every=1
    )
    train_state = narrow.learner.create(jax.tree.map(jnp.copy, params))
  with pytest.warns(UserWarning, match=r"\d% of the first update were") as said:
    done = narrow.step(train_state, None, 0, jax.random.key(7))
  assert len([one for one in said if "first update" in str(one.message)]) == 1
  assert 0 < done.scalars["rounded_away"] <= 1
  wide = phase(model).learner.create(params)
  chex.assert_type(jax.tree.leaves(wide.params), jnp.float32)


def test_a_learner_refuses_a_dtype_that_is_none():
  model, _ = tiny.model(SMALL)
  with pytest.raises(ValueError, match="param_dtype='bf16'"):
    phase(model, param_dtype="bf16")
