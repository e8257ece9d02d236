# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Losses of tokens and their reductions, against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.rl import reductions
from branch_replay.rl import surrogates


def clipped(ratio, advantage, **constants):
  """Loss of one token, and its slope in log r."""
  log_ratio_GT = jnp.log(jnp.full((1, 1), ratio))
  return jax.value_and_grad(
      lambda x: jnp.sum(
          surrogates.ppo_clip(
              x, jnp.array([advantage]), jnp.ones((1, 1), bool), **constants
          )
      )
  )(log_ratio_GT)


@pytest.mark.parametrize(
    "advantage,ratio,loss,moves",
    [
        (1.0, 1.25, -1.25, True),
        (1.0, 1.5, -1.28, False),
        (1.0, 0.5, -0.5, True),
        (2.0, 5.0, -2.56, False),  # no dual clip where A > 0
        (-1.0, 0.5, 0.8, False),
        (-1.0, 0.9, 0.9, True),
        (-1.0, 1.5, 1.5, True),
        (-1.0, 5.0, 3.0, False),
        (-2.0, 5.0, 6.0, False),
        (0.0, 5.0, 0.0, False),
    ],
)
def test_every_side_of_the_clip(x64, advantage, ratio, loss, moves):
  value, slope = clipped(
      ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0
  )
  np.testing.assert_allclose(value, loss, rtol=1e-12)
  np.testing.assert_allclose(slope, loss if moves else 0, rtol=1e-12)


def test_every_constant_of_the_clip_is_wired(x64):
  assert clipped(5.0, -1.0, dual_clip=4.0)[0] == 4.0
  np.testing.assert_allclose(clipped(5.0, -1.0)[0], 3.0, rtol=1e-12)
  np.testing.assert_allclose(
      clipped(5.0, -1.0, dual_clip=None)[0], 5.0, rtol=1e-12
  )
  np.testing.assert_allclose(clipped(5.0, 1.0)[0], -1.2, rtol=1e-12)
  np.testing.assert_allclose(clipped(5.0, 1.0, clip_high=0.5)[0], -1.5)
  np.testing.assert_allclose(clipped(0.1, -1.0)[0], 0.8, rtol=1e-12)
  np.testing.assert_allclose(clipped(0.1, -1.0, clip_low=0.5)[0], 0.5)


def test_a_ratio_of_one_moves_whatever_the_clip():
  for advantage in (1.0, -1.0):
    value, slope = clipped(1.0, advantage, clip_low=0.0, clip_high=0.0)
    assert value == slope == -advantage


def test_the_clip_is_the_minimum_of_the_paper(x64):
  random = np.random.default_rng(0)
  ratio_GT = np.exp(random.normal(size=(20, 30)))
  advantages_GT = random.normal(size=(20, 30))
  mask_GT = jnp.ones((20, 30), bool)
  inside_GT = np.clip(ratio_GT, 0.8, 1.28)
  right_GT = np.minimum(ratio_GT * advantages_GT, inside_GT * advantages_GT)
  np.testing.assert_allclose(
      surrogates.ppo_clip(
          jnp.log(ratio_GT), advantages_GT, mask_GT, clip_high=0.28,
          dual_clip=None,
      ),
      -right_GT, rtol=1e-12,
  )
  lifted_GT = np.maximum(right_GT, 2.0 * advantages_GT)
  right_GT = np.where(advantages_GT < 0, lifted_GT, right_GT)
  np.testing.assert_allclose(
      surrogates.ppo_clip(
          jnp.log(ratio_GT), advantages_GT, mask_GT, clip_high=0.28,
          dual_clip=2.0,
      ),
      -right_GT, rtol=1e-12,
  )


def test_a_ratio_outside_the_mask_is_not_read():
  log_ratio_GT = jnp.array([[0.1, 500.0, jnp.nan]])
  mask_GT = jnp.array([[True, False, False]])
  value, slope_GT = jax.value_and_grad(
      lambda x: jnp.sum(surrogates.ppo_clip(x, jnp.array([-1.0]), mask_GT))
  )(log_ratio_GT)
  np.testing.assert_allclose(value, np.exp(0.1), rtol=1e-6)
  np.testing.assert_allclose(slope_GT, [[np.exp(0.1), 0, 0]], rtol=1e-6)


