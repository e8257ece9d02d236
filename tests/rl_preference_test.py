# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs: values by hand, and only the answers' own tokens count."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from branch_replay.rl import objectives
from branch_replay.rl import preference

LOSSES = {
    "dpo": preference.Dpo(),
    "smoothed": preference.Dpo(beta=0.5, label_smoothing=0.2),
    "ipo": preference.Ipo(beta=0.3),
}

every_loss = pytest.mark.parametrize("name", LOSSES)

LENGTHS = 4, 2, 0, 5, 3, 6, 1, 1  # the second pair lacks its chosen answer


def batch(seed=0, lengths=LENGTHS, tokens=6):
  random = np.random.default_rng(seed)
  log_probs_GT, reference_GT = jnp.asarray(
      random.normal(size=(2, len(lengths), tokens)) - 2
  )
  mask_GT = jnp.arange(tokens)[None] < jnp.array(lengths)[:, None]
  return log_probs_GT, preference.Pairs.create(mask_GT, reference_GT)


def test_dpo_by_hand():
  margin_N = jnp.array([0.0, 2.0])
  np.testing.assert_allclose(
      preference.dpo(margin_N, beta=0.1), [0.693147, 0.598139], atol=1e-6
  )
  np.testing.assert_allclose(
      preference.dpo(margin_N, beta=0.1, label_smoothing=0.25),
      [0.693147, 0.598139 + 0.25 * 0.2], atol=1e-6,
  )
  np.testing.assert_allclose(
      preference.dpo(margin_N, beta=0.5)[1], np.log1p(np.exp(-1)), rtol=1e-6
  )


def test_ipo_by_hand():
  margin_N = jnp.array([0.0, 2.0, 5.0])
  np.testing.assert_allclose(
      preference.ipo(margin_N, beta=0.1), [25, 9, 0], atol=1e-5
  )


def test_margins_by_hand():
  mask_GT = jnp.array([[True, True], [True, False]])
  pairs = preference.Pairs.create(mask_GT, jnp.full((2, 2), -1.0))
  log_probs_GT = jnp.array([[-0.5, -2.0], [-3.0, 99.0]])
  # Chosen: 0.5 − 1; rejected: −2.
  np.testing.assert_allclose(preference.margins(log_probs_GT, pairs), [1.5])


def test_the_gradient_is_that_of_the_paper(x64):
  """−β σ(−β h) (∇ log π(y_w) − ∇ log π(y_l)), over the number of pairs."""
  log_probs_GT, pairs = batch()
  gradient_GT = jax.grad(preference.Dpo(beta=0.3))(log_probs_GT, pairs)
  margin_N = preference.margins(log_probs_GT, pairs)
  force_N = -0.3 * jax.nn.sigmoid(-0.3 * margin_N) / 3
  force_N = force_N.at[1].set(0)
  right_GT = jnp.stack([force_N, -force_N], axis=1).reshape(8, 1) * pairs.mask
  np.testing.assert_allclose(gradient_GT, right_GT, rtol=1e-12)


@every_loss
def test_gradients_are_those_of_finite_differences(x64, name):
  log_probs_GT, pairs = batch()
  check_grads(
      lambda x: LOSSES[name](x, pairs), (log_probs_GT,), order=1,
      modes=["rev"], atol=1e-6, rtol=1e-6,
  )


@every_loss
def test_a_pair_without_an_answer_is_dropped_and_not_counted(x64, name):
  loss = LOSSES[name]
  log_probs_GT, pairs = batch()
  kept = jnp.array([0, 1, 4, 5, 6, 7])
  without = preference.Pairs.create(
      pairs.mask[kept], pairs.reference_log_probs[kept]
  )
  value, gradient_GT = jax.value_and_grad(loss)(log_probs_GT, pairs)
  right, wanted_GT = jax.value_and_grad(loss)(log_probs_GT[kept], without)
  np.testing.assert_allclose(value, right, rtol=1e-12)
  np.testing.assert_allclose(gradient_GT[kept], wanted_GT, rtol=1e-12)
  np.testing.assert_array_equal(gradient_GT[2:4], 0)


@every_loss
@pytest.mark.parametrize("tokens", (6, 0))
def test_no_pair_at_all_is_zero_and_finite(name, tokens):
  nothing = preference.Pairs.create(
      jnp.zeros((4, tokens), bool), jnp.zeros((4, tokens))
  )
  value, gradient_GT = jax.value_and_grad(LOSSES[name])(
      jnp.full((4, tokens), -1.0), nothing
  )
  assert value == 0
  np.testing.assert_array_equal(gradient_GT, 0)


