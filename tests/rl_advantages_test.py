# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages by hand; a group that says nothing gets exactly nothing."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from branch_replay.rl import advantages

VARIANTS = {
    "relative": advantages.group_relative,
    "no epsilon": functools.partial(advantages.group_relative, epsilon=0.0),
    "ddof 0": functools.partial(advantages.group_relative, ddof=0),
    "not normalized": functools.partial(
        advantages.group_relative, normalize=False
    ),
    "leave one out": advantages.leave_one_out,
}

every_variant = pytest.mark.parametrize("name", VARIANTS)


def test_group_relative_by_hand():
  rewards_G = jnp.array([1.0, 0.0, 0.0, 0.0])  # mean 1/4, std 1/2
  for options, first in (
      (dict(epsilon=1e-4), 0.75 / 0.5001),
      (dict(epsilon=0.1), 0.75 / 0.6),
      (dict(epsilon=0.0, ddof=0), 0.75 / np.sqrt(3 / 16)),
      (dict(normalize=False), 0.75),
  ):
    np.testing.assert_allclose(
        advantages.group_relative(rewards_G, **options),
        [first, *[-first / 3] * 3], rtol=1e-6,
    )
  assert round(0.75 / 0.5001, 4) == 1.4997


def test_rewards_close_together_are_told_apart(x64):
  close = np.array([1.0, 1.00001])
  wide = advantages.group_relative(jnp.asarray(close), epsilon=1e-6)
  np.testing.assert_allclose(wide, [-0.6195, 0.6195], atol=5e-5)
  # In float32 the two are 84 roundings apart, and no digit of that is lost.
  for close in ([1.0, 1.00001], [1.0, 1.00001, 1.000015, 1.00003]):
    narrow_G = jnp.asarray(close, jnp.float32)
    narrow = advantages.group_relative(narrow_G)
    assert narrow.dtype == jnp.float32
    wide = advantages.group_relative(narrow_G.astype(jnp.float64))
    np.testing.assert_allclose(narrow, wide, rtol=1e-5)


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(x64):
  rewards_G = np.random.default_rng(0).normal(size=5)
  right = [
      rewards_G[i] - np.delete(rewards_G, i).mean() for i in range(5)
  ]
  np.testing.assert_allclose(
      advantages.leave_one_out(jnp.asarray(rewards_G)), right, rtol=1e-12
  )


@every_variant
@pytest.mark.parametrize(
    "rewards_G",
    [
        np.zeros(4),
        np.full(8, 0.7, np.float32),
        np.full(7, -1e30, np.float32),
        np.ones(3, int),
        np.zeros(3, bool),
        np.array([0.1, 0.1 + np.spacing(np.float32(0.1))], np.float32),
        [0.5],
    ],
)
def test_a_group_without_a_preference_gets_exactly_zero(name, rewards_G):
  result_G = VARIANTS[name](jnp.asarray(rewards_G))
  np.testing.assert_array_equal(result_G, np.zeros(len(rewards_G)))
  assert advantages.is_dead(jnp.asarray(rewards_G))
  assert result_G.dtype == jnp.float32


def test_sums_in_another_order_are_the_same_reward(x64):
  rewards_G = jnp.array([0.1 + 0.2, 0.3, 0.3])  # differ in the last bit
  assert rewards_G[0] != rewards_G[1]
  np.testing.assert_array_equal(advantages.group_relative(rewards_G), 0)
  assert not advantages.is_dead(jnp.array([0.3, 0.3 + 1e-14]))


@every_variant
def test_padding_is_as_if_it_were_not_there(name):
  rewards_G = jnp.array([1.0, 0.25, 0.0])
  padded_G = jnp.array([1.0, jnp.nan, 0.25, jnp.inf, 0.0])
  mask_G = jnp.array([True, False, True, False, True])
  result_G = VARIANTS[name](padded_G, mask_G)
  np.testing.assert_allclose(
      result_G[mask_G], VARIANTS[name](rewards_G), rtol=1e-6
  )
  np.testing.assert_array_equal(result_G[~mask_G], 0)
  nobody_G = jnp.zeros(5, bool)
  np.testing.assert_array_equal(VARIANTS[name](padded_G, nobody_G), 0)
  assert advantages.is_dead(padded_G, nobody_G)
  alone_G = jnp.arange(5) == 2
  np.testing.assert_array_equal(VARIANTS[name](padded_G, alone_G), 0)


