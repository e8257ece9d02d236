# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A tree of sequences with a common beginning, as parallel arrays.

Tokens that several sequences share are stored once. A segment is a stretch of
tokens such that every sequence contains all of it or none; each but the root
has a parent segment, and each sequence ends with a leaf. A group is a tree of a
root and its leaves.

The arrays are numpy arrays: a tree cannot be an argument under jit, because its
values decide what is run in which order.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.data import group as group_lib

ROOT = 0
NO_PARENT = -1  # the parent of the root
NOWHERE = -1  # the index of a token that does not exist


class Turn(NamedTuple):
  """One turn of an episode: consecutive tokens of one speaker.

  Attributes:
    tokens: ids.
    trained: whether they carry loss: True for an agent, False for observations.
  """

  tokens: Sequence[int]
  trained: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """A tree of G sequences as segments, each parent before its children.

  Attributes:
    tokens: i32[N] ids of all segments, one after the other, padded.
    trained: bool[N], which tokens carry loss; never the first, which nothing
      predicts, nor padding.
    parents: i64, the index of each segment's parent; `NO_PARENT` for the root.
    lengths: i64, the number of tokens of each segment; a leaf may have none.
    leaves: i64[G], the segment that each sequence ends with.
  """

  tokens: np.ndarray
  trained: np.ndarray
  parents: np.ndarray
  lengths: np.ndarray
  leaves: np.ndarray

  @classmethod
  def from_sequences(
      cls,
      sequences: Sequence[Sequence[int]],
      *,
      config: config_lib.ModelConfig,
      trained: Sequence[Sequence[bool]] | None = None,
  ) -> "Tree":
    """Makes a tree of sequences, which share their longest common beginnings.

    Args:
      sequences: G sequences of ids, all with the same first token.
      config: config of the model; it gives vocabulary and position limit.
      trained: which tokens of each sequence carry loss; None for all but the
        first. Sequences share a token only if they agree in this too.

    Returns:
      The tree, its tokens padded to a bucket.

    Raises:
      ValueError: no sequence, an empty one, an id outside the vocabulary, more
        positions than the model has, masks of other lengths, a first token
        that is trained, or sequences that begin differently.
    """
    checks.instance(config, "config", config_lib.ModelConfig)
    sequences = group_lib.as_rows(sequences, "sequences")
    if not sequences or not all(ids.size for ids in sequences):
      raise ValueError("A tree needs sequences of at least one token each.")
    if trained is None:
      trained = [np.arange(ids.size) > 0 for ids in sequences]
    return _grow(sequences, trained, [()] * len(sequences), config)

  @classmethod
  def from_turns(
      cls,
      episodes: Sequence[Sequence[Turn]],
      *,
      config: config_lib.ModelConfig,
  ) -> "Tree":
    """Makes a tree of an agent's episodes, with a cut at the end of each turn.

    Each observation is thus a segment of its own, without loss.

    Args:
      episodes: the turns of each episode, the first of which is not trained.
      config: as in `from_sequences`.

    Returns:
      The tree.

    Raises:
      ValueError: see `from_sequences`.
    """
    checks.instance(config, "config", config_lib.ModelConfig)
    sequences, trained, ends = [], [], []
    for turns in episodes:
      for turn in turns:
        checks.instance(
            turn, "episodes", Turn, "Each episode is a list of Turns."
        )
        checks.flag(turn.trained, "Turn.trained")
      of_turns = [group_lib.as_ids(turn.tokens, "turns") for turn in turns]
      if not sum(ids.size for ids in of_turns):
        raise ValueError("An episode of no tokens.")
      sequences.append(np.concatenate(of_turns))
      trained.append(np.concatenate([
          np.full(ids.size, turn.trained)
          for ids, turn in zip(of_turns, turns, strict=True)
      ]))
      ends.append(np.cumsum([ids.size for ids in of_turns]).tolist())
    if not sequences:
      raise ValueError("A tree needs at least one episode; got none.")
    return _grow(sequences, trained, ends, config)

  @functools.cached_property
  def starts(self) -> np.ndarray:
    """i64, the index in `tokens` of each segment's first token."""
    return np.cumsum(self.lengths) - self.lengths

  @functools.cached_property
  def positions(self) -> np.ndarray:
    """i64, the position of each segment's first token in its sequences."""
    positions = np.zeros_like(self.lengths)
    for segment in range(1, len(self.parents)):
      parent = self.parents[segment]
      positions[segment] = positions[parent] + self.lengths[parent]
    return positions

  @functools.cached_property
  def children(self) -> list[list[int]]:
    """The child segments of each segment."""
    children = [[] for _ in self.parents]
    for segment in range(1, len(self.parents)):
      children[self.parents[segment]].append(segment)
    return children

  @functools.cached_property
  def inner(self) -> np.ndarray:
    """bool[N]: the tokens of segments with children, but the last of each."""
    inner = np.zeros(self.tokens.size, bool)
    for start, length, children in zip(
        self.starts, self.lengths, self.children, strict=True
    ):
      inner[start : start + length - 1] = bool(children)
    return inner

  @functools.cached_property
  def paths(self) -> np.ndarray:
    """i32[G, S], the index in `tokens` of each token of each sequence.

    It is `NOWHERE` at padding; S is the longest sequence, padded to a bucket.
    """
    ends = (self.positions + self.lengths)[self.leaves]
    paths = np.full(
        (len(self.leaves), group_lib.bucket(int(ends.max()))), NOWHERE, np.int32
    )
    for row, leaf, end in zip(paths, self.leaves, ends, strict=True):
      row[:end] = self.indices(leaf, 0, end)
    return paths

  def indices(self, segment: int, first: int, end: int) -> np.ndarray:
    """Indices in `tokens` of positions [first, end) of a path from the root.

    Args:
      segment: the segment that the path ends with.
      first: first position.
      end: position after the last, at most the segment's end.
    """
    pieces = []
    while first < end:
      at = self.positions[segment]
      if end > at:
        found = np.arange(max(first, at), end) + self.starts[segment] - at
        pieces.append(found)

        end = at
      segment = self.parents[segment]
    return np.concatenate([np.zeros(0, np.int64), *reversed(pieces)])

  def sequences(self) -> np.ndarray:
    """The ids of each sequence, i32[G, S], 0 at padding."""
    return np.where(self.paths < 0, 0, self.tokens[self.paths])

  def mask(self) -> np.ndarray:
    """bool[G, S]: which tokens of each sequence carry loss."""
    return (self.paths >= 0) & self.trained[self.paths]

  def by_leaf(self, x_N):
    """Copies values of the tree's tokens to every sequence that has the token.

    Autodiff sums the cotangents of all sequences that share a token.

    Args:
      x_N: [N, ...], a value for each token.

    Returns:
      [G, S, ...], 0 at padding.
    """
    return take(jnp.asarray(x_N), self.paths)

  def sum_over_leaves(self, x_GS):
    """Sums values of sequences over all sequences that share a token.

    This is the transpose of `by_leaf`. For a loss that is linear in log-probs
    it turns weights [G, S] of sequences' tokens into weights of tree tokens.

    Args:
      x_GS: [G, S, ...], a value for each token of each sequence.

    Returns:
      [N, ...], 0 where `tokens` is padding.
    """
    x_GS = jnp.asarray(x_GS)
    size = self.tokens.shape[0]
    at = np.where(self.paths < 0, size, self.paths)
    zeros = jnp.zeros((size, *x_GS.shape[2:]), x_GS.dtype)
    return zeros.at[at].add(x_GS, mode="drop")

  @property
  def is_group(self) -> bool:
    """Whether this is a root without loss, and leaves that are all loss."""
    prompt = self.lengths[ROOT]
    used = int(self.lengths.sum())
    return bool(
        len(self.parents) > 1
        and len(self.leaves) == len(self.parents) - 1
        and (self.parents[1:] == ROOT).all()
        and not self.trained[:prompt].any()
        and self.trained[prompt:used].all()
    )