@every_loss
def test_what_lies_outside_the_mask_is_not_read(x64, name):
  log_probs_GT, pairs = batch()
  wanted = jax.value_and_grad(LOSSES[name])(log_probs_GT, pairs)
  for bad in (1e4, -jnp.inf, jnp.nan):
    changed = dataclasses.replace(
        pairs,
        reference_log_probs=jnp.where(pairs.mask, pairs.reference_log_probs,
                                      -bad),
    )
    got = jax.value_and_grad(LOSSES[name])(
        jnp.where(pairs.mask, log_probs_GT, bad), changed
    )
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
  wide_GT = jnp.pad(log_probs_GT, ((0, 0), (0, 3)))
  wide = jax.tree.map(
      lambda x: jnp.pad(x, ((0, 0), (0, 3))) if x.ndim > 1 else x, pairs
  )
  np.testing.assert_allclose(
      LOSSES[name](wide_GT, wide), wanted[0], rtol=1e-12
  )


@every_loss
@pytest.mark.parametrize("part", (2, 4, 6))
def test_pairs_may_be_split(x64, name, part):
  log_probs_GT, pairs = batch()
  of = jax.value_and_grad(LOSSES[name])
  value, gradient_GT = of(log_probs_GT, pairs)
  values, gradients = zip(
      *(of(*jax.tree.map(lambda x, i=i: x[i : i + part], (log_probs_GT, pairs)))
        for i in range(0, 8, part)),
      strict=True,
  )
  np.testing.assert_allclose(sum(values), value, rtol=1e-12)
  np.testing.assert_allclose(
      np.concatenate(gradients), gradient_GT, rtol=1e-12
  )


@every_loss
def test_rows_may_be_split_in_a_second_pass(x64, name):
  log_probs_GT, pairs = batch()
  wanted_GT = jax.grad(LOSSES[name])(log_probs_GT, pairs)
  alone = [
      jax.grad(objectives.linear)(log_probs_GT[i : i + 1], wanted_GT[i : i + 1])
      for i in range(8)
  ]
  np.testing.assert_array_equal(np.concatenate(alone), wanted_GT)


@every_loss
def test_groups_may_be_stacked(x64, name):
  log_probs_GT, pairs = batch()
  stacked = jax.tree.map(
      lambda x: x.reshape(2, 4, *x.shape[1:]), (log_probs_GT, pairs)
  )
  again = preference.Pairs.create(
      stacked[1].mask, stacked[1].reference_log_probs
  )
  np.testing.assert_allclose(again.weights, stacked[1].weights, rtol=1e-12)
  np.testing.assert_allclose(
      LOSSES[name](stacked[0], again), LOSSES[name](log_probs_GT, pairs),
      rtol=1e-12,
  )


def test_every_constant_changes_the_value(x64):
  log_probs_GT, pairs = batch()
  for loss, change in (
      (preference.Dpo(), dict(beta=0.2)),
      (preference.Dpo(), dict(label_smoothing=0.1)),
      (preference.Ipo(), dict(beta=0.2)),
  ):
    other = dataclasses.replace(loss, **change)
    values = [x(log_probs_GT, pairs) for x in (loss, other)]
    assert not np.isclose(*values, rtol=1e-3), change


def test_large_margins_do_not_overflow():
  for margin in (1e4, -1e4):
    value, slope = jax.value_and_grad(
        lambda x: preference.dpo(x, beta=1.0, label_smoothing=0.0)
    )(margin)
    np.testing.assert_allclose([value, slope], [max(-margin, 0), -(margin < 0)])


def test_bad_input_is_an_error():
  log_probs_GT, pairs = batch()
  with pytest.raises(ValueError, match="3 rows do not make pairs.*even branch"):
    preference.Pairs.create(pairs.mask[:3], log_probs_GT[:3])
  with pytest.raises(ValueError, match="1 rows do not make pairs"):
    one = jax.tree.map(lambda x: x[:1], pairs)
    preference.Dpo()(log_probs_GT[:1], one)
  with pytest.raises(ValueError, match=r"reference_log_probs has shape"):
    preference.Pairs.create(pairs.mask, log_probs_GT[:, :3])
  for loss in (preference.Dpo, preference.Ipo):
    with pytest.raises(ValueError, match="beta must be > 0, not 0"):
      loss(beta=0)
  with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 0.5"):
    preference.Dpo(label_smoothing=0.5)