def test_value_loss_by_hand():
  values_GT = jnp.array([[1.0, 2.0, 0.5, 9.0]])
  old_GT = jnp.array([[1.0, 1.0, 1.0, jnp.nan]])
  returns_GT = jnp.array([[3.0, 3.0, 0.0, jnp.inf]])
  mask_GT = jnp.array([[True, True, True, False]])

  def loss(values_GT, clip):
    loss_GT = surrogates.value_loss(
        values_GT, old_GT, returns_GT, mask_GT, clip=clip
    )
    return jnp.sum(loss_GT), loss_GT

  (_, loss_GT), slope_GT = jax.value_and_grad(loss, has_aux=True)(
      values_GT, 0.2
  )
  # Token 1 moved towards the return by more than 0.2: as if by 0.2, and no
  # gradient. So did token 2, with a larger error where it was clipped.
  np.testing.assert_allclose(
      loss_GT, [[2.0, 1.8**2 / 2, 0.8**2 / 2, 0]], rtol=1e-6
  )
  np.testing.assert_allclose(slope_GT, [[-2.0, 0, 0, 0]], rtol=1e-6)
  (_, loss_GT), slope_GT = jax.value_and_grad(loss, has_aux=True)(
      values_GT, None
  )
  np.testing.assert_allclose(loss_GT, [[2.0, 0.5, 0.125, 0]], rtol=1e-6)
  np.testing.assert_allclose(slope_GT, [[-2.0, -1.0, 0.5, 0]], rtol=1e-6)


def test_only_values_are_learned():
  def total(*arrays_GT):
    mask_GT = jnp.ones((1, 1), bool)
    return jnp.sum(surrogates.value_loss(*arrays_GT, mask_GT))

  one = jnp.ones((1, 1))
  slopes = jax.grad(total, argnums=(0, 1, 2))(one, one / 2, one * 3)
  np.testing.assert_array_equal(slopes, [[[0]]] * 3)  # clipped
  slopes = jax.grad(total, argnums=(0, 1, 2))(one, one, one * 3)
  np.testing.assert_array_equal(slopes, [[[-2]], [[0]], [[0]]])


def test_reductions_by_hand():
  mask_GT = jnp.array([[True] + [False] * 3, [True] * 3 + [False]])
  loss_GT = jnp.array([[4.0, jnp.nan, 0, 0], [1.0, 1.0, 1.0, jnp.inf]])
  for reduction, right, options in (
      ("token_mean", 1.75, {}),
      ("sequence_mean", 2.5, {}),
      ("sequence_sum", 3.5, {}),
      ("constant", 0.875, dict(max_tokens=4)),
      ("constant", 0.35, dict(max_tokens=10)),
  ):
    whole = reductions.reduce(loss_GT, mask_GT, reduction, **options)
    np.testing.assert_allclose(whole.mean(), right, rtol=1e-6)
    weights_GT = reductions.token_weights(mask_GT, reduction, **options)
    np.testing.assert_array_equal(weights_GT[~mask_GT], 0)
    kept_GT = jnp.where(mask_GT, loss_GT, 0)
    np.testing.assert_allclose(
        jnp.sum(weights_GT * kept_GT), right, rtol=1e-6
    )
    # As one packed row of both, or with room to spare, or with an empty row.
    wide_GT = jnp.pad(mask_GT, ((0, 3), (0, 5)))
    padded = reductions.token_weights(wide_GT, reduction, **options)
    np.testing.assert_array_equal(padded[:2, :4], weights_GT)


def test_a_mean_over_parts_is_the_mean_over_tokens():
  """100 tokens at 2.0 and 900 at 0.5 are 0.65 a token, and not 1.25."""
  parts = [
      reductions.reduce(
          jnp.full((1, n), loss), jnp.ones((1, n), bool), "token_mean"
      )
      for n, loss in ((100, 2.0), (900, 0.5))
  ]
  total = jax.tree.map(lambda *x: sum(x), *parts)
  np.testing.assert_allclose(total.mean(), 0.65, rtol=1e-6)
  nothing = reductions.reduce(
      jnp.ones((1, 3)), jnp.zeros((1, 3), bool), "token_mean"
  )
  assert nothing.mean() == 0


@pytest.mark.parametrize("reduction", ("token_mean", "sequence_mean"))
def test_a_masked_answer_leaves_numerator_and_denominator(reduction):
  """Two tokens kept and six masked, loss 1 each: 1, not 1/4."""
  loss_GT = jnp.ones((2, 6))
  mask_GT = jnp.array([[True] * 2 + [False] * 4, [False] * 6])
  assert reductions.reduce(loss_GT, mask_GT, reduction).mean() == 1


def test_sequence_ratio_by_hand(x64):
  old_GT = jnp.zeros((2, 4))
  log_probs_GT = jnp.log(jnp.array([[2.0, 8.0, 5.0, 1.0], [3.0, 7, 7, 7]]))
  mask_GT = jnp.array([[True, True, False, False], [True] + [False] * 3])
  result_GT = surrogates.sequence_log_ratio(log_probs_GT, old_GT, mask_GT)
  np.testing.assert_allclose(
      jnp.exp(result_GT), [[4, 4, 1, 1], [3, 1, 1, 1]], rtol=1e-12
  )