def take(x_N, index):
  """Takes x_N[index], and 0 where the index is `NOWHERE`."""
  found = x_N[jnp.maximum(index, 0)]
  there = jnp.asarray(index >= 0).reshape(
      *index.shape, *(1,) * (found.ndim - index.ndim)
  )
  return jnp.where(there, found, jnp.zeros((), found.dtype))


def check(tree: Tree, config: config_lib.ModelConfig):
  """Raises ValueError for a tree that this model cannot be run on."""
  if not isinstance(tree, Tree):
    raise TypeError(
        f"tree must be a Tree, not a {type(tree).__name__}: a tree is data of "
        "the host and cannot be an argument of a function under jit."
    )
  order = np.arange(len(tree.parents))
  if tree.parents[ROOT] != NO_PARENT or (
      (tree.parents[1:] < 0) | (tree.parents[1:] >= order[1:])
  ).any():
    raise ValueError(
        f"parents={tree.parents.tolist()}: the first segment is the root, of "
        f"parent {NO_PARENT}, and every other comes after its parent."
    )
  if len(tree.lengths) != len(order) or (tree.lengths < 0).any() or (
      tree.lengths[ROOT] < 1
  ):
    raise ValueError(
        f"lengths={tree.lengths.tolist()} of {len(order)} segments, of which "
        "the root has at least one token."
    )
  used = int(tree.lengths.sum())
  if not used <= tree.tokens.size == tree.trained.size:
    raise ValueError(
        f"{tree.tokens.size} tokens, {tree.trained.size} of them marked, for "
        f"segments of {used}."
    )
  if tree.trained[0] or tree.trained[used:].any():
    raise ValueError(
        "trained marks the first token of the root, which nothing predicts, or "
        "padding: neither can carry loss."
    )
  childless = [s for s in order if not tree.children[s]]
  if sorted(set(tree.leaves.tolist())) != childless:
    raise ValueError(
        f"leaves={tree.leaves.tolist()} must name each segment that has no "
        f"children: {childless}."
    )
  group_lib.check_tokens(tree.tokens[:used], config, "tree")
  group_lib.check_positions(
      int((tree.positions + tree.lengths).max()), config
  )


