# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient that a problem should have, by the dense reference.

A problem becomes rows of whole sequences. What a row reads, what it sees, and
through which weights, is all that the modes differ in.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzzing import reference


class Rows(NamedTuple):
  """Sequences, and what is read from them.

  Attributes:
    rows: `reference.Row`, every array with a leading axis.
    read: bool[R, S].
    places: int[R, S], the output that a place is, in the order of the
      flattened outputs of `branch_replay`; −1 where nothing is read.
  """

  rows: reference.Row
  read: np.ndarray
  places: np.ndarray


class Gradient(NamedTuple):
  """What is compared: the loss, what was read, and the gradient."""

  loss: Any
  outputs: Any
  grads: Any


def of_groups(problem, text, shape, weights_of) -> Rows:
  """Rows of groups.

  Args:
    problem: the problem.
    text: one of its texts.
    shape: [groups, G, T] of the outputs.
    weights_of: (group, length of its prefix) -> segments and weights of the
      prefix.
  """
  found = []
  for number, (prompt, tails) in enumerate(
      zip(text.prompts, text.tails, strict=True)
  ):
    prefix = len(prompt) - 1
    segments, weights = weights_of(number, prefix)
    for branch, tail in enumerate(tails):
      length = len(tail)
      inputs = [prompt[-1], *tail[:-1]][:length]
      if text.inputs is not None:
        inputs = text.inputs[number][branch]
      at = np.arange(prefix + length)
      seen = at[:, None] >= at[None]
      if problem.block:
        of = (at - prefix) // problem.block
        seen |= (at[None] >= prefix) & (of[None] <= of[:, None])
      first = (number * shape[1] + branch) * shape[2]
      found.append((
          [*prompt[:-1], *inputs], [0] * prefix + list(tail), seen,
          [*segments, *[1 << 20] * length], [*weights, *[1.0] * length],
          [-1] * prefix + [first + step for step in range(length)],
      ))
  return padded(found, sum(problem.shape))


def padded(found, size: int = 8) -> Rows:
  """Lists of (tokens, targets, seen, segments, weights, places) as arrays."""
  longest = max(size, *(len(row[0]) for row in found))
  size = -(-longest // 8) * 8

  def pad(values, value, dtype):
    out = np.full((len(found), size), value, dtype)
    for row, mine in zip(out, values, strict=True):
      row[: len(mine)] = mine
    return out

  tokens, targets, seen, segments, weights, places = zip(*found, strict=True)
  square = np.tile(np.eye(size, dtype=bool), (len(found), 1, 1))
  for row, mine in zip(square, seen, strict=True):
    row[: len(mine), : len(mine)] = mine
  real = pad([[True] * len(row) for row in tokens], False, bool)
  places = pad(places, -1, np.int64)
  return Rows(
      reference.Row(
          pad(tokens, 0, np.int32), pad(targets, 0, np.int32), square,
          pad(segments, 1 << 20, np.int32), pad(weights, 1.0, np.float64),
          real,
      ),
      places >= 0, places,
  )


def of_tree(tree) -> Rows:
  """Whole sequences; a token that several share is read in the first."""
  found, taken = [], set()
  for leaf in tree.leaves:
    end = int(tree.positions[leaf] + tree.lengths[leaf])
    path = tree.indices(leaf, 0, end)
    places = [
        int(n) if tree.trained[n] and n not in taken else -1 for n in path[1:]
    ]
    taken |= set(places)
    found.append(row_of_path(tree, path, places, 0))
  return padded(found)


def row_of_path(tree, path, places, constant: int):
  """A path whose first positions are held constant."""
  ids, size = tree.tokens[path].tolist(), len(path) - 1
  at = np.arange(size)
  return (
      ids[:-1], ids[1:], at[:, None] >= at[None],
      (at >= constant).astype(int).tolist(),
      np.where(at < constant, 0.0, 1.0).tolist(), places,
  )


def of_stopped_tree(tree, devices: int) -> Rows:
  """Every segment on its own, on top of ancestors that are constants.

  A segment runs from where its parent stopped to the last token but one of its
  own; an inner one stops at a multiple of the devices.
  """
  ends = tree.positions + tree.lengths
  first, stop = np.zeros(len(ends), int), ends - 1
  found, taken = [], set()
  for segment in range(len(ends)):
    if segment:
      first[segment] = stop[tree.parents[segment]]
    if tree.children[segment]:
      stop[segment] -= stop[segment] % devices
      stop[segment] = max(stop[segment], first[segment])
    path = tree.indices(segment, 0, int(stop[segment]) + 1)
    places = [
        int(n) if at >= first[segment] and tree.trained[n] and n not in taken
        else -1 for at, n in enumerate(path[1:])
    ]
    taken |= set(places)
    if max(places, default=-1) >= 0:
      found.append(row_of_path(tree, path, places, int(first[segment])))
  return padded(found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _gradient(config, temperature, balance, params, rows, weights_RS):
  def loss(params):
    results = jax.vmap(
        lambda row: reference.run(config, params, row, temperature)
    )(rows)
    value = jnp.sum(jnp.sin(results.log_probs) * weights_RS)
    term = 0.0
    if balance:
      term = balance * reference.balance_term(config.experts, results, rows)
    return value + term, (value, results.log_probs)

  (_, (value, log_probs)), grads = jax.value_and_grad(loss, has_aux=True)(
      params
  )
  return value, log_probs, grads


def gradient(problem, rows: Rows, params, weights) -> Gradient:
  """The gradient, and what was read, by place.

  Args:
    problem: the problem.
    rows: its rows.
    params: parameters.
    weights: flat, the weight of every output in the loss.
  """
  weights_RS = np.where(rows.read, weights[np.maximum(rows.places, 0)], 0)
  value, log_probs, grads = _gradient(
      problem.config, problem.temperature, problem.balance, params, rows.rows,
      weights_RS,
  )
  outputs = np.zeros(weights.shape)
  outputs[rows.places[rows.read]] = np.asarray(log_probs)[rows.read]
  return Gradient(float(value), outputs, grads)
