# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The load-balance term: its counts, and its gradient against autodiff."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import balance
from branch_replay.engine import estimators
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import runs
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.models import block
from branch_replay.models import expert_layers
from branch_replay.ops import experts as ops
from branch_replay.ops.attention import reference
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from tests import tiny
from tests import tree_test

TOLERANCE = 1e-11
COEFFICIENT = 5.0
CONFIG = tiny.in_float64(tiny.ARCHITECTURES["experts"])


def problem():
  decoder, params = tiny.model(CONFIG)
  group = tiny.group(12, (5, 0, 3))
  return decoder, params, group, tiny.weights(group)


def dense_term(
    decoder, params, tokens_GS, lengths_G, prefixes_G=0, counted_G=True
):
  """B of whole sequences, or of those that count, layer by layer, and f.

  Keys, values and probabilities of each one's prefix are constants.
  """
  experts = CONFIG.experts
  at_1S = jnp.arange(tokens_GS.shape[1])[None]
  lengths_G = jnp.where(counted_G, lengths_G, 0)
  real_GS = at_1S < lengths_G[:, None]
  tail_GS = at_1S >= jnp.broadcast_to(prefixes_G, lengths_G.shape)[:, None]

  def stop(x, axis):
    shape = [1] * x.ndim
    shape[axis - 1 : axis + 1] = tail_GS.shape  # rows, and tokens of each
    return jnp.where(tail_GS.reshape(shape), x, jax.lax.stop_gradient(x))

  def attend(q, k, v):
    return reference.causal(q, stop(k, 2), stop(v, 2))

  x_GSM = decoder.apply({"params": params}, tokens_GS, method="embed_tokens")
  positions_GS = jnp.broadcast_to(at_1S, tokens_GS.shape)
  terms, shares = [], []
  for layer in range(CONFIG.num_layers):
    of_layer = jax.tree.map(lambda x, layer=layer: x[layer], params["layers"])
    (x_GSM, _), seen = block.Block(CONFIG, "full", True).apply(
        {"params": of_layer}, x_GSM, positions_GS, attend,
        capture_intermediates=lambda module, _: isinstance(
            module, expert_layers.Router
        ),
        mutable=["intermediates"],
    )
    router = seen["intermediates"]["expand"]["router"]
    logits_NE = router["__call__"][0][0]
    p_GSE = ops.probabilities(experts, logits_NE).reshape(*tokens_GS.shape, -1)
    _, chosen_Nk = jax.lax.top_k(logits_NE, experts.top_k)
    hits_GSE = jax.nn.one_hot(chosen_Nk, experts.count).sum(axis=1).reshape(
        p_GSE.shape
    )
    real_GS1 = real_GS[..., None]
    f_E = (hits_GSE * real_GS1).sum((0, 1)) / (real_GS.sum() * experts.top_k)
    mean_E = (stop(p_GSE, 1) * real_GS1).sum((0, 1)) / real_GS.sum()
    terms.append(experts.count * jnp.vdot(f_E, mean_E))
    shares.append(f_E)
  return sum(terms) / len(terms), jnp.stack(shares)


def of_term(stopped=False):
  """The gradient of B, and f, by autodiff."""
  decoder, params, group, _ = problem()
  prefix = int(group.prompt_length) - 1
  return jax.jit(jax.grad(
      lambda p: dense_term(
          decoder, p, group.sequences()[:, :-1], prefix + group.tail_lengths,
          prefix if stopped else 0, group.tail_lengths > 0,
      ), has_aux=True,
  ))(params)


def added(grads, of_term):
  return jax.tree.map(lambda g, b: g + COEFFICIENT * b, grads, of_term)


@functools.cache
def dense():
  """Gradients of the loss without and with the term, and f."""
  plain = tiny.dense_gradient(*problem())
  more, load = of_term()
  return plain, added(plain, more), load


def run(decoder, params, group, weights, **options):
  return br.value_and_grad(
      decoder, tiny.loss, balance=COEFFICIENT, **options
  )(params, group, weights, key=jax.random.key(0))


