# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""In what order runs are pushed, visited and popped: depth first, one state.

The program of a group pushes the chunks of its prefix, visits its branches and
pops the chunks. That of a tree does so at every inner segment.

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

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.data import group as group_lib
from branch_replay.data import token_tree
from branch_replay.engine import runs
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib

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


class Step(NamedTuple):
  """What is done with one run.

  Attributes:
    kind: push, visit or pop.
    run: the run, `runs.Run`; its `read` is None where no output is wanted.
    places: i32, where the run's outputs belong: of a tree [R, T], places among
      its tokens, `NOWHERE` for outputs that are not wanted; of a group [R],
      its branches. None where no output is wanted.
  """

  kind: Kind
  run: runs.Run
  places: np.ndarray | None


class Program(NamedTuple):
  """The steps of one tree or group.

  Attributes:
    steps: in order.
    capacity: positions of the state, those of the longest path that is pushed.
    outputs: of how many tokens (a tree) or branches (a group) outputs are.
  """

  steps: list[Step]
  capacity: int
  outputs: int

  @property
  def started(self) -> list[runs.Run]:
    """The runs, each once."""
    return [step.run for step in self.steps if step.kind != Kind.CLOSE]

  @property
  def inner(self) -> list[runs.Run]:
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
    return sum(int(np.sum(run.lengths_R)) for run in self.started)

  @property
  def padded_tokens(self) -> int:
    """Tokens that go through the model."""
    return sum(run.tokens_RS.size for run in self.started)


def of_group(spec: spec_lib.Spec, group: group_lib.Group) -> Program:
  """The steps of one group: its prefix, its branches, and back.

  Args:
    spec: mode and schedule.
    group: the group, with values.
  """
  prefix = int(group.prompt_length) - 1
  chunks = spec.chunks(0 if spec.whole else group.prompt.shape[0] - 1)
  tokens = jnp.pad(
      group.prompt[:-1], (0, max(0, chunks.capacity - group.prompt.size + 1))
  )
  used = int(runs.chunks_used(prefix, chunks)) if chunks.count else 0
  pushed = [
      runs.chunk(tokens, prefix, index, chunks.size, _answered(group))
      for index in range(used)
  ]
  steps = [Step(Kind.OPEN, run, None) for run in pushed]
  everything = runs.branches(spec, group)
  branches = group.tails.shape[0]
  for start in range(0, branches, spec.at_once(branches)):
    rows = np.arange(start, min(start + spec.at_once(branches), branches))
    part = jax.tree.map(lambda x, rows=rows: x[rows], everything.rows)
    steps.append(Step(Kind.VISIT, everything.of_rows(part), rows))
  steps += [Step(Kind.CLOSE, run, None) for run in reversed(pushed)]
  return Program(steps, chunks.capacity, branches)


def _answered(group) -> int:
  return int(np.sum(np.asarray(group.tail_lengths) > 0))


class _Stretch(NamedTuple):
  """Positions [first, stop) of the path to a segment; `index` as in `Run`."""

  segment: int
  first: int
  stop: int
  index: np.ndarray


def of_tree(
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
        [Step(Kind.VISIT, *build([leaf], 1)) for leaf in leaves], 0,
        tree.tokens.size,
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
      steps.append(Step(kind, *segment))
      continue
    if segment != token_tree.NO_PARENT:
      stretch = inner[segment]
      uncut = mode == "stop" and (stretch.index >= 0).any()
      size = stretch.stop - stretch.first if uncut else chunk_size
      for part in _chunks(stretch, size, devices):
        run = build([part], 1)
        deepest = max(deepest, part.first + run[0].tokens_RS.shape[1])
        steps.append(Step(Kind.OPEN, *run))
        waiting.append((Kind.CLOSE, run))
    mine = [leaf for leaf in leaves
            if anchors[tree.parents[leaf.segment]] == segment]
    for rows in _together(mine, at_once):
      steps.append(Step(Kind.VISIT, *build(rows, _rows(len(rows), at_once))))
    waiting += [(Kind.OPEN, child) for child in reversed(below[segment])]
  return Program(steps, _padded(deepest, devices), tree.tokens.size)


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
) -> tuple[runs.Run, np.ndarray | None]:
  """Stretches of the same first position as the rows of a run; its places."""
  lengths = [stretch.stop - stretch.first for stretch in stretches]
  width = _padded(max(lengths), devices)
  tokens, targets = np.zeros((2, rows, width), np.int32)
  through = [sequences[stretch.segment] for stretch in stretches]
  places = np.full((rows, width), token_tree.NOWHERE, np.int32)
  for row, (stretch, length) in enumerate(
      zip(stretches, lengths, strict=True)
  ):
    path = tree.tokens[
        tree.places(stretch.segment, stretch.first, stretch.stop + 1)
    ]
    tokens[row, :length], targets[row, :length] = path[:-1], path[1:]
    places[row, :length] = stretch.index
  padding = [0] * (rows - len(lengths))
  lengths = np.array(lengths + padding, np.int32)
  wanted = (places >= 0).any()
  return runs.Run(
      np.int32(stretches[0].first), tokens, lengths,
      np.array(through + padding, np.int32),
      runs.Read(targets, lengths, np.int32(0)) if wanted else None,
  ), places if wanted else None
