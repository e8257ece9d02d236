# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: what is seen, what is visited, and the reference."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.ops import attention
from branch_replay.ops.attention import reference as attention_reference
from branch_replay.ops.attention import tiling
from branch_replay.planning import flops
from tests import attention_suite as suite
from tests import attention_test
from tests import tiny

SLIDING = dataclasses.replace(
    tiny.BASE, layer_pattern=("sliding",), window=4
)


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
  with attention_test.tiles_of(attention_test.SMALL):
    yield


@functools.cache
def windowed(attend, window):
  return functools.partial(attend, window=window)


@pytest.mark.parametrize("window, length, tails", (
    (1, 19, suite.RAGGED), (4, 0, None), (9, 37, (1, 21, 8)),
    (30, 33, suite.RAGGED), (99, 37, None),
))
def test_equals_the_reference(x64, window, length, tails):
  case = suite.make(length=length, tails=tails)
  actual, expected = (
      suite.run(windowed(attend, window), case)
      for attend in (
          attention.replay_attention, attention_reference.replay_attention
      )
  )
  suite.assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("attend", (
    attention.replay_attention, attention_reference.replay_attention
))
def test_a_window_of_four_shows_four_keys_its_own_included(x64, attend):
  """Equal scores and one-hot values: the output shows who is visible."""
  one_hot = jnp.eye(8)
  nothing = jnp.zeros((1, 1, 1, 7, 8))
  out, _ = attend(
      nothing[..., :6, :], nothing[0, ..., :6, :], one_hot[None, None, :6],
      nothing[0, 0, :, :0], one_hot[None, :0], 0, window=4,
  )
  seen = np.asarray(out[0, 0, 0]) > 0
  assert seen.sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4]
  # A tail at position 6 after a prefix of 6 sees positions 3…6.
  out, lse = attend(
      nothing[..., :1, :], nothing[0, ..., :1, :], one_hot[None, None, 6:7],
      nothing[0, 0, :, :6], one_hot[None, :6], 6, window=4,
  )
  assert np.flatnonzero(out[0, 0, 0, 0]).tolist() == [3, 4, 5, 6]
  np.testing.assert_allclose(lse, np.log(4))


def test_tiles_of_the_prefix_before_the_window_are_not_read(x64):
  """NaN there would reach the output through a product with 0."""
  case = suite.make(length=37)
  for name in ("prefix_k", "prefix_v"):
    getattr(case, name)[:, :29] = np.nan  # the last tile is of 29…36
  result = suite.run(windowed(attention.replay_attention, 4), case)
  for name, value in result.items():
    assert np.isfinite(value).all(), name
  wider = suite.run(windowed(attention.replay_attention, 10), case)
  assert np.isnan(wider["out"]).any()
  assert np.isnan(wider["dq"]).any()


