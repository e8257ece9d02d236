# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""In what order a tree is run: depth first, over one state.

The last token of an inner segment predicts the first token of every child. So a
segment runs on the token before its own first one, up to the last but one of
its own, and a child starts where its parent stopped:

  tokens that are run = distinct tokens that predict + one per extra child.

On several devices a segment stops at a multiple of their number, so that the
state is dealt out evenly, and its children run the few tokens that are left;
of their outputs one child's are taken.
"""

import enum
import functools
from typing import NamedTuple

import numpy as np

from branch_replay import group as group_lib
from branch_replay import state as state_lib
from branch_replay import token_tree

# Tokens; a shorter inner segment is run by each of its children, as a matrix of
# so few rows costs more than it saves. Not measured.
_LEAST = 16
_ANY_LENGTH = 64  # below, tails of any lengths are run side by side


class Kind(enum.Enum):
  """What is done with a run.

  OPEN pushes it onto the state, VISIT runs leaves on top of the state, CLOSE
  takes the run that was opened last off the state.
  """

  OPEN = "open"
  VISIT = "visit"
  CLOSE = "close"


class Run(NamedTuple):
  """Rows of C tokens that run side by side, at the same positions.

  Attributes:
    first: i32[], the position of the first token of every row.
    tokens: i32[R, C] ids, padded.
    targets: i32[R, C], the id that follows each.
    lengths: i32[R], real tokens of each row.
    index: i32[R, C], where the targets are among the tree's tokens;
      `NOWHERE` for those whose output is not wanted.
    sequences: i32[R], in how many of the tree's sequences a row stands.
  """

  first: np.ndarray
  tokens: np.ndarray
  targets: np.ndarray
  lengths: np.ndarray
  index: np.ndarray
  sequences: np.ndarray

  @property
  def read(self) -> bool:
    """Whether an output is wanted."""
    return bool((self.index >= 0).any())


class Step(NamedTuple):
  """What is done to one run of tokens.

  Attributes:
    kind: which of the compiled steps.
    run: the tokens.
  """

  kind: Kind
  run: Run


class Program(NamedTuple):
  """The steps of one tree.

  Attributes:
    steps: in order.
    capacity: positions of the state, those of the longest path that is pushed.
  """

  steps: list[Step]
  capacity: int

  @property
  def started(self) -> list[Run]:
    """The runs, each once."""
    return [step.run for step in self.steps if step.kind != Kind.CLOSE]

  @property
  def inner(self) -> list[Run]:
    """The runs that are pushed, in order."""
    return [step.run for step in self.steps if step.kind == Kind.OPEN]

  @property
  def depth(self) -> int:
    """Runs that are open at a time, at most; a power of two."""
    turns = {Kind.OPEN: 1, Kind.CLOSE: -1, Kind.VISIT: 0}
    deepest = max(np.cumsum([turns[step.kind] for step in self.steps]))
    return 1 << max(int(deepest) - 1, 0).bit_length()

  @property
  def tokens(self) -> int:
    """Tokens that go through the model, without padding."""
    return sum(int(run.lengths.sum()) for run in self.started)

  @property
  def padded_tokens(self) -> int:
    """Tokens that go through the model."""
    return sum(run.tokens.size for run in self.started)


class _Stretch(NamedTuple):
  """Positions [first, stop) of the path to a segment; `index` as in `Run`."""

  segment: int
  first: int
  stop: int
  index: np.ndarray


def program(
    tree: token_tree.Tree,
    mode: str,
    *,
    chunk_size: int,
    at_once: int | None = None,
    devices: int = 1,
    least: int = _LEAST,
    whole: bool = False,
) -> Program:
  """The steps of a tree.

  Args:
    tree: the tree.
    mode: "full" visits each sequence whole, on a state of nothing. In "stop"
      what a segment holds constant ends with its parent, so none is run again
      by its children, and one with outputs is opened whole; else in chunks.
    chunk_size: most tokens of an inner segment that are run at a time.
    at_once: most leaves that are run side by side; None for all of a parent.
    devices: that share the tokens.
    least: tokens; shorter inner segments are run by each of their children.
    whole: run what no wanted output depends on, too: every sequence to its
      last token but one.

  Returns:
    The program.

  Raises:
    ValueError: no token carries loss.
  """
  if not tree.trained.any():
    raise ValueError("No token of the tree carries loss: nothing to read.")
  build = functools.partial(_run, tree, devices, _sequences_through(tree))
  if mode == "full":
    leaves = _whole_sequences(tree, whole)
    return Program(
        [Step(Kind.VISIT, build([leaf], 1)) for leaf in leaves], 0
    )
  least = 1 if mode == "stop" else max(least, 1)
  inner, leaves, anchors = _stretches(tree, devices, least, whole)
  below = {anchor: [] for anchor in (token_tree.NO_PARENT, *inner)}
  for segment in inner:
    below[anchors[tree.parents[segment]]].append(segment)
  steps, deepest = [], 0
  waiting = [(Kind.VISIT, token_tree.NO_PARENT)]
  while waiting:
    kind, segment = waiting.pop()
    if kind == Kind.CLOSE:
      steps.append(Step(kind, segment))
      continue
    if segment != token_tree.NO_PARENT:
      stretch = inner[segment]
      uncut = mode == "stop" and (stretch.index >= 0).any()
      size = stretch.stop - stretch.first if uncut else chunk_size
      for part in _chunks(stretch, size, devices):
        run = build([part], 1)
        deepest = max(deepest, part.first + run.tokens.shape[1])
        steps.append(Step(Kind.OPEN, run))
        waiting.append((Kind.CLOSE, run))
    mine = [leaf for leaf in leaves
            if anchors[tree.parents[leaf.segment]] == segment]
    for rows in _together(mine, at_once):
      steps.append(Step(Kind.VISIT, build(rows, _rows(len(rows), at_once))))
    waiting += [(Kind.OPEN, child) for child in reversed(below[segment])]
  return Program(steps, _padded(deepest, devices))


def _padded(length: int, devices: int) -> int:
  return -(-group_lib.bucket(length) // devices) * devices


def _sequences_through(tree) -> np.ndarray:
  """How many sequences a segment is part of, of every segment."""
  count = np.zeros(len(tree.parents), np.int32)
  count[tree.leaves] = 1
  for segment in reversed(range(1, len(count))):
    count[tree.parents[segment]] += count[segment]
  return count


def _stretches(tree, devices, least, whole):
  """What each segment runs.

  Returns:
    The inner segments that are pushed, by their number; the leaves; and for
    every segment the last one of its path that is pushed, with `NO_PARENT`'s
    at the end, where index −1 finds it.
  """
  count = len(tree.parents)
  ends = tree.positions + tree.lengths
  first, stop = np.zeros(count, int), ends - 1
  anchors = np.full(count + 1, token_tree.NO_PARENT)
  taken = np.zeros(tree.tokens.size, bool)
  stretches = []
  for segment in range(count):
    parent = tree.parents[segment]
    if segment != token_tree.ROOT:
      first[segment], anchors[segment] = stop[parent], anchors[parent]
    if tree.children[segment]:
      stop[segment] -= stop[segment] % devices
      if stop[segment] - first[segment] < least:
        stop[segment] = first[segment]
      else:
        anchors[segment] = segment
    index = _wanted(tree, segment, first[segment], stop[segment], taken)
    stretches.append(
        _Stretch(segment, int(first[segment]), int(stop[segment]), index)
    )
  needed = np.array([whole or (x.index >= 0).any() for x in stretches])
  for segment in reversed(range(1, count)):
    needed[tree.parents[segment]] |= needed[segment]
  inner, leaves = {}, []
  for stretch in stretches:
    if not needed[stretch.segment]:
      continue
    if stretch.stop == stretch.first:
      continue
    if tree.children[stretch.segment]:
      inner[stretch.segment] = stretch
    else:
      leaves.append(stretch if whole else _shortened(stretch))
  return inner, leaves, anchors


def _whole_sequences(tree, whole) -> list[_Stretch]:
  """Every sequence from its first token on, for outputs not taken before.

  Those that have none are left out unless `whole`.
  """
  taken = np.zeros(tree.tokens.size, bool)
  found = []
  for leaf in tree.leaves:
    end = int(tree.positions[leaf] + tree.lengths[leaf])
    index = _wanted(tree, leaf, 0, end - 1, taken)
    if (index >= 0).any() or (whole and end > 1):
      found.append(_Stretch(int(leaf), 0, end - 1, index))
  return found


def _wanted(tree, segment, first, stop, taken):
  """The places of the targets after [first, stop), each taken once."""
  places = tree.places(segment, first + 1, stop + 1)
  wanted = tree.trained[places] & ~taken[places]
  taken[places[wanted]] = True
  return np.where(wanted, places, token_tree.NOWHERE)


def _shortened(stretch: _Stretch) -> _Stretch:
  """A leaf up to the last output that is wanted."""
  length = int(np.flatnonzero(stretch.index >= 0)[-1]) + 1
  return stretch._replace(
      stop=stretch.first + length, index=stretch.index[:length]
  )


def _chunks(stretch: _Stretch, at_most: int, devices: int):
  """A stretch in chunks, the last of which may be ragged."""
  size = state_lib.chunks(
      stretch.stop - stretch.first, at_most, devices
  ).size
  for start in range(stretch.first, stretch.stop, size):
    stop = min(start + size, stretch.stop)
    at = start - stretch.first
    yield stretch._replace(
        first=start, stop=stop, index=stretch.index[at : at + size]
    )


def _together(leaves, at_once):
  """Leaves of one parent as visits of similar lengths, longest first."""
  visits, longest = [], 0
  for leaf in sorted(leaves, key=lambda leaf: leaf.first - leaf.stop):
    length = group_lib.bucket(leaf.stop - leaf.first)
    alike = max(longest, length) <= _ANY_LENGTH or 4 * length >= 3 * longest
    if not visits or not alike or len(visits[-1]) == at_once:
      visits.append([])
      longest = length
    visits[-1].append(leaf)
  return visits


def _rows(count: int, at_once: int | None) -> int:
  """Rows that `count` share a compilation with: 1, 2, 3, 4, 6, 8, 12, …"""
  power = 1 << (count - 1).bit_length()
  rows = power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power
  return rows if at_once is None else min(rows, max(at_once, count))


def _run(
    tree, devices, sequences, stretches: list[_Stretch], rows: int
) -> Run:
  """Stretches of the same first position as the rows of a run."""
  lengths = [stretch.stop - stretch.first for stretch in stretches]
  width = _padded(max(lengths), devices)
  tokens, targets = np.zeros((2, rows, width), np.int32)
  through = [sequences[stretch.segment] for stretch in stretches]
  index = np.full((rows, width), token_tree.NOWHERE, np.int32)
  for row, (stretch, length) in enumerate(
      zip(stretches, lengths, strict=True)
  ):
    path = tree.tokens[
        tree.places(stretch.segment, stretch.first, stretch.stop + 1)
    ]
    tokens[row, :length], targets[row, :length] = path[:-1], path[1:]
    index[row, :length] = stretch.index
  padding = [0] * (rows - len(lengths))
  return Run(
      np.int32(stretches[0].first), tokens, targets,
      np.array(lengths + padding, np.int32), index,
      np.array(through + padding, np.int32),
  )
