# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows times the matrix of their group: y_n = x_n W_e, for n in group e.

Rows are sorted by group, and the sizes of the groups are known only at run
time. A loop takes blocks of rows of one group each, so the work is that of all
rows and at most one unfinished block per group. (`jax.lax.ragged_dot` computes
the same, but on every platform except TPU it multiplies all rows by all
matrices.)

A block is written at its full size. What it writes past the end of its group is
garbage, which blocks of later groups overwrite.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib

_LARGEST = 512  # rows of a block


class _RowBlocks(NamedTuple):
  """The rows of every turn of the loop; turns from `count` on are not run."""

  group_B: jax.Array
  start_B: jax.Array
  end_B: jax.Array
  count: jax.Array


def _block_rows(rows: int, groups: int) -> int:
  """Rows of a block: a power of two near the mean size of a group."""
  return min(1 << (rows // groups).bit_length(), _LARGEST)


def _blocks(sizes_E, rows: int, size: int) -> _RowBlocks:
  groups = sizes_E.shape[0]
  ends_E, turns_E = jnp.cumsum(sizes_E), -(-sizes_E // size)
  after_E = jnp.cumsum(turns_E)
  turn_B = jnp.arange(rows // size + groups)
  done_B = jnp.sum(after_E[None] <= turn_B[:, None], axis=1)
  group_B = jnp.minimum(done_B, groups - 1)
  within_B = turn_B - (after_E - turns_E)[group_B]
  start_B = (ends_E - sizes_E)[group_B] + size * within_B
  return _RowBlocks(group_B, start_B, ends_E[group_B], after_E[-1])


@jax.custom_vjp
def grouped_dot(x_NA, w_EAB, sizes_E):
  """x_NA times the matrix of each row's group.

  Args:
    x_NA: rows, those of group 0 first.
    w_EAB: one matrix for each group.
    sizes_E: i32, number of rows of every group; their sum is N. It has no
      gradient.

  Returns:
    y_NB in the dtype of `x_NA`.
  """
  return _dot(x_NA, w_EAB, sizes_E, contract=0)


def _dot(x_NA, w_EAB, sizes_E, *, contract: int):
  """Rows times axis `contract` of their group's matrix."""
  rows, groups = x_NA.shape[0], w_EAB.shape[0]
  size = _block_rows(rows, groups)
  blocks = _blocks(sizes_E, rows, size)
  x_NA = jnp.pad(x_NA, ((0, size), (0, 0)))
  y_NB = jnp.zeros((rows + size, w_EAB.shape[2 - contract]), x_NA.dtype)

  def turn(i, y_NB):
    start = blocks.start_B[i]
    product = lax.dot_general(
        lax.dynamic_slice_in_dim(x_NA, start, size),
        w_EAB[blocks.group_B[i]],
        (((1,), (contract,)), ((), ())),
    )
    return lax.dynamic_update_slice_in_dim(y_NB, product, start, axis=0)

  return lax.fori_loop(0, blocks.count, turn, y_NB)[:rows]


def _outer(x_NA, dy_NB, sizes_E):
  """Σ x_nᵀ dy_n over the rows of every group, at least float32."""
  rows, groups = x_NA.shape[0], sizes_E.shape[0]
  size = _block_rows(rows, groups)
  blocks = _blocks(sizes_E, rows, size)
  x_NA, dy_NB = (jnp.pad(x, ((0, size), (0, 0))) for x in (x_NA, dy_NB))
  wide = config_lib.at_least_float32(x_NA.dtype)

  def turn(i, dw_EAB):
    start, group = blocks.start_B[i], blocks.group_B[i]
    mine_N1 = (start + jnp.arange(size) < blocks.end_B[i])[:, None]
    block_NA = lax.dynamic_slice_in_dim(x_NA, start, size)
    product = lax.dot_general(
        jnp.where(mine_N1, block_NA, jnp.zeros((), x_NA.dtype)),
        lax.dynamic_slice_in_dim(dy_NB, start, size),
        (((0,), (0,)), ((), ())),
        preferred_element_type=wide,
    )
    return dw_EAB.at[group].add(product)

  shape = groups, x_NA.shape[1], dy_NB.shape[1]
  return lax.fori_loop(0, blocks.count, turn, jnp.zeros(shape, wide))


def _forward(x_NA, w_EAB, sizes_E):
  return grouped_dot(x_NA, w_EAB, sizes_E), (x_NA, w_EAB, sizes_E)


def _backward(residuals, dy_NB):
  x_NA, w_EAB, sizes_E = residuals
  dx_NA = _dot(dy_NB, w_EAB, sizes_E, contract=1)
  dw_EAB = _outer(x_NA, dy_NB, sizes_E)
  return dx_NA, dw_EAB.astype(w_EAB.dtype), None


grouped_dot.defvjp(_forward, _backward)
