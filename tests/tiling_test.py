# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiles cover everything once, whatever the sizes."""

import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops.attention import tiling


@pytest.mark.parametrize("at_most", (1, 7, 8, 16, 24, 100, 512))
def test_even_tiles_hold_the_axis_with_little_padding(at_most):
  for length in range(1, 1100):
    tiles = tiling.even(length, at_most)
    assert tiles.size <= at_most
    assert tiles.size % 8 == 0 or tiles.size == at_most
    assert tiles.count == -(-length // at_most)  # no tile more than needed
    assert tiles.padded == tiles.count * tiles.size >= length
    assert tiles.padded - length < 8 * tiles.count
    assert tiles.padded - length < tiles.size  # no tile is padding alone


@pytest.mark.parametrize("at_most", (1, 7, 8, 16, 64))
@pytest.mark.parametrize("capacity", (1, 5, 8, 16, 37, 63, 64, 65, 100))
def test_columns_show_every_real_position_once(capacity, at_most):
  columns = tiling.PrefixTiles(capacity, at_most)
  assert 0 < columns.size <= min(at_most, capacity)
  positions = jnp.arange(capacity)[:, None]  # [P, D = 1]
  for length in sorted({0, 1, capacity // 2, capacity - 1, capacity}):
    count = int(columns.count(length))
    assert count == -(-length // columns.size)
    shown = []
    for j in range(count):
      (tile,) = columns.read((positions,), (), j)
      assert tile.shape == (columns.size, 1)
      (seen,) = columns.seen(j, length)
      shown += tile[np.asarray(seen), 0].tolist()
    assert shown == list(range(length))


def test_columns_add_where_they_read():
  columns = tiling.PrefixTiles(37, 8)
  total = jnp.zeros((2, 3, 37, 1))
  for j in range(columns.count(37)):
    seen = columns.seen(j, 37)[0].astype(jnp.float32)[:, None]
    (total,) = columns.add((total,), (1, 2), j, (seen,))
  expected = np.zeros((2, 3, 37, 1))
  expected[1, 2] = 1  # once each, the moved-back tile's overlap included
  np.testing.assert_array_equal(total, expected)


def grids():
  for tokens in (1, 2, 7, 8, 9, 21, 64, 65, 100, 257):
    for repeats in (1, 2, 3, 5, 8):
      for rows, columns in ((8, 8), (16, 8), (24, 8), (64, 32), (512, 256)):
        yield tokens, repeats, rows, columns


def test_causal_tiles_lie_on_a_grid_with_the_diagonal_on_corners():
  for tokens, repeats, rows, columns in grids():
    grid = tiling.causal(tokens, repeats, rows, columns)
    assert grid.repeats == repeats
    assert grid.row % 8 == 0
    assert grid.column % grid.row == 0
    assert grid.padded % grid.column == 0
    assert grid.row * grid.row_count == grid.padded
    assert grid.padded >= tokens
    # A column tile of tokens and what its row tiles are rounded up by.
    tiles = grid.padded // grid.column
    assert grid.padded - tokens < tiles * (8 * grid.rows_per_column + 1)
    assert grid.column <= columns + 8 * grid.rows_per_column
    assert grid.row * repeats <= max(rows, repeats) + 8 * repeats


def visible(grid):
  """[queries, keys]: how often each pair is visited, per query head."""
  counts = np.zeros((grid.repeats, grid.padded, grid.padded), int)
  for i in range(grid.row_count):
    for j in range(i // grid.rows_per_column + 1):  # as the loops do
      seen = np.asarray(grid.seen(i, j)).reshape(
          grid.repeats, grid.row, grid.column
      )
      rows = slice(i * grid.row, (i + 1) * grid.row)
      keys = slice(j * grid.column, (j + 1) * grid.column)
      counts[:, rows, keys] += seen
  return counts


@pytest.mark.parametrize("tokens, repeats, rows, columns", (
    (1, 1, 16, 8), (21, 2, 16, 8), (21, 3, 24, 8), (40, 5, 16, 16),
    (33, 1, 8, 24),
))
def test_causal_tiles_visit_every_pair_of_the_lower_triangle_once(
    tokens, repeats, rows, columns
):
  grid = tiling.causal(tokens, repeats, rows, columns)
  triangle = np.tril(np.ones((grid.padded, grid.padded), int))
  np.testing.assert_array_equal(
      visible(grid), np.tile(triangle, (repeats, 1, 1))
  )


def test_unravel_visits_every_head_branch_and_row_tile_once():
  grid = tiling.causal(21, 2, 16, 8)
  heads, branches = 2, 3
  visits = [
      grid.unravel(index, branches)
      for index in range(heads * branches * grid.row_count)
  ]
  assert visits == [
      (head, branch, i)
      for head in range(heads)
      for branch in range(branches)
      for i in range(grid.row_count)
  ]


def test_rows_come_back_to_where_they_were_read():
  grid = tiling.causal(21, 2, 16, 8)
  shape = 2, 3, 2, grid.padded, 4
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  rows = grid.rows(jnp.asarray(x), 1, 2, 1)
  window = slice(grid.row, 2 * grid.row)
  np.testing.assert_array_equal(
      rows, x[1, 2, :, window].reshape(2 * grid.row, 4)
  )
  written = grid.write_rows(jnp.zeros(shape), 1, 2, 1, rows)
  expected = np.zeros_like(x)
  expected[1, 2, :, window] = x[1, 2, :, window]
  np.testing.assert_array_equal(written, expected)


def test_read_write_and_add_meet_at_one_place():
  x = jnp.arange(2.0 * 3 * 10 * 2).reshape(2, 3, 10, 2)
  window = tiling.read(x, (1, 2, 4), 3)
  np.testing.assert_array_equal(window, x[1, 2, 4:7])
  np.testing.assert_array_equal(
      tiling.write(x, (1, 2, 4), -window), x.at[1, 2, 4:7].multiply(-1)
  )
  np.testing.assert_array_equal(
      tiling.add(x, (1, 2, 4), window), x.at[1, 2, 4:7].multiply(2)
  )


def test_padding_is_at_the_end_and_only_where_it_is_needed():
  x = jnp.ones((2, 3))
  assert tiling.pad(x, 1, 3) is x
  np.testing.assert_array_equal(
      tiling.pad(x, 1, 5, value=np.inf), [[1, 1, 1, np.inf, np.inf]] * 2
  )