def test_seeds_and_load_by_hand(x64):
  counts = jnp.array([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])  # 4 tokens
  np.testing.assert_allclose(
      balance.load(CONFIG, counts), [[0.75, 0.25, 0, 0], [0.25] * 4]
  )
  # 3 · E f / (L W)
  np.testing.assert_allclose(
      balance.seeds(CONFIG, 3.0, counts),
      [[1.125, 0.375, 0, 0], [0.375] * 4],
  )
  choices = jnp.array([[[[[0, 1], [0, 2]], [[1, 3], [0, 3]]]]] * 2)
  weights = jnp.array([[1, 1], [3, 0]])
  np.testing.assert_array_equal(
      balance.add(balance.zeros(CONFIG), choices, weights),
      [[2, 4, 1, 3]] * 2,
  )
  nothing = jnp.zeros((2, 1, 0, 2), jnp.int32), jnp.zeros((1, 0))
  assert not balance.add(balance.zeros(CONFIG), *nothing).any()


@pytest.mark.exhaustive
def test_exact_and_full_have_the_gradient_of_the_dense_term(x64):
  decoder, params, group, weights = problem()
  plain, wanted, load = dense()
  assert tiny.worst(plain, wanted) > 0.05  # the term is seen
  schedule = br.Schedule(
      chunk_size=4, branches_at_once=2, activations="recompute"
  )
  for mode in ("exact", "full"):
    evaluation, found = run(
        decoder, params, group, weights, schedule=schedule,
        prefix_gradient=mode,
    )
    assert tiny.worst(found, wanted) <= TOLERANCE, mode
    np.testing.assert_allclose(evaluation.load, load, rtol=1e-12)
    assert np.ptp(evaluation.load) > 0.1  # there is something to balance
  by_host = br.value_and_grad(
      decoder, tiny.loss, schedule=schedule, balance=COEFFICIENT,
      hosted=br.Hosted(),
  )(params, group, weights)
  assert tiny.worst(by_host[1], wanted) <= TOLERANCE
  np.testing.assert_allclose(by_host[0].load, load, rtol=1e-12)


@pytest.mark.exhaustive
def test_a_prefix_of_which_all_chunks_are_drawn_and_kept(x64):
  """Twice as many draws as chunks: each runs, with weight 1."""
  decoder, params, group, weights = problem()
  _, wanted, _ = dense()
  _, found = run(
      decoder, params, group, weights, prefix_gradient="sampled",
      sampling=br.Sampling(chunks=6.0),
      schedule=br.Schedule(chunk_size=4, activations="keep"),
  )
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_stop_balances_the_tails_by_the_counts_of_all(x64):
  decoder, params, group, weights = problem()
  more, load = of_term(stopped=True)
  schedule = br.Schedule(chunk_size=4)
  evaluation, found = run(
      decoder, params, group, weights, prefix_gradient="stop",
      schedule=schedule,
  )
  _, plain = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient="stop", schedule=schedule
  )(params, group, weights)
  assert tiny.worst(found, added(plain, more)) <= TOLERANCE
  np.testing.assert_allclose(evaluation.load, load, rtol=1e-12)


