# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Outputs of attention that are kept are used, and change no gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import schedule as schedule_lib
from tests import tiny
from tests import tree_test

TOLERANCE = 1e-11  # float64, relative, worst parameter
KEEP = br.Schedule(
    chunk_size=7, activations="recompute", keep_attention=True,
    branches_at_once=2,
)


def problem(name="llama"):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  group = tiny.group(prompt=27, tails=(5, 1, 3, 0))
  return decoder, params, group, tiny.weights(group)


def gradient(decoder, params, data, weights, schedule=KEEP, **options):
  return br.value_and_grad(
      decoder, tiny.loss, schedule=schedule, **options
  )(params, data, weights)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", (
    "llama", "latent", "window and full", "experts",
))
def test_exact_equals_dense_for_every_mixer(x64, name):
  arguments = problem(name)
  wanted = tiny.dense_gradient(*arguments)
  assert tiny.worst(gradient(*arguments), wanted) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations,driver", [
    ("recompute", "hosted"), ("recompute_layers", "compiled"),
])
def test_exact_equals_dense_for_every_schedule(x64, activations, driver):
  arguments = problem()
  schedule = dataclasses.replace(KEEP, activations=activations)
  hosted = br.Hosted() if driver == "hosted" else None
  found = gradient(*arguments, schedule, hosted=hosted)
  assert tiny.worst(found, tiny.dense_gradient(*arguments)) <= TOLERANCE


@pytest.mark.exhaustive(but="tree")
@pytest.mark.parametrize("form", ("group", "tree"))
def test_several_devices(x64, form):
  if form == "group":
    arguments = problem()
    wanted = tiny.dense_gradient(*arguments)
  else:
    decoder, params, tree, weights = tree_test.problem()
    wanted = tree_test.dense_gradient(decoder, params, tree, weights)
    arguments = decoder, params, tree, tree.sum_over_leaves(weights)
  layout = sharding.sharded(arguments[1], 8)
  schedule = dataclasses.replace(KEEP, layout=layout, chunk_size=8)
  assert tiny.worst(gradient(*arguments, schedule), wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_trees(x64):
  decoder, params, tree, weights = tree_test.problem("latent")
  wanted = tree_test.dense_gradient(decoder, params, tree, weights)
  found = gradient(decoder, params, tree, tree.sum_over_leaves(weights))
  assert tiny.worst(found, wanted) <= TOLERANCE


def test_a_captured_state_keeps_them_and_they_are_used(x64):
  decoder, params, group, weights = arguments = problem()
  wanted = tiny.dense_gradient(*arguments)
  state = br.capture(decoder, params, group, schedule=KEEP)
  out_LKPD, lse_LKPD = state.attended
  assert out_LKPD.shape == (2, 4, state.capacity, 16)
  assert lse_LKPD.shape == (2, 4, state.capacity, 1)

  def found(state):
    return jax.grad(lambda p: tiny.loss(br.log_probs(
        decoder, p, group, state=state, schedule=KEEP
    ), weights))(params)

  assert tiny.worst(found(state), wanted) <= TOLERANCE
  wrong = dataclasses.replace(state, attended=(out_LKPD + 1, lse_LKPD))
  assert tiny.worst(found(wrong), wanted) > 1e-2
  for without in (
      br.extend(
          decoder, params,
          br.capture(decoder, params, group, schedule=KEEP, capacity=40),
          jnp.zeros(3, jnp.int32),
      ),
      br.capture(decoder, params, group, schedule=br.Schedule()),
  ):
    assert not without.attended


def test_the_budget_decides():
  config = tiny.BASE
  everything = schedule_lib.layers_bytes(config)
  outputs = schedule_lib.attended_bytes(config)
  # Two layers of four heads of 16, and their log-sum-exps, in float32.
  assert outputs == 2 * 4 * (16 + 1) * 4
  chunk, prefix = 10, 1000

  def settled(budget, **options):
    schedule = br.Schedule(chunk_size=chunk, memory_budget=budget, **options)
    found = schedule.settled(config, prefix, chunk, chunk)
    return found.activations, found.keep_attention

  assert settled(everything * (prefix + chunk)) == ("keep", False)
  both = everything * chunk + outputs * prefix
  assert settled(both) == ("recompute", True)
  assert settled(both, keep_attention=False) == ("recompute", False)
  assert settled(both - 1) == ("recompute", False)
  assert settled(both - 1, keep_attention=True) == ("recompute", True)
  assert settled(both, activations="recompute") == ("recompute", False)
  assert settled(0) == ("recompute_layers", False)
  with pytest.raises(TypeError, match="keep_attention"):
    br.Schedule(keep_attention="yes")
  np.testing.assert_equal(settled(1 << 40), ("keep", False))
