# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the runs of a problem with what they should give."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.models import adapters
from branch_replay.planning import compare
from tests.fuzzing import found
from tests.fuzzing import parameters
from tests.fuzzing import problems
from tests.fuzzing import wanted

# Of float32 models as a whole: the reference is in float64, and what no family
# has may be conditioned badly.
TOLERANCE = {"float64": 1e-11, "float32": 1e-4}


class Error(NamedTuple):
  """How far a run is from what it should give; relative.

  Attributes:
    what: the largest of them: a parameter's name, "loss" or "outputs".
    error: of it.
    allowed: the tolerance.
    text: which of the problem's texts.
  """

  what: str
  error: float
  allowed: float
  text: int = 0


def weights_of(problem, shape):
  """Of the loss, of both signs, [*shape]."""
  random = np.random.default_rng([problem.seed, 1])
  return random.normal(size=shape)


def shape_of(problem, data):
  """Of the outputs, and the same as [groups, G, T]."""
  if problem.kind == "tree":
    return data.tokens.shape, None
  shape = data.tails.shape
  return shape, shape if len(shape) == 3 else (1, *shape)


def rows_of(problem, text, run, data, prefix_pass) -> wanted.Rows:
  """What the reference runs for one run."""
  if problem.kind == "tree":
    if run.mode == "stop" and not data.is_group:
      return wanted.of_stopped_tree(data, run.devices)
    if run.mode == "stop":
      return wanted.of_stopped_tree(data, 1)
    return wanted.of_tree(data)
  _, shape = shape_of(problem, data)

  def weights_of(number, prefix):
    at = np.arange(prefix)
    if run.mode == "stop":
      return np.zeros(prefix, int), np.zeros(prefix)
    if run.mode != "sampled" or prefix_pass is None:
      return np.zeros(prefix, int), np.ones(prefix)
    q, drawn = (
        np.asarray(x).reshape(shape[0], -1)[number] for x in prefix_pass[:2]
    )
    positions = data.prompt.shape[-1] - 1
    at_most = run.schedule["chunk_size"] // run.devices * run.devices
    count = -(-positions // at_most)
    size = -(-positions // count)
    size = -(-size // run.devices) * run.devices
    if q.shape != (count,):
      raise AssertionError(f"{q.shape} draws of {count} chunks")
    weights = np.where(drawn, 1 / np.where(drawn, q, 1), 0)
    return at // size, weights[at // size]

  return wanted.of_groups(problem, text, shape, weights_of)


def run(problem, index: int) -> Error:
  """The largest error of one of a problem's runs."""
  one, errors = problem.runs[index], []
  model = br.Decoder(problem.config)
  with jax.enable_x64(problem.config.param_dtype == "float64"):
    params = parameters.fill(model, problem.seed)
    function = found.prepare(problem, one, model, params)
  for number, text in enumerate(problem.texts or (None,)):
    error = run_text(problem, one, text, function, params)
    errors.append(error._replace(text=number))
  return max(errors, key=lambda error: error.error)


def run_text(problem, one: problems.Run, text, function, mine) -> Error:
  """The error of a run on one text, or on the tree."""
  wide = problem.config.param_dtype == "float64"
  part = adapters.select(mine, problem.trainable)
  with jax.enable_x64(wide):
    data = found.data_of(problem, text)
    shape, _ = shape_of(problem, data)
    weights = weights_of(problem, shape)
  # The reference is in float64 whatever the model is.
  with jax.enable_x64(True):
    theirs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), mine)
  worst = Error("", 0.0, tolerance(problem, one))
  for _ in range(problem.updates):
    with jax.enable_x64(wide):
      result, prefix_pass = function(
          mine, data, jnp.asarray(weights, problem.config.param_dtype)
      )
      result = jax.tree.map(np.asarray, result)
    with jax.enable_x64(True):
      rows = rows_of(problem, text, one, data, prefix_pass)
      right = wanted.gradient(problem, rows, theirs, weights.reshape(-1))
      right = jax.tree.map(np.asarray, right)
    right = right._replace(grads=adapters.pick(right.grads, part))
    worst = max(worst, difference(result, right, worst.allowed, not wide),
                key=lambda error: error.error)
    with jax.enable_x64(wide):
      mine = updated(mine, result.grads, problem)
    with jax.enable_x64(True):
      theirs = updated(theirs, right.grads, problem)
  return worst


def updated(params, grads, problem):
  """A step against the gradient, of a twentieth in all."""
  if problem.updates == 1:
    return params
  norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
  trained = adapters.pick(params, grads)
  moved = jax.tree.map(
      lambda p, g: p - jnp.asarray(0.05 / norm * g, p.dtype), trained, grads
  )
  return adapters.replace(params, moved)


def difference(result, right, allowed, whole: bool) -> Error:
  """The largest relative error; of gradients the worst parameter, or all."""
  errors = {"loss": abs(float(result.loss) - right.loss) / max(
      1.0, np.abs(np.asarray(right.outputs)).sum()
  )}
  outputs = np.asarray(result.outputs).reshape(-1)
  errors["outputs"] = np.abs(outputs - right.outputs).max() / max(
      1.0, np.abs(right.outputs).max()
  )
  size = max(np.abs(x).max() for x in jax.tree.leaves(right.grads))
  if size == 0:
    errors["gradient"] = max(
        np.abs(x).max() for x in jax.tree.leaves(result.grads)
    )
  else:
    compared = compare.compare(result.grads, right.grads)
    if whole:
      errors["gradient"] = compared.relative_error
    else:
      errors[compared.worst_parameter] = compared.worst_error
  # What is not a number is the worst of all.
  errors = {
      name: float(np.nan_to_num(error, nan=np.inf))
      for name, error in errors.items()
  }
  what = max(errors, key=errors.get)
  return Error(what, errors[what], allowed)


def tolerance(problem, one: problems.Run) -> float:
  if one.schedule.get("accumulator_dtype") == "float32":
    return 1e-4
  return TOLERANCE[problem.config.param_dtype]
