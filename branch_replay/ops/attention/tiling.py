# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How attention is cut into tiles: sizes, slices and masks, no mathematics."""

import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

# Measured on two server cores with 1 MiB of second-level cache each and 32 MiB
# shared: smaller tiles spend their time in dispatch, larger ones gain nothing.
FORWARD_ROWS, FORWARD_COLUMNS = 1536, 512
BACKWARD_ROWS, BACKWARD_COLUMNS = 1024, 512
CACHE_COLUMNS = 64  # of all rows and heads at once
_VECTOR = 8  # sizes are multiples of a vector register of float32


def _ceil(a, b):
  return -(-a // b)


def _round_up(size: int, unit: int = _VECTOR) -> int:
  return _ceil(size, unit) * unit


class Even(NamedTuple):
  """An axis cut into `count` tiles of `size`; `padded` = count · size."""

  count: int
  size: int

  @property
  def padded(self) -> int:
    return self.count * self.size


def even(length: int, at_most: int, unit: int = _VECTOR) -> Even:
  """Cuts an axis into nearly equal tiles, with the least padding.

  Args:
    length: length of the axis.
    at_most: largest size of a tile.
    unit: number that sizes are multiples of.
  """
  count = _ceil(length, at_most)
  return Even(count, min(_round_up(_ceil(length, count), unit), at_most))


def pad(x, axis: int, length: int, value=0.0):
  """Pads one axis of x at its end to `length`."""
  if x.shape[axis] == length:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, length - x.shape[axis])
  return jnp.pad(x, widths, constant_values=value)


def _indices(x, at):
  # One integer type, because i32 lengths and x64 counters are mixed.
  at = (*at, *(0,) * (x.ndim - len(at)))
  return tuple(jnp.asarray(index, jnp.int32) for index in at)


def read(x, at, size: int):
  """x[at[0], ..., at[-1] : at[-1] + size]: one index per leading axis."""
  shape = (1,) * (len(at) - 1) + (size,) + x.shape[len(at):]
  window = lax.dynamic_slice(x, _indices(x, at), shape)
  return window.reshape(shape[len(at) - 1 :])


def read_cache(x_LKGSD, layer, start, size: int):
  """x[layer, :, :, start : start + size]: the same slots of every row."""
  shape = (1, *x_LKGSD.shape[1:3], size, x_LKGSD.shape[4])
  at = _indices(x_LKGSD, (layer, 0, 0, start))
  return lax.dynamic_slice(x_LKGSD, at, shape)[0]


def read_stretch(x_LKPD, layer, start, size: int):
  """x[layer, :, start : start + size]: the same positions of all heads."""
  shape = (1, x_LKPD.shape[1], size, x_LKPD.shape[3])
  at = _indices(x_LKPD, (layer, 0, start))
  return lax.dynamic_slice(x_LKPD, at, shape)[0]


def add_stretch(x_LKPD, layer, start, window_KBD):
  """x with `window` added where `read_stretch` reads it."""
  old = read_stretch(x_LKPD, layer, start, window_KBD.shape[1])
  new = (old.astype(window_KBD.dtype) + window_KBD).astype(x_LKPD.dtype)
  at = _indices(x_LKPD, (layer, 0, start))
  return lax.dynamic_update_slice(x_LKPD, new[None], at)


def write(x, at, window):
  """x with `window` written where `read` reads it."""
  window = window.reshape((1,) * (len(at) - 1) + window.shape)
  return lax.dynamic_update_slice(x, window.astype(x.dtype), _indices(x, at))


def add(x, at, window):
  """x with `window` added where `read` reads it."""
  old = read(x, at, window.shape[0]).astype(window.dtype)
  return write(x, at, old + window)  # rounded once if x is narrower


class PrefixTiles:
  """Tiles over the positions of a prefix state of any capacity.

  If sizes do not divide the capacity, the last tile is moved back so that it
  ends at the capacity; `seen` hides the positions that the tile before has
  read.
  """

  def __init__(self, capacity: int, at_most: int):
    self.size = min(capacity, at_most)
    self._last = capacity - self.size

  def _start(self, j):
    return jnp.minimum(j * self.size, self._last)

  def count(self, length):
    """Number of tiles that hold the first `length` positions."""
    return _ceil(length, self.size)

  def holding(self, position):
    """The tile that holds a position."""
    return position // self.size

  def seen(self, j, length, lowest_N=None):
    """[1, B]: which positions of tile j are real and not read before.

    With `lowest_N`, the lowest position that each row may see, [N, B].
    """
    position = self._start(j) + jnp.arange(self.size)
    seen = ((position >= j * self.size) & (position < length))[None]
    if lowest_N is None:
      return seen
    return seen & (position[None] >= lowest_N[:, None])

  def read(self, pair, at, j):
    """Tile j of each array of `pair`, [B, D]."""
    return tuple(read(x, (*at, self._start(j)), self.size) for x in pair)

  def add(self, pair, at, j, windows):
    """`pair` with `windows` added to tile j of each array."""
    return tuple(
        add(x, (*at, self._start(j)), window)
        for x, window in zip(pair, windows, strict=True)
    )


class Blocks(NamedTuple):
  """Blocks of tokens; a query sees all of its own block and all before it.

  Attributes:
    size: B, tokens of a block.
    start: i32, first token of the first block; tokens before it are causal.
    lengths_G: i32, real tokens of each branch; others are not seen.
  """

  size: int
  start: jax.Array | int
  lengths_G: jax.Array

  def last(self, query):
    """The last token that a query sees."""
    block = (query - self.start) // self.size + 1
    return jnp.where(
        query < self.start, query, self.start + block * self.size - 1
    )

  def first(self, key):
    """The first query that sees a token."""
    block = (key - self.start) // self.size
    return jnp.where(key < self.start, key, self.start + block * self.size)


