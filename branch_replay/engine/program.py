# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A program: in which order the runs of a group or tree are pushed and popped.

The program of a group pushes the chunks of its prefix, visits its branches and
pops the chunks. The program of a tree does so at every inner segment (one that
has children), depth first, so that one state serves the whole tree.

The last token of an inner segment predicts the first token of every child, so
each child runs it. The run of a segment therefore starts at its parent's last
token and stops before its own last one:

  tokens that are run = distinct tokens that predict + one per extra child.

On several devices the state is dealt out evenly, so a segment stops at a
multiple of their number. Its children run the few tokens that are left, and the
outputs of those tokens are taken from one of the children.
"""

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
from branch_replay.engine.runs import Action

# An inner segment of fewer tokens is not pushed but run again by each child:
# a matrix of so few rows costs more than it saves. Not measured.
_LEAST = 16
_ANY_LENGTH = 64  # leaves of up to so many tokens run together, however unlike


class ProgramStep(NamedTuple):
  """One step of a program.

  Attributes:
    action: what to do with the run.
    run: the run; its `read` is None if none of its outputs are wanted. A run
      that is visited is of leaves.
    index: i32, the index of each of the run's outputs among those of the
      program. In a tree [R, T], tokens, or `NOWHERE` for an output that is not
      wanted; in a group [R], branches. None if no output is wanted.
  """

  action: Action
  run: runs.Run
  index: np.ndarray | None


class Program(NamedTuple):
  """The steps of one tree or group.

  Attributes:
    steps: the steps, in order.
    capacity: positions the state must have room for: the longest pushed path.
    outputs: N, the leading axis of the outputs: tokens of a tree, or branches
      of a group.
  """

  steps: list[ProgramStep]
  capacity: int
  outputs: int

  @property
  def started(self) -> list[runs.Run]:
    """All runs that are pushed or visited, in order."""
    return [step.run for step in self.steps if step.action != Action.POP]

  @property
  def pushed(self) -> list[runs.Run]:
    """The runs that are pushed, in order."""
    return [step.run for step in self.steps if step.action == Action.PUSH]

  @property
  def visited(self) -> list[runs.Run]:
    """The runs that are visited, in order."""
    return [step.run for step in self.steps if step.action == Action.VISIT]

  @property
  def depth(self) -> int:
    """Most runs that are on the state at a time, rounded up to a power of two.
    """
    change = {Action.PUSH: 1, Action.POP: -1, Action.VISIT: 0}
    deepest = max(np.cumsum([change[step.action] for step in self.steps]))
    return 1 << max(int(deepest) - 1, 0).bit_length()

  @property
  def tokens(self) -> int:
    """Real tokens that are run forward once."""
    return sum(int(np.sum(run.lengths_R)) for run in self.started)

  @property
  def padded_tokens(self) -> int:
    """Tokens that are run forward once, with padding."""
    return sum(run.tokens_RS.size for run in self.started)


def of_group(spec: spec_lib.Spec, group: group_lib.Group) -> Program:
  """Makes the program of one group: push chunks, visit branches, pop chunks.

  Args:
    spec: mode and schedule.
    group: the group; its arrays must have values, so not under jit.
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
  steps = [ProgramStep(Action.PUSH, run, None) for run in pushed]
  everything = runs.branches(spec, group)
  branches = group.tails.shape[0]
  for start in range(0, branches, spec.at_once(branches)):
    rows = np.arange(start, min(start + spec.at_once(branches), branches))
    part = jax.tree.map(lambda x, rows=rows: x[rows], everything.rows)
    steps.append(ProgramStep(Action.VISIT, everything.of_rows(part), rows))
  steps += [ProgramStep(Action.POP, run, None) for run in reversed(pushed)]
  return Program(steps, chunks.capacity, branches)


def _answered(group) -> int:
  return int(np.sum(np.asarray(group.tail_lengths) > 0))


class _Stretch(NamedTuple):
  """Positions [first, stop) of the path that ends with a segment.

  `index` has, for each position, the index in the tree's tokens of the token it
  predicts, or `NOWHERE` if that output is not wanted.
  """

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
    all_tokens: bool = False,
) -> Program:
  """Makes the program of a tree.

  Args:
    tree: the tree.
    mode: "full" visits each sequence whole, on an empty state. "stop" pushes
      every inner segment, however short, so that a segment treats all that its
      ancestors left behind as constant; inner segments with outputs are pushed
      in one piece. Other modes push inner segments in chunks.
    chunk_size: most tokens of an inner segment that are run at a time.
    at_once: most leaves that are run side by side; None for all of a parent.
    devices: how many devices share the tokens.
    least: inner segments of fewer tokens are not pushed; each of their children
      runs them again. Ignored in "stop".
    all_tokens: whether to also run tokens that no wanted output depends on:
      every sequence up to its last token but one.

  Returns:
    The program.

  Raises:
    ValueError: no token carries loss.
  """
  if not tree.trained.any():
    raise ValueError("No token of the tree carries loss: nothing to read.")
  build = functools.partial(_run, tree, devices, _sequences_through(tree))
  if mode == "full":
    leaves = _whole_sequences(tree, all_tokens)
    steps = [ProgramStep(Action.VISIT, *build([leaf], 1)) for leaf in leaves]
    return Program(steps, 0, tree.tokens.size)
  least = 1 if mode == "stop" else max(least, 1)
  inner, leaves, anchors = _stretches(tree, devices, least, all_tokens)
  below = {anchor: [] for anchor in (token_tree.NO_PARENT, *inner)}
  for segment in inner:
    below[anchors[tree.parents[segment]]].append(segment)
  steps, deepest = [], 0
  waiting = [(Action.VISIT, token_tree.NO_PARENT)]
  while waiting:
    action, segment = waiting.pop()
    if action == Action.POP:
      steps.append(ProgramStep(action, *segment))
      continue
    if segment != token_tree.NO_PARENT:
      stretch = inner[segment]
      uncut = mode == "stop" and (stretch.index >= 0).any()
      size = stretch.stop - stretch.first if uncut else chunk_size
      for part in _chunks(stretch, size, devices):
        run = build([part], 1)
        deepest = max(deepest, part.first + run[0].tokens_RS.shape[1])
        steps.append(ProgramStep(Action.PUSH, *run))
        waiting.append((Action.POP, run))
    mine = [leaf for leaf in leaves
            if anchors[tree.parents[leaf.segment]] == segment]
    for rows in _together(mine, at_once):
      run = build(rows, _rows(len(rows), at_once))
      steps.append(ProgramStep(Action.VISIT, *run))
    waiting += [(Action.PUSH, child) for child in reversed(below[segment])]
  return Program(steps, _padded(deepest, devices), tree.tokens.size)


