# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled gradients, draw by draw, against a dense model that knows the draws.

In the dense model the keys and values of a stretch of a prefix send back w
times the gradient that comes from beyond the stretch: 1/q where it was drawn, 0
where not. That is what popping or not popping the stretch is meant to be.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import estimators
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import optimizers
from tests import by_hand
from tests import tiny
from tests import tree_sampled_test
from tests import tree_test

TOLERANCE = 1e-11
CHUNKS = br.Schedule(chunk_size=4, activations="recompute")
BUDGET = 1.4  # no other test has compiled for it
SOME = br.Sampling(chunks=BUDGET)
PROMPTS = 16, 12  # prefixes of 15 and 11: four chunks of 4, and three


@pytest.fixture
def evenly(monkeypatch):
  """Draws all chunks with one probability, which makes draws known by hand."""
  monkeypatch.setattr(
      estimators, "probabilities",
      lambda sampling, size_N, waiting_N, budget: jnp.where(
          waiting_N, jnp.clip(budget / jnp.sum(waiting_N), 0, 1), 0
      ),
  )


def attend(stretch_GT, weight_GT, q_KGRTD, k_KGTD, v_KGTD):
  """Causal attention that weighs what is sent to other stretches."""
  def weighed(x_KGTD):
    still_KGTD = jax.lax.stop_gradient(x_KGTD)
    return still_KGTD + weight_GT[None, ..., None] * (x_KGTD - still_KGTD)

  same = (stretch_GT[:, :, None] == stretch_GT[:, None])[None, :, None]
  of = "kgrtd,kgsd->kgrts"
  logits = jnp.where(
      same, jnp.einsum(of, q_KGRTD, k_KGTD),
      jnp.einsum(of, q_KGRTD, weighed(k_KGTD)),
  ) / np.sqrt(q_KGRTD.shape[-1])
  seen = np.tril(np.ones(logits.shape[-2:], bool))[None, None, None]
  probs = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
  of = "kgrts,kgsd->kgrtd"
  return jnp.einsum(of, jnp.where(same, probs, 0), v_KGTD) + jnp.einsum(
      of, jnp.where(same, 0, probs), weighed(v_KGTD)
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def dense_gradient(
    model, loss, params, tokens_GS, stretch_GS, weight_GS, args_GS
):
  """Of Σ loss(log p of the next token) · args, over whole sequences."""
  def value(params):
    hidden_GSM = model.apply(
        {"params": params}, tokens_GS, method="hidden",
        attend=functools.partial(attend, stretch_GS, weight_GS),
    )
    logits_GSV = hidden_GSM @ params["head"]["table"].T
    log_probs_GSV = jax.nn.log_softmax(logits_GSV)[:, :-1]
    log_probs_GS = jnp.take_along_axis(
        log_probs_GSV, tokens_GS[:, 1:, None], axis=2
    )[..., 0]
    return jnp.sum(loss(log_probs_GS) * args_GS[:, 1:])

  return jax.grad(value)(params)


def drawn_by_hand(key, count: int, q: float) -> list[bool]:
  """Chunk i is drawn if the uniform number of its own key is below q."""
  return [
      float(jax.random.uniform(jax.random.fold_in(key, i))) < q
      for i in range(count)
  ]


def group_gradient(model, params, group, weights_GT, scales, *, loss=jnp.sin):
  """The gradient of a group whose chunks are pulled back with these scales."""
  prompt, tokens = int(group.prompt_length), group.tails.shape[1]
  at = np.arange(prompt + tokens)
  stretch = np.where(at < prompt - 1, at // 4, len(scales))
  scale = np.append(scales, 1.0)[stretch]
  rows = group.tails.shape[0]
  head = np.broadcast_to(np.asarray(group.prompt)[:prompt], (rows, prompt))
  mask = np.arange(tokens) < np.asarray(group.tail_lengths)[:, None]
  args = np.concatenate(
      [np.zeros((rows, prompt)), np.where(mask, weights_GT, 0)], axis=1
  )
  return dense_gradient(
      model, loss, params, np.concatenate([head, group.tails], axis=1),
      np.broadcast_to(stretch, args.shape), np.broadcast_to(scale, args.shape),
      args,
  )


def group_by_hand(model, params, group, weights_GT, key, **options):
  """The gradient of a group by SOME, and which chunks are drawn."""
  count = -(-(int(group.prompt_length) - 1) // 4)
  drawn = drawn_by_hand(key, count, BUDGET / count)
  scales = [count / BUDGET * x for x in drawn]
  return group_gradient(
      model, params, group, weights_GT, scales, **options
  ), drawn


def groups_of(config):
  return [
      tiny.group(prompt=prompt, tails=(5, 2, 3), config=config, seed=seed)
      for seed, prompt in enumerate(PROMPTS)
  ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stacked_groups_pull_back_the_chunks_that_their_own_keys_draw(
    x64, evenly, seed
):
  model, params, _ = by_hand.model_in_float64()
  groups, key = groups_of(model.config), jax.random.key(seed)
  weights = np.random.default_rng(1).normal(size=(2, 3, 8))
  evaluation, found = br.value_and_grad(
      model, tiny.loss, schedule=CHUNKS, prefix_gradient="sampled",
      sampling=SOME,
  )(params, br.stack(groups), jnp.asarray(weights), key=key)
  wanted, draws = zip(*(
      group_by_hand(
          model, params, group, weights[place], jax.random.fold_in(key, place)
      ) for place, group in enumerate(groups)
  ), strict=True)
  report = evaluation.prefix_pass
  for place, drawn in enumerate(draws):
    count = len(drawn)
    assert report.drawn[place, :count].tolist() == drawn
    np.testing.assert_allclose(
        report.probability[place], [BUDGET / count] * count + [0] * (4 - count)
    )
  assert tiny.worst(found, jax.tree.map(jnp.add, *wanted)) <= TOLERANCE


def test_a_learner_draws_the_chunks_of_every_group_by_its_place(x64, evenly):
  model, params, _ = by_hand.model_in_float64()
  mine = learner_lib.Learner(
      model, algorithms.MaximumLikelihood(), optimizers.adamw(lambda _: 1e-3),
      "sampled", SOME, CHUNKS,
  )
  groups, key = groups_of(model.config), jax.random.key(4)
  batch = [
      experience.Experience(
          "", group, np.zeros((3, 8)), np.zeros(3), np.ones(3, bool)
      ) for group in groups
  ]
  weights = np.random.default_rng(1).normal(size=(2, 3, 8))
  _, _, found = mine.batch_gradient(
      params, batch, (jnp.asarray(weights),), version=0, key=key
  )
  wanted = [
      group_by_hand(
          model, params, group, -weights[place], jax.random.fold_in(key, place),
          loss=_itself,
      )[0] for place, group in enumerate(groups)
  ]
  assert tiny.worst(found, jax.tree.map(jnp.add, *wanted)) <= TOLERANCE


@pytest.mark.exhaustive
def test_autodiff_of_stacked_groups_draws_as_one_pass_does(x64, evenly):
  model, params, _ = by_hand.model_in_float64()
  groups, key = groups_of(model.config), jax.random.key(3)
  weights = np.random.default_rng(1).normal(size=(2, 3, 8))
  found = jax.grad(lambda params: tiny.loss(
      br.log_probs(
          model, params, br.stack(groups), schedule=CHUNKS, sampling=SOME,
          prefix_gradient="sampled", key=key,
      ), weights,
  ))(params)
  wanted, draws = zip(*(
      group_by_hand(
          model, params, group, weights[place], jax.random.fold_in(key, place)
      ) for place, group in enumerate(groups)
  ), strict=True)
  assert draws[0][:3] != draws[1]
  assert tiny.worst(found, jax.tree.map(jnp.add, *wanted)) <= TOLERANCE


def _itself(x):
  return x


def test_importance_weighs_what_it_draws_by_what_it_says_it_drew_with(x64):
  model, params, _ = by_hand.model_in_float64()
  group, skipped = groups_of(model.config)[0], 0
  weights = np.random.default_rng(1).normal(size=(3, 8))
  for seed in range(4):
    evaluation, found = br.value_and_grad(
        model, tiny.loss, schedule=CHUNKS, prefix_gradient="sampled",
        sampling=br.Sampling(chunks=2.0),
    )(params, group, jnp.asarray(weights), key=jax.random.key(seed))
    q, drawn = (
        np.asarray(x) for x in (
            evaluation.prefix_pass.probability, evaluation.prefix_pass.drawn
        )
    )
    assert [
        drawn_by_hand(jax.random.key(seed), 4, q[i])[i] for i in range(4)
    ] == drawn.tolist()
    assert len(set(q.tolist())) == 4
    wanted = group_gradient(model, params, group, weights, drawn / q)
    assert tiny.worst(found, wanted) <= TOLERANCE
    skipped += 4 - drawn.sum()
  assert skipped


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_tree_pulls_back_the_runs_that_are_drawn_and_those_with_loss(
    x64, evenly, seed
):
  """Runs by hand: two of the root, one each of A, of what is below, and of B.

  A has loss of its own and takes no number; the others are numbered as they
  are pushed.
  """
  model, params, _ = by_hand.model_in_float64()
  sequences = tree_test.sequences_of(tree_sampled_test.SHAPE)
  trained = [[p >= 21 for p in range(len(ids))] for ids in sequences]
  for row in (0, 1):
    trained[row][37:53] = [False] * 16
  for row in (3, 4):
    trained[row][21:37] = [False] * 16
  tree = br.Tree.from_sequences(
      sequences, config=model.config, trained=trained
  )
  key = jax.random.key(seed)
  weights = tree_test.weights_of(tree)
  evaluation, found = br.value_and_grad(
      model, tiny.loss, prefix_gradient="sampled", sampling=SOME,
      schedule=tree_sampled_test.SCHEDULE,
  )(params, tree, tree.sum_over_leaves(weights), key=key)
  drawn = drawn_by_hand(key, 4, BUDGET / 4)
  assert evaluation.prefix_pass.drawn.tolist() == drawn
  first, second, below, other = (4 / BUDGET * x for x in drawn)
  # Ends of runs, their weights; what comes after is a leaf.
  runs = {
      0: [(10, first), (20, second), (36, 1.0), (52, below)],
      2: [(10, first), (20, second), (36, 1.0)],
      3: [(10, first), (20, second), (36, other)],
  }
  runs |= {1: runs[0], 4: runs[3]}
  shape = tree.paths.shape
  tokens, stretch = np.zeros(shape, np.int32), np.full(shape, -1)
  weight, mask = np.ones(shape), np.zeros(shape, bool)
  for row, ids in enumerate(sequences):
    tokens[row, : len(ids)], mask[row, : len(ids)] = ids, trained[row]
    begin = 0
    for number, (end, of_run) in enumerate(runs[row]):
      stretch[row, begin:end], weight[row, begin:end] = number, of_run
      begin = end
  wanted = dense_gradient(
      model, jnp.sin, params, tokens, stretch, weight,
      np.where(mask, weights, 0),
  )
  assert tiny.worst(found, wanted) <= TOLERANCE