@every_variant
def test_stacked_groups_are_each_on_their_own(name):
  rewards_NG = jnp.asarray(
      np.random.default_rng(0).normal(size=(3, 5)), jnp.float32
  ).at[1].set(2.0)
  together = VARIANTS[name](rewards_NG)
  for group, rewards_G in zip(together, rewards_NG, strict=True):
    np.testing.assert_allclose(group, VARIANTS[name](rewards_G), rtol=1e-6)
  assert advantages.is_dead(rewards_NG).tolist() == [False, True, False]


@every_variant
def test_a_group_over_eight_devices_gets_the_same(name):
  rewards_G = jnp.asarray(
      np.random.default_rng(0).normal(size=8), jnp.float32
  )
  mesh = jax.make_mesh(
      (8,), ("branches",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spread_G = jax.device_put(
      rewards_G, NamedSharding(mesh, PartitionSpec("branches"))
  )
  assert len(spread_G.sharding.device_set) == 8
  np.testing.assert_allclose(
      jax.jit(VARIANTS[name])(spread_G), VARIANTS[name](rewards_G), rtol=1e-6
  )


def test_whitening():
  values_GT = jnp.array([[3.0, 5.0, jnp.nan], [7.0, jnp.inf, 100.0]])
  mask_GT = jnp.array([[True, True, False], [True, False, False]])
  result_GT = advantages.whiten(values_GT, mask_GT)  # mean 5, std 2
  np.testing.assert_allclose(result_GT[mask_GT], [-1, 0, 1], rtol=1e-6)
  np.testing.assert_array_equal(result_GT[~mask_GT], values_GT[~mask_GT])
  np.testing.assert_allclose(
      advantages.whiten(values_GT, mask_GT, epsilon=2.0)[mask_GT],
      [-0.5, 0, 0.5], rtol=1e-6,
  )


def test_whitening_next_to_nothing():
  values_GT = jnp.array([[3.0, 5.0], [7.0, 0.7]])
  for count in (0, 1):
    mask_GT = jnp.arange(4).reshape(2, 2) < count
    np.testing.assert_array_equal(
        advantages.whiten(values_GT, mask_GT), values_GT
    )
  same_GT = jnp.full((2, 4), 0.7)
  np.testing.assert_array_equal(
      advantages.whiten(same_GT, same_GT > 0), jnp.zeros((2, 4))
  )


REWARDS_GT = jnp.array([[0.0, 0.0, 1.0]])
VALUES_GT = jnp.array([[0.5, 0.4, 0.3]])
ALL_GT = jnp.ones((1, 3), bool)


def test_gae_by_hand():
  of, returns = advantages.gae(
      REWARDS_GT, VALUES_GT, ALL_GT, discount=0.9, trace=0.5
  )
  # δ = -0.14, -0.13, 0.7
  np.testing.assert_allclose(of, [[-0.05675, 0.185, 0.7]], rtol=1e-5)
  np.testing.assert_allclose(returns, [[0.44325, 0.585, 1.0]], rtol=1e-5)
  cut_off, _ = advantages.gae(
      REWARDS_GT, VALUES_GT, ALL_GT, discount=0.9, trace=0.5,
      bootstrap_G=jnp.array([2.0]),
  )
  np.testing.assert_allclose(cut_off[0, 2], 1 + 0.9 * 2 - 0.3, rtol=1e-6)
  np.testing.assert_allclose(cut_off[0, 1], -0.13 + 0.45 * 2.5, rtol=1e-5)


def test_gae_between_its_two_ends(x64):
  random = np.random.default_rng(0)
  rewards_GT, values_GT = random.normal(size=(2, 3, 6))
  mask_GT = jnp.ones((3, 6), bool)
  of = functools.partial(advantages.gae, rewards_GT, values_GT, mask_GT)
  _, returns_GT = of(discount=1.0, trace=1.0)  # Monte Carlo
  to_go_GT = np.cumsum(rewards_GT[:, ::-1], axis=1)[:, ::-1]
  np.testing.assert_allclose(returns_GT, to_go_GT, rtol=1e-12)
  one_step_GT, _ = of(discount=0.9, trace=0.0)
  next_GT = np.pad(values_GT[:, 1:], ((0, 0), (0, 1)))
  delta_GT = rewards_GT + 0.9 * next_GT - values_GT
  np.testing.assert_allclose(one_step_GT, delta_GT, rtol=1e-12)
  between_GT, _ = of(discount=0.9, trace=0.7)
  right_GT = [
      [sum((0.9 * 0.7) ** k * d for k, d in enumerate(row[t:]))
       for t in range(6)]
      for row in delta_GT
  ]
  np.testing.assert_allclose(between_GT, right_GT, rtol=1e-12)


def test_gae_steps_over_what_was_not_sampled():
  """Forced tokens, tool output and padding: masked equals compacted."""
  mask_GT = jnp.array([
      [False, True, True, False, True, False, False],
      [False] * 7,
  ])
  rewards_GT, values_GT = (
      jnp.full((2, 7), jnp.nan).at[0, jnp.array([1, 2, 4])].set(x[0])
      for x in (REWARDS_GT, VALUES_GT)
  )
  options = dict(discount=0.9, trace=0.5)
  bootstrap_G = jnp.array([2.0, 3.0])
  padded = advantages.gae(
      rewards_GT, values_GT, mask_GT, bootstrap_G=bootstrap_G, **options
  )
  compact = advantages.gae(
      REWARDS_GT, VALUES_GT, ALL_GT, bootstrap_G=bootstrap_G[:1], **options
  )
  for got, right in zip(padded, compact, strict=True):
    np.testing.assert_allclose(got[mask_GT], right[0], rtol=1e-6)
    np.testing.assert_array_equal(got[~mask_GT], 0)


def test_gae_of_stacked_groups():
  random = np.random.default_rng(0)
  rewards, values = jnp.asarray(random.normal(size=(2, 3, 2, 4)), jnp.float32)
  mask = jnp.asarray(random.random((3, 2, 4)) < 0.7)
  bootstrap = jnp.ones((3, 2))
  options = dict(discount=0.9, trace=0.5)
  together = advantages.gae(
      rewards, values, mask, bootstrap_G=bootstrap, **options
  )
  alone = [
      advantages.gae(r, v, m, bootstrap_G=b, **options)
      for r, v, m, b in zip(rewards, values, mask, bootstrap, strict=True)
  ]
  for got, right in zip(together, zip(*alone, strict=True), strict=True):
    np.testing.assert_allclose(got, right, rtol=1e-6)


def test_rewards_that_are_numbers_pass():
  rewards_G = advantages.check_rewards([1, 0, 0.5], (3,))
  assert rewards_G.dtype == np.float64
  assert advantages.check_rewards([True, False], (2,)).dtype == np.float32


@pytest.mark.parametrize(
    "rewards_G,shape,message",
    [
        ([1.0, 2.0], (3,), r"shape \(2,\), not \(3,\)"),
        ([[1.0], [2.0]], (2,), r"shape \(2, 1\)"),
        ([1.0, float("nan")], (2,), r"1 rewards are not finite.*\(1,\): nan"),
        ([[0.0, -np.inf]], (1, 2), r"\(0, 1\): -inf"),
        (["1"], (1,), "must be numbers, not <U1"),
        ([None], (1,), "must be numbers, not object"),
    ],
)
def test_rewards_that_are_not(rewards_G, shape, message):
  with pytest.raises(ValueError, match=message):
    advantages.check_rewards(rewards_G, shape)


def test_bad_options_are_errors():
  rewards_G, mask_G = jnp.ones(3), jnp.ones(2, bool)
  for function in (
      advantages.group_relative, advantages.leave_one_out, advantages.is_dead,
      advantages.whiten,
  ):
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
      function(rewards_G, mask_G)
  for options in (dict(epsilon=-1.0), dict(ddof=2)):
    with pytest.raises(ValueError, match="epsilon=.*ddof="):
      advantages.group_relative(rewards_G, **options)
  for options in (dict(discount=1.1, trace=1.0), dict(discount=1.0, trace=-1)):
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
      advantages.gae(REWARDS_GT, VALUES_GT, ALL_GT, **options)
  with pytest.raises(ValueError, match=r"values has shape \(1, 2\)"):
    advantages.gae(
        REWARDS_GT, VALUES_GT[:, :2], ALL_GT, discount=1.0, trace=1.0
    )
  with pytest.raises(ValueError, match=r"bootstrap has shape \(2,\)"):
    advantages.gae(
        REWARDS_GT, VALUES_GT, ALL_GT, discount=1.0, trace=1.0,
        bootstrap_G=jnp.zeros(2),
    )
