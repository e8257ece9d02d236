# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step: what it updates, and where everything lives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.config import Adapter
from branch_replay.devices import sharding
from branch_replay.engine import state as state_lib
from branch_replay.models import adapters
from branch_replay.training import optimizers
from branch_replay.training import step as step_lib
from tests import tiny

ADAM = optax.adam(1e-2)


def steps(model, params, group, *, count=3, optimizer=ADAM, **options):
  layout = options.get("schedule", br.Schedule()).layout
  trainable = options.get("trainable", "all")
  train_state = step_lib.create(
      jax.tree.map(jnp.copy, params), optimizer, trainable=trainable,
      layout=layout,
  )
  step = step_lib.make_step(model, tiny.loss, optimizer, **options)
  for _ in range(count):
    train_state, report = step(train_state, group, (tiny.weights(group),))
  assert step._cache_size() == 1
  return train_state, report


def test_a_step_is_a_gradient_and_an_update(x64):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=12, tails=(5, 1, 3))
  train_state, report = steps(model, params, group)
  moments, wanted = ADAM.init(params), params
  for _ in range(3):
    grads = tiny.dense_gradient(model, wanted, group, tiny.weights(group))
    updates, moments = ADAM.update(grads, moments, wanted)
    wanted = optax.apply_updates(wanted, updates)
  assert tiny.worst(train_state.params, wanted) <= 1e-11
  assert train_state.step == 3
  np.testing.assert_allclose(
      report.grad_norm, optax.tree.norm(grads), rtol=1e-9
  )


@pytest.mark.exhaustive(but="all")
@pytest.mark.parametrize("trainable", ["all", "adapters"])
def test_eight_devices_share_everything_and_agree_with_one(x64, trainable):
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  model, params = adapters.add(
      model, params, Adapter(8, 8.0), jax.random.key(0)
  )
  group = tiny.group(prompt=22, tails=(5, 1, 7))
  alone, _ = steps(model, params, group, trainable=trainable)
  layout = sharding.sharded(params, 8)
  train_state, _ = steps(
      model, params, group, trainable=trainable,
      schedule=br.Schedule(layout=layout),
  )
  assert tiny.worst(train_state.params, alone.params) <= 1e-11
  sharded = dict(layout.axes)
  for tree in (train_state.params, train_state.optimizer[0].mu):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in flat:
      name = "/".join(str(key.key) for key in path)
      here = leaf.addressable_shards[0].data.size
      assert here == leaf.size // (8 if name in sharded else 1), name
  frozen = train_state.params["layers"]["join"]["output"]["kernel"]
  moved = jnp.any(frozen != params["layers"]["join"]["output"]["kernel"])
  assert moved == (trainable == "all")


@pytest.mark.exhaustive
def test_moments_in_bfloat16_follow_those_in_float32():
  model, params = tiny.model(tiny.BASE)
  group = tiny.group(prompt=12, tails=(5, 1, 3))
  adam = optax.adam(1e-2, b2=0.98)
  wanted, _ = steps(model, params, group, optimizer=adam)
  narrow = optimizers.with_state_dtype(adam, "bfloat16")
  train_state, _ = steps(model, params, group, optimizer=narrow)
  assert {x.dtype for x in jax.tree.leaves(train_state.optimizer[0].nu)} == {
      jnp.dtype("bfloat16")
  }
  assert train_state.optimizer[0].count == 3
  moved, near = (
      jax.tree.map(lambda a, b: a - b, x.params, params)
      for x in (wanted, train_state)
  )
  difference = jax.tree.map(lambda a, b: a - b, moved, near)
  far = optax.tree.norm(difference) / optax.tree.norm(moved)
  assert 1e-5 < far < 1e-2


@pytest.mark.exhaustive
def test_the_accumulator_rounds_where_it_is_asked_to():
  model, params = tiny.model(tiny.BASE)
  group = tiny.group(prompt=66, tails=(5, 1, 3))

  def gradient(chunk_size, dtype):
    schedule = br.Schedule(chunk_size=chunk_size, accumulator_dtype=dtype)
    return br.value_and_grad(model, tiny.loss, schedule=schedule)(
        params, group, tiny.weights(group)
    )[1]

  wanted = gradient(65, None)
  assert tiny.worst(gradient(2, "float32"), wanted) < 1e-4
  few, many = (
      optax.tree.norm(jax.tree.map(
          lambda a, b: a - b, gradient(size, "bfloat16"), wanted
      )) / optax.tree.norm(wanted)
      for size in (33, 2)
  )
  assert 1e-5 < few < many < 0.05


def test_accumulator_dtypes_that_are_none_are_errors():
  with pytest.raises(ValueError, match="accumulator_dtype"):
    br.Schedule(accumulator_dtype="int32")
  shape = functools.partial(state_lib.accumulator, tiny.BASE, 8)
  chex.assert_type(shape(), jnp.float32)
  chex.assert_type(shape("bfloat16"), jnp.bfloat16)