@pytest.mark.parametrize("window", (1, 3, 8, 17, 100))
@pytest.mark.parametrize("tokens, rows, columns", ((21, 16, 8), (40, 8, 24)))
def test_tiles_visit_every_pair_of_the_band_once(
    window, tokens, rows, columns
):
  grid = tiling.causal(tokens, 1, rows, columns)
  at = np.arange(grid.padded)
  distance = at[:, None] - at[None]
  band = (distance >= 0) & (distance < window)
  by_row, by_column = np.zeros_like(band, int), np.zeros_like(band, int)
  visits = 0

  def add(counts, i, j):
    where = (
        slice(i * grid.row, (i + 1) * grid.row),
        slice(j * grid.column, (j + 1) * grid.column),
    )
    counts[where] += np.asarray(grid.seen(i, j, 0, window))
    assert band[where].any(), "a tile of nothing"

  for i in range(grid.row_count):
    for j in range(*map(int, grid.columns(i, window))):
      add(by_row, i, j)
      visits += 1
  for j in range(grid.padded // grid.column):
    for i in range(*map(int, grid.visible_to(j, window))):
      add(by_column, i, j)
      visits -= 1
  np.testing.assert_array_equal(by_row, band)
  np.testing.assert_array_equal(by_column, band)
  assert visits == 0


def test_decoding_equals_the_whole_segment(x64):
  case = suite.make(suite.Shape(tokens=6, positions=37))
  length, window = 19, 4
  expected, _ = attention_reference.replay_attention(
      *case[:5], length, window=window
  )
  prefix = case.prefix_k[None], case.prefix_v[None]
  cache, steps = (case.k[None], case.v[None]), []
  for step in range(0, 6, 2):  # two tokens at a time
    slots_GT = jnp.broadcast_to(step + jnp.arange(2)[None], (3, 2))
    steps.append(attention.decode(
        case.q[..., step : step + 2, :], cache, 0, slots_GT,
        attention.PrefixLayer(prefix, 0, length), window=window,
        lowest_GT=jnp.maximum(length + slots_GT - window + 1, 0),
    ))
  np.testing.assert_allclose(
      np.concatenate(steps, axis=3), expected, rtol=1e-12, atol=1e-12
  )


def test_a_tail_does_not_see_past_its_window_and_does_within(x64):
  """One layer: the log-prob at position i depends on tokens i − 3…i alone."""
  config = tiny.in_float64(dataclasses.replace(SLIDING, num_layers=1))
  decoder, params = tiny.model(config)
  group = tiny.group(prompt=12, tails=(5, 5))

  def changed(position):
    other = group.prompt.at[position].set((group.prompt[position] + 1) % 64)
    moved = br.log_probs(
        decoder, params, dataclasses.replace(group, prompt=other)
    )
    return np.asarray(moved != br.log_probs(decoder, params, group))[:, :5]

  # Tail token t is predicted at position 11 + t, which sees 8 + t and later.
  assert not changed(7).any()
  assert changed(9)[:, :2].all() and not changed(9)[:, 2:].any()


def test_work_is_that_of_the_pairs_that_are_seen():
  def pairs(window, tokens, prefix):
    at = np.arange(prefix, prefix + tokens)
    return np.minimum(at + 1, window).sum()

  full = flops.forward(tiny.BASE, 10, 30)
  for window, tokens, prefix in ((4, 10, 0), (4, 10, 30), (20, 10, 15)):
    of_window = flops.forward(
        dataclasses.replace(SLIDING, window=window), tokens, prefix
    )
    linear = 2 * flops.layer_parameters(tiny.BASE) * tokens
    # Halves of the diagonal are left out of the count.
    wanted = 4 * 2 * 4 * 16 * pairs(window, tokens, prefix)
    assert abs(of_window - linear - wanted) <= 4 * 2 * 4 * 16 * tokens / 2
  wide = dataclasses.replace(SLIDING, window=40)
  assert flops.forward(wide, 10, 30) == full
  assert flops.forward(SLIDING, 10, 30) < full


@pytest.mark.parametrize("options, message", (
    (dict(layer_pattern=()), "layer_pattern"),
    (dict(layer_pattern=["full"]), "tuple"),
    (dict(layer_pattern=("local",)), "local.*sliding"),
    (dict(layer_pattern=("sliding",)), "window=None"),
    (dict(window=4), "window=4"),
    (dict(rope_theta_local=1e4), "rope_theta_local=10000.0.*only sliding"),
    (dict(rotary_dim=5), "rotary_dim=5 must be even and less"),
    (dict(rotary_dim=16), "rotary_dim=16.*head_dim=16.*None to rotate all"),
    (dict(activation="gelu"), "'gelu'.*silu, gelu_tanh"),
    (dict(layer_pattern=("sliding",), window=0), "at least 1, not 0"),
    (dict(layer_pattern=("full", "full")), r"repeats itself.*\('full',\)"),
    (
        dict(layer_pattern=("sliding", "full", "full"), window=4),
        "3 kinds for 2 layers",
    ),
))
def test_patterns_that_are_none_are_errors_that_say_why(options, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(tiny.BASE, **options)
