# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A sampled gradient of a tree is unbiased, and draws what may be left out."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import draws as draws_lib
from branch_replay.engine import estimators
from branch_replay.engine import gradients
from branch_replay.engine.runs import Action
from tests import sampled_test
from tests import tiny
from tests import tree_test

# Two runs of the root and one each of two inner segments have no loss; an
# inner segment between has.
SHAPE = (21, [
    (16, [(16, [(3, []), (6, [])]), (4, [])]), (16, [(5, []), (2, [])]),
])
SCHEDULE = br.Schedule(chunk_size=16, activations="recompute")
LAWS = {
    "two": br.Sampling(chunks=2),
    "fewer": br.Sampling(chunks=1.5),
}


def problem(name):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  sequences = tree_test.sequences_of(SHAPE)
  trained = [[p >= 21 for p in range(len(ids))] for ids in sequences]
  for row in (0, 1):  # an observation
    trained[row][37:53] = [False] * 16
  for row in (3, 4):
    trained[row][21:37] = [False] * 16
  tree = br.Tree.from_sequences(
      sequences, config=decoder.config, trained=trained
  )
  return decoder, params, tree, tree_test.weights_of(tree)


def gradient(problem, sampling, key=None, **options):
  decoder, params, tree, weights = problem
  options = dict(schedule=SCHEDULE) | options
  return br.value_and_grad(
      decoder, tiny.loss, prefix_gradient="sampled", sampling=sampling,
      **options,
  )(params, tree, tree.sum_over_leaves(weights),
    key=jax.random.key(0) if key is None else key)


def mean_over_masks(problem, sampling, monkeypatch):
  """The expectation over all draws, and how many runs are expected."""
  def run(uniform_N):
    monkeypatch.setattr(
        estimators, "uniforms", lambda key, count: uniform_N
    )
    evaluation, grads = gradient(problem, sampling)
    return grads, evaluation.prefix_pass

  mean, total, expected = sampled_test.mean_over_masks(run)
  assert total == pytest.approx(1, abs=1e-12)
  return mean, expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,law", [
    ("llama", "two"), ("window and full", "fewer"),
])
def test_the_mean_over_all_draws_is_the_exact_gradient(
    x64, monkeypatch, name, law
):
  arguments = problem(name)
  mean, expected = mean_over_masks(arguments, LAWS[law], monkeypatch)
  wanted = tree_test.dense_gradient(*arguments)
  assert tiny.worst(mean, wanted) <= 1e-11
  assert expected == pytest.approx(LAWS[law].chunks, abs=0.2)


@pytest.mark.exhaustive
def test_the_mean_over_all_draws_shows_a_missing_weight(x64, monkeypatch):
  monkeypatch.setattr(estimators, "weight", lambda q, drawn: 1.0)
  arguments = problem("mistral")  # a model that no other test has compiled
  mean, _ = mean_over_masks(arguments, LAWS["fewer"], monkeypatch)
  assert tiny.worst(mean, tree_test.dense_gradient(*arguments)) > 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("law", ("importance", "top"))
def test_a_budget_of_all_runs_is_the_exact_gradient(x64, law):
  arguments = problem("llama")
  sampling = br.Sampling(chunks=9, law=law)
  evaluation, found = gradient(arguments, sampling)
  assert tiny.worst(found, tree_test.dense_gradient(*arguments)) <= 1e-11
  assert evaluation.prefix_pass.drawn.all()
  assert evaluation.prefix_pass.drawn.shape == (4,)


@pytest.mark.exhaustive
def test_one_pass_and_autodiff_draw_the_same_runs_on_any_devices(x64):
  arguments = decoder, params, tree, weights = problem("window and full")
  sampling = LAWS["fewer"]
  one, found = gradient(arguments, sampling)
  by_autodiff = jax.grad(lambda params: tiny.loss(
      br.log_probs(
          decoder, params, tree, prefix_gradient="sampled", schedule=SCHEDULE,
          sampling=sampling, key=jax.random.key(0),
      ), weights,
  ))(params)
  assert tiny.worst(by_autodiff, found) <= 1e-11
  layout = sharding.sharded(params, 2)
  several, same = gradient(
      (decoder, layout.place(params), tree, weights), br.Sampling(chunks=9),
      schedule=dataclasses.replace(SCHEDULE, layout=layout),
  )
  assert several.prefix_pass.drawn.all()
  exact = tree_test.dense_gradient(*arguments)
  assert tiny.worst(same, exact) <= 1e-11
  assert tiny.worst(found, exact) > 1e-3, "a sample, not the exact gradient"
  other, _ = gradient(arguments, sampling, jax.random.key(3))
  assert (other.prefix_pass.drawn != one.prefix_pass.drawn).any()


def test_sizes_are_those_of_the_runs_on_the_state():
  """By hand: two layers of one head, three runs of 2, 3 and 1 positions."""
  config = tiny.BASE
  total = tuple(
      jnp.asarray(np.random.default_rng(i).normal(size=(2, 1, 8, 4)))
      for i in range(2)
  )
  starts = jnp.array([0, 2, 5, 2**31 - 1])
  found = estimators.sizes(config, total, starts, 2)
  wanted = [
      np.sqrt(sum(np.sum(np.square(x[:, :, a:b])) for x in total))
      for a, b in ((0, 2), (2, 5), (5, 8))
  ]
  np.testing.assert_allclose(found, [*wanted, 0], rtol=1e-6)


def test_runs_with_loss_are_not_drawn():
  """And the budget is shared out between what is pushed and what is to come."""
  *_, tree, _ = problem("llama")
  decoder, _ = tiny.model(tiny.BASE)
  task, program = gradients.plan_tree(
      decoder, tree, br.LogProbs(), "sampled", SCHEDULE,
      sampling=br.Sampling(chunks=2),
  )
  pushed = program.pushed
  assert [run.read is None for run in pushed].count(True) == 4
  assert any(run.read for run in pushed) and program.depth == 4
  draws, found = draws_lib.Draws(task, program, jax.random.key(0)), []
  spent = estimators.PrefixPass(jnp.float32(0.25), True, 1.0)
  for action, run, _ in program.steps:
    if action == Action.PUSH:
      draws.pushed(run)
    elif action == Action.POP:
      draw = draws.draw()
      assert (draw is None) == (run.read is not None)
      found += [draw] * (draw is not None)
      draws.popped(draw and spent)
  # Three of four runs are pushed at first, then the last is with the root's.
  assert [float(draw.budget) for draw in found] == pytest.approx(
      [2 * 3 / 4, 1.75, 1.5, 1.25]
  )
  assert [int(draw.waiting_N.sum()) for draw in found] == [3, 3, 2, 1]
  chex.assert_trees_all_equal(draws.report().probability, jnp.full(4, 0.25))
