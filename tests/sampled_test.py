# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampled prefix pass is unbiased, and runs what it says it runs."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import compiled
from branch_replay.engine import estimators
from branch_replay.engine import readout
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import steps
from tests import memory_test
from tests import tiny

CHUNKS = br.Schedule(chunk_size=4, activations="recompute")
LAWS = {
    "some": br.Sampling(chunks=1.5),
    "most, capped": br.Sampling(chunks=3.5),
}


@functools.cache
def problem():
  """A prefix of 15 positions in 4 chunks, in float64."""
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=16, tails=(5, 2, 3))
  return decoder, params, group, tiny.weights(group)


def task_of(sampling):
  decoder, _, group, _ = problem()
  return spec_lib.of_group(
      decoder, group, readout.LogProbs(), "sampled", CHUNKS, sampling
  )


@functools.cache
def visited():
  """State, gradients and accumulator after the tails, whatever the law."""
  decoder, params, group, weights = problem()
  state = br.capture(decoder, params, group, schedule=CHUNKS)

  @jax.jit
  def visit():
    accumulator = tuple(jnp.zeros_like(x) for x in state.mixer)
    return compiled.visit_branches(
        task_of(br.Sampling()), params, spec_lib.zero_grads(params),
        accumulator, state, group,
        steps.Pull(spec_lib.cotangent_of(tiny.loss), (weights,)),
    )[:2]

  return state, *visit()


def prepared(sampling):
  """The prefix pass alone, after capture and tails."""
  _, params, *_ = problem()
  task, (state, grads, accumulator) = task_of(sampling), visited()

  @jax.jit
  def run(uniform_N):
    gradient, _, report = compiled.pop_chunks(
        task, params, grads, accumulator, state, task.chunks(state.capacity),
        uniform_N=uniform_N,
    )
    return gradient, report

  return run


def exact_gradient():
  decoder, params, group, weights = problem()
  return br.value_and_grad(decoder, tiny.loss, schedule=CHUNKS)(
      params, group, weights
  )[1]


def mean_over_masks(run):
  """The expectation over all draws, their total weight, chunks expected."""
  total, mean, counts = 0.0, None, 0.0
  for mask in itertools.product((0.0, 1.0), repeat=4):
    grads, report = run(jnp.array(mask))  # 0 always runs, 1 never
    q, drawn = np.asarray(report.probability), np.asarray(report.drawn)
    np.testing.assert_array_equal(drawn, np.array(mask) == 0)
    weight = float(np.prod(np.where(drawn, q, 1 - q)))
    total += weight
    counts += weight * drawn.sum()
    weighted = jax.tree.map(lambda x, w=weight: w * x, grads)
    mean = weighted if mean is None else jax.tree.map(jnp.add, mean, weighted)
  return mean, total, counts


@pytest.mark.parametrize("name", LAWS)
def test_the_mean_over_all_masks_is_the_exact_gradient(x64, name):
  mean, total, counts = mean_over_masks(prepared(LAWS[name]))
  assert total == pytest.approx(1, abs=1e-12)
  assert tiny.worst(mean, exact_gradient()) <= 1e-12
  assert counts == pytest.approx(LAWS[name].chunks, abs=0.2)


def test_the_mean_over_all_masks_shows_a_missing_weight(x64, monkeypatch):
  # Negative control: the same mean, of a sampler that forgets 1/q.
  monkeypatch.setattr(estimators, "weight", lambda q, drawn: 1.0)
  mean, _, _ = mean_over_masks(prepared(LAWS["some"]))
  assert tiny.worst(mean, exact_gradient()) > 0.05


@pytest.mark.exhaustive
def test_a_budget_of_all_chunks_is_the_exact_gradient(x64):
  decoder, params, group, weights = problem()
  for law in ("importance", "top"):
    evaluation, gradient = br.value_and_grad(
        decoder, tiny.loss, schedule=CHUNKS, prefix_gradient="sampled",
        sampling=br.Sampling(chunks=9, law=law),
    )(params, group, weights, key=jax.random.key(0))
    assert tiny.worst(gradient, exact_gradient()) <= 1e-11
    assert evaluation.prefix_pass.drawn.all()


@pytest.mark.exhaustive
def test_one_pass_and_autodiff_draw_the_same_chunks(x64):
  decoder, params, group, weights = problem()
  options = dict(
      schedule=CHUNKS, prefix_gradient="sampled", sampling=LAWS["some"]
  )
  gradients = []
  for seed in (0, 0, 1):
    key = jax.random.key(seed)
    _, gradient = br.value_and_grad(decoder, tiny.loss, **options)(
        params, group, weights, key=key
    )
    gradients.append(gradient)
  chex.assert_trees_all_equal(gradients[0], gradients[1])
  assert tiny.worst(gradients[0], gradients[2]) > 1e-3
  by_autodiff = jax.grad(
      lambda p: tiny.loss(
          br.log_probs(decoder, p, group, key=jax.random.key(0), **options),
          weights,
      )
  )(params)
  assert tiny.worst(by_autodiff, gradients[0]) <= 1e-11


