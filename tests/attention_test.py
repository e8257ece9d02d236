# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay attention: the shared suite, and what is its own."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops import attention
from branch_replay.ops.attention import reference as attention_reference
from branch_replay.ops.attention import tiling
from tests import attention_suite as suite

SMALL = {
    "FORWARD_ROWS": 24,
    "FORWARD_COLUMNS": 8,
    "BACKWARD_ROWS": 16,
    "BACKWARD_COLUMNS": 8,
    "CACHE_COLUMNS": 4,
}


@contextlib.contextmanager
def tiles_of(sizes):
  """Other tile sizes; compiled functions of the old ones are forgotten."""
  with pytest.MonkeyPatch.context() as patch:
    for name, size in sizes.items():
      patch.setattr(tiling, name, size)
    jax.clear_caches()
    yield
  jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
  with tiles_of(SMALL):
    yield


class TestReplayAttention(suite.AttentionSuite):
  attend = staticmethod(attention.replay_attention)

  def test_tiles_are_cut_on_every_axis(self):
    """So that the tests of the suite visit every loop more than once."""
    shape = suite.MAIN
    rows = shape.branches * shape.repeats * shape.tokens
    assert tiling.even(rows, SMALL["FORWARD_ROWS"]).count > 2
    assert tiling.even(rows, SMALL["BACKWARD_ROWS"]).padded > rows
    column = tiling.PrefixTiles(shape.positions, SMALL["FORWARD_COLUMNS"])
    assert column.count(shape.positions) == 5
    assert column.size * 5 > shape.positions  # the last one is moved back
    grid = tiling.causal(shape.tokens, shape.repeats, 16, 8)
    assert grid.row_count > 2 and grid.padded > shape.tokens