@pytest.mark.exhaustive
def test_two_devices_count_and_balance_together(x64):
  decoder, params, group, weights = problem()
  _, wanted, load = dense()
  schedule = br.Schedule(
      chunk_size=4, activations="recompute_layers",
      layout=sharding.sharded(params, 2),
  )
  evaluation, found = run(decoder, params, group, weights, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE
  np.testing.assert_allclose(evaluation.load, load, rtol=1e-12)


def test_a_popped_chunk_scales_what_the_term_sends_it(x64, monkeypatch):
  decoder, params, group, _ = problem()
  spec = spec_lib.Spec(
      decoder, schedule=br.Schedule(chunk_size=8, activations="recompute")
  )
  state = br.capture(decoder, params, group, schedule=spec.schedule)
  seeds = jax.tree.map(
      lambda x: x + jnp.arange(4.0)[None], balance.zeros(CONFIG)
  )

  @jax.jit
  def pop(scale):
    nothing = state_lib.accumulator(CONFIG, state.capacity)
    monkeypatch.setattr(estimators, "weight", lambda q, drawn: scale)
    always = estimators.Draw(
        8 * jnp.arange(2), jnp.ones(2, bool), jnp.int32(1), jnp.float64(9), 0.0
    )
    run = runs.chunk(state.tokens, state.length, 1, 8)
    return steps.pop(
        spec, params, spec_lib.zero_grads(params), nothing, state, run,
        state.saved, draw=always, seeds=seeds,
    )[0]

  once = pop(1.0)
  assert jnp.abs(once["layers"]["expand"]["router"]["kernel"]).min() > 0
  thrice = jax.tree.map(lambda x: 3 * x, once)
  assert tiny.worst(pop(3.0), thrice) <= TOLERANCE


def of_tree(shape, trained_from):
  """A tree whose leaves have loss from a position on, and one that has none."""
  decoder, params = tiny.model(CONFIG)
  sequences = tree_test.sequences_of(shape)
  trained = [
      [p >= trained_from and row > 0 for p in range(len(ids))]
      for row, ids in enumerate(sequences)
  ]
  for row in range(1, len(sequences)):
    trained[row][-1] = False  # it is run all the same, as it counts
  tree = br.Tree.from_sequences(sequences, config=CONFIG, trained=trained)
  return decoder, params, tree, tree_test.weights_of(tree)


def with_term(decoder, params, tree, weights, prefixes_G=0):
  """The gradient of the term of a tree's sequences, and f."""
  del weights
  leaves = tree.leaves
  lengths_G = jnp.asarray(tree.positions[leaves] + tree.lengths[leaves] - 1)
  return jax.jit(jax.grad(
      lambda p: dense_term(
          decoder, p, tree.sequences()[:, :-1], lengths_G, prefixes_G
      ), has_aux=True,
  ))(params)


@pytest.mark.exhaustive
def test_a_tree_has_the_gradient_of_the_dense_term(x64):
  shape = 21, [
      (19, [(4, []), (17, [(3, []), (6, []), (1, [])])]),
      (5, [(4, []), (2, [])]),
  ]
  arguments = decoder, params, tree, weights = of_tree(shape, 30)
  more, load = with_term(*arguments)
  wanted = added(tree_test.dense_gradient(*arguments), more)
  schedule = br.Schedule(chunk_size=8, activations="recompute")
  sampling = br.Sampling(chunks=99)  # all, by another step
  for mode, devices in (
      ("exact", 1), ("exact", 2), ("full", 1), ("sampled", 1)
  ):
    layout = sharding.sharded(params, devices)
    evaluation, found = br.value_and_grad(
        decoder, tiny.loss, balance=COEFFICIENT, prefix_gradient=mode,
        sampling=sampling,
        schedule=dataclasses.replace(schedule, layout=layout),
    )(layout.place(params), tree, tree.sum_over_leaves(weights),
      key=jax.random.key(0))
    assert tiny.worst(found, wanted) <= TOLERANCE, (mode, devices)
    np.testing.assert_allclose(evaluation.load, load, rtol=1e-12)


@pytest.mark.exhaustive
def test_stop_balances_the_leaves_of_a_tree_by_the_counts_of_all(x64):
  shape = 21, [(19, [(4, []), (8, [])]), (7, [])]
  arguments = decoder, params, tree, weights = of_tree(shape, 41)
  starts_G = jnp.asarray(tree.positions[tree.leaves] - 1)
  more, load = with_term(*arguments, prefixes_G=starts_G)
  schedule = br.Schedule(chunk_size=8, activations="recompute")

  def by_stop(**options):
    return br.value_and_grad(
        decoder, tiny.loss, prefix_gradient="stop", schedule=schedule,
        **options,
    )(params, tree, tree.sum_over_leaves(weights))

  evaluation, found = by_stop(balance=COEFFICIENT)
  _, plain = by_stop()
  assert tiny.worst(found, added(plain, more)) <= TOLERANCE
  np.testing.assert_allclose(evaluation.load, load, rtol=1e-12)


def linear(log_probs_GT, weights_GT):
  return jnp.sum(log_probs_GT * weights_GT)


@pytest.mark.exhaustive
def test_the_term_does_not_grow_with_the_number_of_groups(x64):
  """The same prompt several times, its loss a mean over the batch."""
  decoder, params, group, weights = problem()
  plain = jax.jit(jax.grad(lambda p: linear(
      br.dense_log_probs(decoder, p, group), weights
  )))(params)
  more, load = of_term()
  wanted = added(plain, more)
  function = br.value_and_grad(decoder, linear, balance=COEFFICIENT)
  # With a group of empty tails, whose prompt must not count either.
  empty = dataclasses.replace(
      group, tail_lengths=jnp.zeros_like(group.tail_lengths)
  )
  evaluation, found = function(
      params, br.stack([group, empty, group]),
      jnp.stack([weights / 2, weights, weights / 2]),
  )
  assert tiny.worst(found, wanted) <= TOLERANCE
  np.testing.assert_allclose(evaluation.load[2], load, rtol=1e-12)
  _, quarter = function(params, group, weights / 4, balance_share=1 / 4)
  four = jax.tree.map(lambda x: 4 * x, quarter)
  assert tiny.worst(four, wanted) <= TOLERANCE


def test_a_batch_of_training_has_the_mean_of_its_groups_terms(x64):
  decoder, params, group, weights = problem()
  learner = learner_lib.Learner(
      decoder, Linear(), optax.sgd(1.0), balance=COEFFICIENT
  )
  log_probs = np.zeros(group.tails.shape)
  one = experience.Experience("", group, log_probs, np.zeros(3), np.ones(3))

  def of(batch):
    share = jnp.stack([weights / len(batch)] * len(batch))
    return learner.batch_gradient(
        params, batch, (share,), version=0, key=jax.random.key(0)
    )[2]

  assert tiny.worst(of([one] * 3), of([one])) <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class Linear:
  """What a learner asks of an algorithm for its gradient."""

  readout: readout_lib.LogProbs = readout_lib.LogProbs()

  def loss(self, log_probs_GT, weights_GT):
    return linear(log_probs_GT, weights_GT)


@pytest.mark.exhaustive
def test_padding_of_any_kind_changes_nothing(x64):
  decoder, params, group, weights = problem()
  schedule = br.Schedule(chunk_size=4, branches_at_once=2)
  room = ((0, 2), (0, 8))
  padded = br.Group(
      jnp.pad(group.prompt, (0, 8)), group.prompt_length,
      jnp.pad(group.tails, room), jnp.pad(group.tail_lengths, (0, 2)),
  )
  for mode in ("exact", "full", "stop"):
    (wide, more), (narrow, wanted) = (
        run(
            decoder, params, of, of_weights, schedule=schedule,
            prefix_gradient=mode,
        ) for of, of_weights in (
            (padded, jnp.pad(weights, room)), (group, weights),
        )
    )
    assert tiny.worst(more, wanted) <= TOLERANCE, mode
    np.testing.assert_allclose(wide.load, narrow.load, rtol=1e-12)


@pytest.mark.exhaustive
def test_several_trees_share_the_term(x64):
  arguments = decoder, params, tree, weights = of_tree(
      (21, [(9, [(4, []), (3, [])]), (5, [])]), 30
  )
  del arguments

  def by(share):
    return br.value_and_grad(decoder, linear, balance=COEFFICIENT)(
        params, tree, tree.sum_over_leaves(weights) * share,
        balance_share=share,
    )[1]

  third = jax.tree.map(lambda x: 3 * x, by(1 / 3))
  assert tiny.worst(third, by(1.0)) <= TOLERANCE


def test_coefficients_that_mean_nothing_are_refused():
  decoder, params = tiny.model(tiny.BASE)
  with pytest.raises(ValueError, match="the model has no experts"):
    br.value_and_grad(decoder, tiny.loss, balance=0.1)(params, tiny.group())
  with pytest.raises(ValueError, match="balance must be ≥ 0, not -1"):
    balance.check(-1.0, CONFIG)
  with pytest.raises(ValueError, match="balance_share=0.5 belongs to"):
    br.value_and_grad(decoder, tiny.loss)(
        params, tiny.group(), balance_share=0.5
    )


@pytest.mark.exhaustive
def test_without_a_coefficient_there_is_no_load():
  decoder, params = tiny.model(tiny.ARCHITECTURES["experts"])
  group = tiny.group()
  evaluation, _ = jax.eval_shape(
      lambda params: br.value_and_grad(decoder, tiny.loss)(
          params, group, tiny.weights(group)
      ), params,
  )
  assert evaluation._fields == ("loss", "outputs", "prefix_pass")