def _padded(length: int, devices: int) -> int:
  return -(-group_lib.bucket(length) // devices) * devices


def _sequences_through(tree) -> np.ndarray:
  """For each segment, how many sequences contain it."""
  count = np.zeros(len(tree.parents), np.int32)
  count[tree.leaves] = 1
  for segment in reversed(range(1, len(count))):
    count[tree.parents[segment]] += count[segment]
  return count


def _stretches(tree, devices, least, all_tokens):
  """Settles which positions each segment runs.

  Returns:
    The stretches of inner segments that are pushed, by segment; the stretches
    of leaves; and for each segment its anchor, the last segment on its path
    that is pushed. The anchor of `NO_PARENT` comes last, where index −1 is.
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
  needed = np.array([all_tokens or (x.index >= 0).any() for x in stretches])
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
      leaves.append(stretch if all_tokens else _shortened(stretch))
  return inner, leaves, anchors


def _whole_sequences(tree, all_tokens) -> list[_Stretch]:
  """A stretch for each whole sequence; a shared output is taken from one.

  Sequences from which no output is taken are left out unless `all_tokens`.
  """
  taken = np.zeros(tree.tokens.size, bool)
  found = []
  for leaf in tree.leaves:
    end = int(tree.positions[leaf] + tree.lengths[leaf])
    index = _wanted(tree, leaf, 0, end - 1, taken)
    if (index >= 0).any() or (all_tokens and end > 1):
      found.append(_Stretch(int(leaf), 0, end - 1, index))
  return found


def _wanted(tree, segment, first, stop, taken):
  """Indices of the tokens that [first, stop) predict; `NOWHERE` if not wanted.

  Tokens in `taken` are not wanted again; those found here are added to it.
  """
  index = tree.indices(segment, first + 1, stop + 1)
  wanted = tree.trained[index] & ~taken[index]
  taken[index[wanted]] = True
  return np.where(wanted, index, token_tree.NOWHERE)


def _shortened(stretch: _Stretch) -> _Stretch:
  """Cuts a leaf's stretch after the last output that is wanted."""
  length = int(np.flatnonzero(stretch.index >= 0)[-1]) + 1
  return stretch._replace(
      stop=stretch.first + length, index=stretch.index[:length]
  )


def _chunks(stretch: _Stretch, at_most: int, devices: int):
  """Yields a stretch cut into chunks, the last of which may be shorter."""
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
  """Sorts one parent's leaves into visits of similar lengths, longest first."""
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
  """Rounds a number of rows up to 1, 2, 3, 4, 6, 8, …, to compile less."""
  power = 1 << (count - 1).bit_length()
  rows = power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power
  return rows if at_once is None else min(rows, max(at_once, count))


def _run(
    tree, devices, sequences, stretches: list[_Stretch], rows: int
) -> tuple[runs.Run, np.ndarray | None]:
  """Makes a run of stretches that start at one position, and its index."""
  lengths = [stretch.stop - stretch.first for stretch in stretches]
  width = _padded(max(lengths), devices)
  tokens, targets = np.zeros((2, rows, width), np.int32)
  through = [sequences[stretch.segment] for stretch in stretches]
  index = np.full((rows, width), token_tree.NOWHERE, np.int32)
  inner = np.zeros((rows, width), bool)
  for row, (stretch, length) in enumerate(
      zip(stretches, lengths, strict=True)
  ):
    at = tree.indices(stretch.segment, stretch.first, stretch.stop + 1)
    path = tree.tokens[at]
    tokens[row, :length], targets[row, :length] = path[:-1], path[1:]
    inner[row, :length] = tree.inner[at[:-1]]
    index[row, :length] = stretch.index
  padding = [0] * (rows - len(lengths))
  lengths = np.array(lengths + padding, np.int32)
  wanted = (index >= 0).any()
  return runs.Run(
      np.int32(stretches[0].first), tokens, lengths,
      np.array(through + padding, np.int32),
      runs.Read(targets, lengths, np.int32(0)) if wanted else None,
      inner if inner.any() else None,
  ), index if wanted else None