def test_top_runs_the_chunks_of_the_largest_cotangent(x64):
  run = prepared(br.Sampling(chunks=2, law="top"))
  everything = prepared(br.Sampling(chunks=4, law="top"))
  _, report = run(jnp.full(4, 0.5))
  _, whole = everything(jnp.full(4, 0.5))
  assert int(report.drawn.sum()) == 2
  skipped = np.asarray(whole.size)[~np.asarray(report.drawn)].max()
  assert np.asarray(report.size)[np.asarray(report.drawn)].min() > skipped / 2
  np.testing.assert_array_equal(report.probability, report.drawn)


def test_stacked_groups_draw_with_keys_of_their_own():
  decoder, params = tiny.model(tiny.BASE)
  groups = br.stack([tiny.group(prompt=40, tails=(3, 2), seed=0)] * 4)
  evaluation, _ = br.value_and_grad(
      decoder, tiny.loss, schedule=CHUNKS, prefix_gradient="sampled",
      sampling=br.Sampling(chunks=4),
  )(params, groups, tiny.weights(groups), key=jax.random.key(0))
  assert len({tuple(row.tolist()) for row in evaluation.prefix_pass.drawn}) > 1


def test_probabilities_meet_the_budget_between_floor_and_cap():
  rng = np.random.default_rng(0)
  for budget in (0.5, 2.0, 5.5, 9.0):
    sizes = jnp.asarray(np.exp(3 * rng.normal(size=12)), jnp.float32)
    waiting = jnp.arange(12) < 10
    q = estimators.probabilities(
        br.Sampling(), sizes, waiting, budget
    )
    assert float(q.sum()) == pytest.approx(budget, rel=1e-3)
    assert float(q.max()) <= 1 and not q[10:].any()
    assert float(q[:10].min()) >= min(0.05, budget / 10) - 1e-6
    order = np.argsort(sizes[:10])
    assert (np.diff(np.asarray(q)[order]) >= -1e-6).all()


@pytest.mark.exhaustive
def test_sampling_holds_no_second_copy_of_the_accumulator():
  exact = memory_test.temporaries(4096, 4)
  sampled = memory_test.temporaries(4096, 4, mode="sampled")
  assert sampled <= exact + 0.02 * memory_test.state_bytes(4096)


def test_bad_settings():
  decoder, params = tiny.model(tiny.BASE)
  with pytest.raises(ValueError, match="pass key="):
    br.log_probs(
        decoder, params, tiny.group(), prefix_gradient="sampled"
    )
  with pytest.raises(ValueError, match="Unknown law 'greedy'"):
    br.Sampling(law="greedy")
  with pytest.raises(ValueError, match="chunks must be > 0"):
    br.Sampling(chunks=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_probabilities_of_a_narrow_accumulator_are_not_narrow(dtype):
  config = tiny.BASE
  rng = np.random.default_rng(0)
  # Sums of squares of 2¹⁴ and more: a narrow one stops growing, or overflows.
  cotangent = 30 * rng.normal(size=(2, 2, 2, 64, 16))
  accumulator = tuple(jnp.asarray(x, dtype) for x in cotangent)
  starts_N = jnp.arange(4) * 16
  size_N = estimators.sizes(config, accumulator, starts_N, 3)
  assert size_N.dtype == jnp.float32
  by_hand = np.stack([np.asarray(x, np.float64) for x in accumulator])
  by_hand = np.sqrt(
      (by_hand.reshape(2, 2, 2, 4, 16, 16) ** 2).sum(axis=(0, 1, 2, 4, 5))
  )
  np.testing.assert_allclose(size_N, by_hand, rtol=1e-6)
  q_N = estimators.probabilities(
      br.Sampling(chunks=2), size_N, jnp.ones(4, bool), jnp.float32(2)
  )
  np.testing.assert_allclose(
      q_N, 2 * by_hand / by_hand.sum(), rtol=1e-5
  )
  weight_N = estimators.weight(q_N, True)
  np.testing.assert_allclose(q_N * weight_N, 1, rtol=1e-6)


def test_a_narrow_accumulator_is_sampled_from_by_wide_numbers():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group(prompt=33)
  evaluation, _ = jax.eval_shape(
      lambda params: br.value_and_grad(
          decoder, tiny.loss, prefix_gradient="sampled",
          schedule=br.Schedule(chunk_size=8, accumulator_dtype="bfloat16"),
      )(params, group, tiny.weights(group), key=jax.random.key(0)), params,
  )
  assert evaluation.prefix_pass.probability.dtype == jnp.float32
  assert evaluation.prefix_pass.size.dtype == jnp.float32