def _shared(keys, ids, start: int) -> int:
  """The first position after `start` at which the sequences `ids` differ."""
  first, end = keys[ids[0]], keys[ids[0]].size
  for other in (keys[i] for i in ids[1:]):
    end = min(end, other.size)
    different = np.flatnonzero(first[start:end] != other[start:end])
    if different.size:
      end = start + int(different[0])
  return end


def _grow(sequences, trained, ends, config) -> Tree:
  """Makes the tree of some sequences, with further cuts at `ends`."""
  trained = [np.asarray(mask, bool) for mask in trained]
  if [mask.shape for mask in trained] != [ids.shape for ids in sequences]:
    raise ValueError(
        f"trained has masks of shapes {[mask.shape for mask in trained]} for "
        f"sequences of {[ids.shape for ids in sequences]}."
    )
  keys = [
      2 * ids + mask for ids, mask in zip(sequences, trained, strict=True)
  ]
  if len({int(key[0]) for key in keys}) > 1:
    raise ValueError(
        "The sequences begin with different tokens, so that they share "
        "nothing: make a tree of each."
    )
  parents, pieces, leaves = [], [], [NOWHERE] * len(keys)
  waiting = [(NO_PARENT, list(range(len(keys))), 0)]
  while waiting:
    parent, ids, start = waiting.pop()
    end = _shared(keys, ids, start)
    cuts = sorted({x for i in ids for x in ends[i] if start < x < end})
    for low, high in zip([start, *cuts], [*cuts, end], strict=True):
      parents.append(parent)
      pieces.append((ids[0], low, high))
      parent = len(parents) - 1
    if len(ids) == 1:
      leaves[ids[0]] = parent
      continue
    below = {}
    for i in ids:  # a sequence that ends here gets a leaf of no tokens
      key = int(keys[i][end]) if keys[i].size > end else (i,)
      below.setdefault(key, []).append(i)
    waiting += [(parent, of_key, end) for of_key in reversed(below.values())]
  used = sum(high - low for _, low, high in pieces)
  room = (0, group_lib.bucket(used) - used)
  tokens, marks = (
      np.concatenate([of[i][low:high] for i, low, high in pieces])
      for of in (sequences, trained)
  )
  tree = Tree(
      np.pad(tokens, room).astype(np.int32), np.pad(marks, room),
      np.array(parents), np.array([high - low for _, low, high in pieces]),
      np.array(leaves),
  )
  check(tree, config)
  return tree