class Reach(NamedTuple):
  """To which keys of a segment its queries send cotangents; see `op.Band`.

  Attributes:
    lowest_GT: i32, the first token whose key each query reaches.
    sinks: i32 scalar; every query also reaches the first so many tokens.
  """

  lowest_GT: jax.Array
  sinks: jax.Array | int

  def padded(self, length: int) -> "Reach":
    """With queries of padding, which reach no key but the sinks'."""
    return self._replace(
        lowest_GT=pad(self.lowest_GT, 1, length, value=length)
    )


class Causal(NamedTuple):
  """The lower triangle of a segment's scores, cut into tiles by `causal`.

  A row tile holds `row` tokens of R query heads, R·row rows. A column tile
  covers row · rows_per_column tokens, so that the diagonal meets tiles at their
  corners. Every `stride`-th of these tokens has its key on this device,
  `column` keys.
  """

  repeats: int
  row: int
  rows_per_column: int
  padded: int
  stride: int = 1

  @property
  def column(self) -> int:
    return self.row * self.rows_per_column // self.stride

  @property
  def keys(self) -> int:
    """Number of keys on this device, padding included."""
    return self.padded // self.stride

  @property
  def row_count(self) -> int:
    return self.padded // self.row

  def unravel(self, index, branches: int):
    """(head, branch, row tile) of a flat index."""
    head = index // (branches * self.row_count)
    return head, index // self.row_count % branches, index % self.row_count

  def seen(self, i, j, offset=0, window=None, blocks=None, branch=0):
    """[R·row, column]: which keys of tile j the rows of tile i may see."""
    query = i * self.row + jnp.arange(self.row)
    key = j * self.column + jnp.arange(self.column)
    key = key * self.stride + offset
    last = query if blocks is None else blocks.last(query)
    seen = key[None, :] <= last[:, None]
    if blocks is not None:
      seen &= key[None, :] < blocks.lengths_G[branch]
    if window is not None:
      seen &= query[:, None] - key[None, :] < window
    return jnp.tile(seen, (self.repeats, 1))

  def reached(self, i, j, reach: Reach, offset, branch):
    """[R·row, column]: which keys of tile j the rows of tile i reach.

    Also returns whether any token of tile j is reached by any row of tile i.
    """
    lowest = read(reach.lowest_GT, (branch, i * self.row), self.row)
    key = (j * self.column + jnp.arange(self.column)) * self.stride + offset
    reached = (key[None] >= lowest[:, None]) | (key[None] < reach.sinks)
    tokens = self.row * self.rows_per_column
    some = jnp.min(lowest) < (j + 1) * tokens
    some |= j * tokens < reach.sinks
    return jnp.tile(reached, (self.repeats, 1)), some

  def columns(self, i, window=None, blocks=None):
    """(first, end) of the column tiles with keys that row tile i sees."""
    end = i // self.rows_per_column + 1  # stops at the diagonal
    if blocks is not None:
      tokens = self.row * self.rows_per_column
      last = blocks.last((i + 1) * self.row - 1)
      end = jnp.minimum(last, self.padded - 1) // tokens + 1
    if window is None:
      return 0, end
    lowest = jnp.maximum(i * self.row - window + 1, 0)
    return lowest // (self.row * self.rows_per_column), end

  def visible_to(self, j, window=None, blocks=None):
    """(first, end) of the row tiles that see keys of column tile j."""
    first = j * self.rows_per_column  # rows above the diagonal see nothing
    if blocks is not None:
      first = blocks.first(first * self.row) // self.row
    if window is None:
      return first, self.row_count
    highest = (j + 1) * self.row * self.rows_per_column + window - 2
    return first, jnp.minimum(highest // self.row + 1, self.row_count)

  def rows(self, x_KGRT, head, branch, i):
    """Row tile i: R·row rows of one head and branch of [K, G, R, T, ...]."""
    at = (head, branch, 0, i * self.row)
    shape = (1, 1, self.repeats, self.row) + x_KGRT.shape[4:]
    window = lax.dynamic_slice(x_KGRT, _indices(x_KGRT, at), shape)
    return window.reshape(self.repeats * self.row, *x_KGRT.shape[4:])

  def write_rows(self, x_KGRT, head, branch, i, rows):
    """x_KGRT with row tile i replaced."""
    at = (head, branch, 0, i * self.row)
    shape = (1, 1, self.repeats, self.row) + x_KGRT.shape[4:]
    return lax.dynamic_update_slice(
        x_KGRT, rows.reshape(shape).astype(x_KGRT.dtype), _indices(x_KGRT, at)
    )


def causal(
    tokens: int, repeats: int, rows: int, columns: int, stride: int = 1
) -> Causal:
  """Cuts a segment's scores into tiles.

  Args:
    tokens: T.
    repeats: R, query heads per key head.
    rows: about the largest number of rows of a tile.
    columns: about the largest number of columns of a tile.
    stride: every `stride`-th key is on this device.
  """
  count = _ceil(tokens, columns * stride)
  column = _ceil(tokens, count)
  per_column = _ceil(repeats * column, max(rows, repeats))
  unit = math.lcm(_VECTOR, stride)
  row = _ceil(_ceil(column, per_column), unit) * unit
  return Causal(repeats, row, per_column, count * row * per_column, stride)
