# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Schedules and optimizers against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.training import optimizers
from tests import by_hand


def rising(update: int) -> float:
  """From a quarter of the rate at update 0 to all of it at update 4."""
  return 0.25 + 0.75 * update / 4


@pytest.mark.parametrize("decay, falling", [
    ("constant", lambda share: 1.0),
    ("linear", lambda share: 1 - 0.9 * share),
    ("cosine", lambda share: 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2),
])
def test_learning_rates_rise_along_a_line_and_fall_by_their_formula(
    decay, falling
):
  rate = optimizers.learning_rates(2e-3, updates=12, warmup=4, decay=decay)
  for update in range(15):
    share = min(1, max(0, update - 4) / 8)  # a tenth from update 12 on
    wanted = 2e-3 * (rising(update) if update < 4 else falling(share))
    assert float(rate(update)) == pytest.approx(wanted, rel=1e-5), update
  at_once = optimizers.learning_rates(2e-3, updates=8, decay=decay)
  for update in range(9):
    wanted = 2e-3 * falling(update / 8)
    assert float(at_once(update)) == pytest.approx(wanted, rel=1e-5), update


@pytest.mark.parametrize("wrong, message", [
    (dict(learning_rate=0.0), "learning_rate"),
    (dict(learning_rate=float("nan")), "learning_rate"),
    (dict(warmup=11), "warmup"),
    (dict(warmup=-1), "warmup"),
    (dict(decay="exponential"), "decay"),
])
def test_learning_rates_that_are_none_are_refused(wrong, message):
  settings = dict(learning_rate=1e-3, updates=10) | wrong
  with pytest.raises(ValueError, match=message):
    optimizers.learning_rates(settings.pop("learning_rate"), **settings)


def problem():
  """Parameters as a model names them, and gradients of unequal norms."""
  random = np.random.default_rng(0)

  def draw(scale):
    return {
        "embed": {"table": jnp.asarray(scale * random.normal(size=(7, 4)))},
        "layers": {"join": {"out": {
            "kernel": jnp.asarray(scale * random.normal(size=(2, 4, 4))),
        }}},
    }

  return draw(1.0), [draw(scale) for scale in (3.0, 0.01, 0.5, 0.1, 2.0)]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_adamw_is_what_the_textbook_says(x64, clip):
  """Clipped as a whole, unbiased moments, decay that is not scaled by them."""
  params, gradients = problem()
  rates = [1e-2, 3e-2, 2e-2, 1e-3, 5e-2]
  optimizer = optimizers.adamw(
      lambda update: jnp.asarray(rates)[update], b1=0.7, b2=0.9,
      weight_decay=0.2, clip_norm=clip,
  )
  hand = by_hand.AdamW(
      params, rates, b1=0.7, b2=0.9, decay=0.2, clip=clip or math.inf
  )
  state, found, norms = optimizer.init(params), params, []
  for grads in gradients:
    updates, state = optimizer.update(grads, state, found)
    found = jax.tree.map(jnp.add, found, updates)
    norms.append(hand.update(grads))
  by_hand.assert_moved_alike(found, hand, params, 1e-11)
  assert min(norms) < 1 < max(norms), "one is clipped and one is not"


def test_defaults_of_adamw_are_those_written_down(x64):
  params, gradients = problem()
  optimizer = optimizers.adamw(lambda _: 1e-2)
  hand = by_hand.AdamW(params, [1e-2] * 5, b1=0.9, b2=0.99, clip=1.0)
  state, found = optimizer.init(params), params
  for grads in gradients:
    updates, state = optimizer.update(grads, state, found)
    found = jax.tree.map(jnp.add, found, updates)
    hand.update(grads)
  by_hand.assert_moved_alike(found, hand, params, 1e-11)


def test_moments_in_another_dtype_are_rounded_once_an_update():
  """By hand: the average in float32, stored in bfloat16."""
  grads = [np.float32(x) for x in (0.3, -0.7, 0.11)]
  optimizer = optimizers.with_state_dtype(
      optimizers.adamw(lambda _: 0.1, b1=0.5, b2=0.75, clip_norm=None),
      "bfloat16",
  )
  params = {"table": jnp.ones((1, 1), jnp.float32)}
  state, wanted = optimizer.init(params), np.float32(1)
  m = v = np.float32(0)

  def narrow(x):
    return np.float32(np.asarray(x, jnp.bfloat16))

  for count, g in enumerate(grads, 1):
    updates, state = optimizer.update(
        {"table": jnp.full((1, 1), g)}, state, params
    )
    params = jax.tree.map(jnp.add, params, updates)
    m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g * g
    wanted -= 0.1 * m / (1 - 0.5**count) / (
        np.sqrt(v / (1 - 0.75**count)) + 1e-8
    )
    m, v = narrow(m), narrow(v)
    assert float(params["table"][0, 0]) == pytest.approx(wanted, rel=1e-6)
  moments = [
      x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  assert {str(x.dtype) for x in moments} == {"bfloat16"}
  assert sorted(float(x[0, 0]) for x in moments) == sorted([m, v])
