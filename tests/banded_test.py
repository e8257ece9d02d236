# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""banded == dense autodiff with pairs outside the band under stop_gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.ops import attention
from branch_replay.ops.attention import reference
from branch_replay.ops.attention import tiling
from tests import attention_suite
from tests import tiny
from tests import tree_test

TOLERANCE = 1e-11  # float64, relative, worst parameter
BAND = br.Band(window=5, sinks=3)
PROMPT, TAILS = 27, (5, 1, 3, 7, 0)


def dense_gradient(decoder, params, data, weights, band):
  """The reference: plain attention, autodiff, stop_gradient off the band."""
  return jax.jit(jax.grad(lambda p: tiny.loss(
      br.dense_log_probs(decoder, p, data, band=band), weights
  )))(params)


def banded(decoder, params, data, weights, band=BAND, **options):
  """The gradient of one pass, in chunks of 7 unless the options say otherwise.
  """
  options = dict(schedule=tree_test.SCHEDULE) | options
  if isinstance(data, br.Tree):
    weights = data.sum_over_leaves(weights)
  return br.value_and_grad(
      decoder, tiny.loss, prefix_gradient="banded", band=band, **options
  )(params, data, weights)


def problem(name="llama"):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  group = tiny.group(prompt=PROMPT, tails=TAILS)
  return decoder, params, group, tiny.weights(group)


@pytest.mark.exhaustive(but="llama")
@pytest.mark.parametrize("name", (
    "llama", "latent", "window and full", "hybrid", "experts",
))
def test_equals_the_reference_for_every_mixer(x64, name):
  arguments = problem(name)
  wanted = dense_gradient(*arguments, BAND)
  (_, outputs, _), gradient = banded(*arguments)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  np.testing.assert_allclose(
      outputs, br.dense_log_probs(*arguments[:3]), atol=1e-12
  )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "chunk_size,activations", [(1, "recompute_layers"), (64, "keep")]
)
def test_the_schedule_changes_nothing(x64, chunk_size, activations):
  arguments = problem()
  schedule = br.Schedule(
      chunk_size=chunk_size, activations=activations, branches_at_once=2
  )
  _, gradient = banded(*arguments, schedule=schedule)
  wanted = dense_gradient(*arguments, BAND)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("band", (
    br.Band(0, 4), br.Band(3, 0), br.Band(2, 100),
), ids=str)
def test_every_width(x64, band):
  arguments = problem()
  _, gradient = banded(*arguments, band)
  wanted = dense_gradient(*arguments, band)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


def test_a_band_as_wide_as_the_prefix_is_exact(x64):
  decoder, params, group, weights = arguments = problem()
  _, wanted = br.value_and_grad(
      decoder, tiny.loss, schedule=tree_test.SCHEDULE
  )(params, group, weights)
  for band in br.Band(PROMPT - 1, 0), br.Band(PROMPT + 50, 7):
    _, gradient = banded(*arguments, band)
    assert tiny.worst(gradient, wanted) <= 1e-13
  _, gradient = banded(*arguments, br.Band(PROMPT - 2, 0))
  assert tiny.worst(gradient, wanted) > 1e-6, "one pair is cut"


def test_no_band_is_the_pass_without_attention(x64):
  decoder, params, group, weights = arguments = problem()

  def attend(q, k, v, window=None):  # constant outputs inside of the prefix
    out = reference.causal(q, k, v, window=window)
    inner = jnp.arange(q.shape[3]) < PROMPT - 1
    return jnp.where(inner[:, None], jax.lax.stop_gradient(out), out)

  def log_probs(params):
    logits = decoder.apply({"params": params}, group.rows(), attend=attend)
    window = jax.nn.log_softmax(logits)[:, PROMPT - 1 :]
    window = window[:, : group.tails.shape[1]]
    picked = jnp.take_along_axis(window, group.tails[..., None], -1)[..., 0]
    return jnp.where(group.mask(), picked, 0)

  wanted = jax.grad(lambda p: tiny.loss(log_probs(p), weights))(params)
  _, gradient = banded(*arguments, br.Band(0, 0))
  assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.mark.exhaustive(but="window=4")