def same(actual, expected, rtol=1e-13):
  for got, right in zip(actual, expected, strict=True):
    np.testing.assert_allclose(got, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("a, b, expected", (
    ((0, -np.inf), (0, -np.inf), (0, -np.inf)),
    ((2, 1), (0, -np.inf), (2, 1)),
    ((0, -np.inf), (2, 1), (2, 1)),
    ((2, 0), (4, 0), (3, 0.693147)),
    ((2, -1e5), (4, -1e5), (3, 0.693147 - 1e5)),
    ((2, 0), (4, -1e5), (2, 0)),
    ((2, 0), (4, np.log(3)), (3.5, np.log(4))),
))
def test_merge_of_two_parts_is_one_attention(x64, a, b, expected):
  parts = [jnp.asarray([value], jnp.float64) for value in (a[0], b[0])]
  sums = [jnp.asarray(value, jnp.float64) for value in (a[1], b[1])]
  out, lse = attention.merge(parts[0], sums[0], parts[1], sums[1])
  np.testing.assert_allclose(out, [expected[0]], rtol=1e-12)
  np.testing.assert_allclose(lse, expected[1], atol=1e-6)


def layers_of(case, layers=3):
  """The case's prefix in the last layer, other numbers in those before."""
  random = np.random.default_rng(7)
  return tuple(
      np.concatenate([random.normal(size=(layers - 1, *x.shape)), x[None]])
      for x in (case.prefix_k, case.prefix_v)
  )


def test_forward_reads_the_layer_it_is_told(x64):
  case = suite.make(length=19, tails=suite.RAGGED)
  out, lse = jax.jit(attention.forward)(
      case.q, case.k, case.v,
      attention.PrefixLayer(layers_of(case), 2, case.length), case.tails,
  )
  expected = suite.run(attention.replay_attention, case)
  suite.assert_close(
      {"out": np.asarray(out), "lse": np.asarray(lse)},
      {name: expected[name] for name in ("out", "lse")},
      1e-14,
  )


def test_backward_adds_to_its_layer_of_the_accumulator_or_to_nothing(x64):
  case = suite.make(length=19, tails=suite.RAGGED)
  expected = suite.run(attention.replay_attention, case)
  prefix = layers_of(case)
  start = tuple(np.random.default_rng(8).normal(size=x.shape) for x in prefix)

  @jax.jit
  def backward(accumulator):
    return attention.backward(
        case.q, case.k, case.v,
        attention.PrefixLayer(prefix, 2, case.length), out=expected["out"],
        lse=expected["lse"], d_out=case.d_out, d_lse=case.d_lse,
        accumulator=accumulator,
    )

  *gradients, total = backward(start)
  same(gradients, [expected[name] for name in ("dq", "dk", "dv")])
  for got, old, name in zip(
      total, start, ("dprefix_k", "dprefix_v"), strict=True
  ):
    np.testing.assert_array_equal(got[:2], old[:2])
    np.testing.assert_array_equal(got[2, :, 19:], old[2, :, 19:])
    same([got[2] - old[2]], [expected[name]])
  *without, nothing = backward(None)
  assert nothing is None
  same(without, gradients, rtol=0)


def shapes_in(text):
  """All array shapes that a compiled program mentions."""
  return {
      tuple(int(size) for size in sizes.split(","))
      for sizes in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
  }


def buffers_per_branch(attend, shape):
  """Shapes with the prefix in them that are larger than the prefix."""
  case = suite.make(shape).astype(jnp.float32)
  text = suite.compiled(attend).lower(case).compile().as_text()
  found = shapes_in(text)
  prefix = shape.heads * shape.positions * shape.head_dim
  assert (shape.heads, shape.positions, shape.head_dim) in found
  return {
      size for size in found
      if shape.positions in size and np.prod(size) > prefix
  }


def test_no_buffer_holds_the_prefix_once_for_every_branch():
  shape = suite.Shape(
      heads=2, branches=11, repeats=3, tokens=5, positions=1009, head_dim=8
  )
  assert not buffers_per_branch(attention.replay_attention, shape)
  # The reference holds all scores, which the search must find.
  assert buffers_per_branch(attention_reference.replay_attention, shape)


@pytest.mark.parametrize("positions", (0, 37))
@pytest.mark.parametrize("at_once", (1, 3))
def test_decoding_from_a_cache_equals_the_whole_segment(
    x64, positions, at_once
):
  """A few tokens at a time, in a cache with room to spare."""
  case = suite.make(suite.Shape(tokens=6, positions=positions))
  length = min(19, positions)
  expected, _ = attention_reference.replay_attention(*case[:5], length)
  prefix, room = layers_of(case), 9

  @jax.jit
  def decode(start):
    query = start + jnp.arange(at_once)
    written = jnp.arange(room)[None, :, None] < start + at_once
    cache = tuple(
        jnp.stack([jnp.full_like(x, 99.0), x]) for x in (
            jnp.where(
                written[None], np.pad(x, ((0, 0), (0, 0), (0, 3), (0, 0))), 99.0
            )
            for x in (case.k, case.v)
        )
    )
    return attention.decode(
        jax.lax.dynamic_slice_in_dim(case.q, start, at_once, axis=3),
        cache, 1, jnp.broadcast_to(query, (3, at_once)),
        attention.PrefixLayer(prefix, 2, length),
    )

  steps = [decode(start) for start in range(0, 6, at_once)]
  same([np.concatenate(steps, axis=3)], [expected])


def test_decoding_rows_at_different_places_reads_up_to_the_longest(x64):
  """What no row sees is NaN from the next tile on, and never read."""
  case = suite.make(suite.Shape(tokens=12, positions=5))
  expected, _ = attention_reference.replay_attention(*case[:5], 3)
  slots_G = np.array([1, 6, 3])
  dead = jnp.arange(12)[None, None, :, None] >= 8  # tiles of 4
  cache = tuple(jnp.where(dead, jnp.nan, x)[None] for x in (case.k, case.v))
  rows = np.arange(3)
  out = attention.decode(
      case.q[:, rows, :, slots_G].transpose(1, 0, 2, 3)[:, :, :, None],
      cache, 0, jnp.asarray(slots_G)[:, None],
      attention.PrefixLayer(layers_of(case), 2, 3),
  )
  for row, slot in enumerate(slots_G):
    same([out[:, row, :, 0]], [expected[:, row, :, slot]])


def test_decoding_a_row_that_sees_nothing_gives_zero():
  case = suite.make(suite.Shape(tokens=1, positions=5)).astype(jnp.float32)
  out = attention.decode(
      case.q, (case.k[None], case.v[None]), 0, jnp.full((3, 1), -1),
      attention.PrefixLayer((case.prefix_k[None], case.prefix_v[None]), 0, 0),
  )
  np.testing.assert_array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("sizes", (
    {"FORWARD_ROWS": 1536, "FORWARD_COLUMNS": 512,
     "BACKWARD_ROWS": 512, "BACKWARD_COLUMNS": 256},
    {"FORWARD_ROWS": 8, "FORWARD_COLUMNS": 20,
     "BACKWARD_ROWS": 64, "BACKWARD_COLUMNS": 7},
))
def test_tile_sizes_do_not_change_the_result(x64, sizes):
  case = suite.make(length=33, tails=suite.RAGGED)
  small = suite.run(attention.replay_attention, case)
  with tiles_of(sizes):
    other = suite.run(attention.replay_attention, case)
  suite.assert_close(other, small, 1e-13)