@pytest.mark.parametrize("other", (
    br.Band(4, 3), br.Band(6, 3), br.Band(5, 2), br.Band(5, 4)
), ids=str)
def test_an_edge_that_is_off_by_one_is_seen(x64, other):
  arguments = problem()
  _, gradient = banded(*arguments)
  wrong = dense_gradient(*arguments, other)
  assert tiny.worst(gradient, wrong) > 1e-3


@pytest.mark.exhaustive
def test_autodiff_and_a_captured_state(x64):
  decoder, params, group, weights = problem()
  wanted = dense_gradient(decoder, params, group, weights, BAND)
  state = br.capture(decoder, params, group)
  for given in (None, state):
    gradient = jax.grad(lambda p, given=given: tiny.loss(br.log_probs(
        decoder, p, group, state=given, prefix_gradient="banded", band=BAND,
    ), weights))(params)
    assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name,devices", [("llama", 3), ("latent", 8), ("hybrid", 3)]
)
def test_several_devices(x64, name, devices):
  arguments = problem(name)
  layout = sharding.sharded(arguments[1], devices)
  schedule = br.Schedule(chunk_size=8, layout=layout)
  for band in BAND, br.Band(2, 9):
    _, gradient = banded(*arguments, band, schedule=schedule)
    wanted = dense_gradient(*arguments, band)
    assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.mark.exhaustive(but="llama-8")
@pytest.mark.parametrize(
    "name,devices", [("llama", 8), ("latent", 1), ("hybrid", 8)]
)
def test_trees(x64, name, devices):
  # With inner segments too short to be pushed, which their children run, and
  # on several devices segments that are cut short.
  arguments = tree_test.problem(name)
  schedule = dataclasses.replace(tree_test.SCHEDULE, chunk_size=8)
  if devices > 1:
    layout = sharding.sharded(arguments[1], devices)
    schedule = dataclasses.replace(schedule, layout=layout)
  _, gradient = banded(*arguments, schedule=schedule)
  wanted = dense_gradient(*arguments, BAND)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  exact = tree_test.dense_gradient(*arguments)
  assert tiny.worst(gradient, exact) > 1e-3


@pytest.mark.exhaustive
def test_the_hosted_driver(x64):
  arguments = problem()
  _, gradient = banded(*arguments, hosted=br.Hosted())
  wanted = dense_gradient(*arguments, BAND)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.fixture
def small_tiles(monkeypatch):
  """Tiles so small that bands begin and end inside of them, and skip some."""
  monkeypatch.setattr(tiling, "BACKWARD_ROWS", 16)
  monkeypatch.setattr(tiling, "BACKWARD_COLUMNS", 8)


@pytest.mark.exhaustive(but=("6-3", "30-45"))
@pytest.mark.parametrize("sinks", (0, 3, 45))
@pytest.mark.parametrize("width", (1, 6, 30))
def test_tiles_outside_the_band_are_skipped_and_others_are_not(
    x64, small_tiles, width, sinks
):
  shape = attention_suite.Shape(tokens=41, positions=37)
  case = attention_suite.make(shape, length=33, tails=(41, 0, 30))
  query_T = 33 + np.arange(41)
  inner_GT = np.random.default_rng(1).random((3, 41)) < 0.7
  inner_GT[2] = True
  lowest_GT = np.where(inner_GT, np.maximum(query_T - width + 1, 0), 0)

  def of(attend):
    return attention_suite.run(functools.partial(
        attend, lowest_GT=jnp.asarray(lowest_GT, jnp.int32), sinks=sinks
    ), case)

  attention_suite.assert_close(
      of(attention.replay_attention), of(reference.replay_attention), 1e-12
  )


def test_wrong_bands_are_refused():
  with pytest.raises(ValueError, match="Band.window"):
    br.Band(window=-1)
  with pytest.raises(TypeError, match="band"):
    decoder, params, group, weights = problem()
    banded(decoder, params, group, weights, band=64)
