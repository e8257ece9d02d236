# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradient that `branch_replay` gives for one run of a problem."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import readout
from branch_replay.ops import gated_delta
from branch_replay.ops.attention import tiling
from tests import tiny
from tests.fuzzing.wanted import Gradient

SMALL = {
    tiling: dict(
        FORWARD_ROWS=16, FORWARD_COLUMNS=8, BACKWARD_ROWS=8, BACKWARD_COLUMNS=8
    ),
    gated_delta: dict(BLOCK=8, _ELIMINATED=2),
}

_last = dict(small=False)


@contextlib.contextmanager
def sizes_of(problem):
  """Small tiles and blocks, if the problem is to have them.

  What was compiled with others is forgotten.
  """
  with pytest.MonkeyPatch.context() as patch:
    if problem.small:
      for module, sizes in SMALL.items():
        for name, size in sizes.items():
          patch.setattr(module, name, size)
    if problem.small != _last["small"]:
      jax.clear_caches()
      _last["small"] = problem.small
    yield


def data_of(problem, text=None):
  """The `Group`, the stacked groups, or the `Tree`.

  Args:
    problem: the problem.
    text: one of its texts, of groups.
  """
  if problem.kind == "tree":
    return br.Tree.from_sequences(
        problem.sequences, config=problem.config, trained=problem.trained
    )
  random = np.random.default_rng(problem.seed)
  groups = []
  for number, (prompt, tails) in enumerate(
      zip(text.prompts, text.tails, strict=True)
  ):
    group = br.Group.create(
        prompt, tails, config=problem.config, block=problem.block,
        branches=len(tails) + problem.empty,
        tail_inputs=None if text.inputs is None else text.inputs[number],
    )
    groups.append(
        with_garbage(group, problem.shape, random, problem.config.vocab_size)
    )
  return br.stack(groups) if problem.kind == "stacked" else groups[0]


def with_garbage(group, shape, random, vocab: int):
  """Arrays of a shape, with ids that mean nothing where there was padding."""
  def wider(x, length, size):
    room = max(0, size - x.shape[-1])
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, room)])[..., :size]
    real = np.arange(size) < np.asarray(length)[..., None]
    noise = random.integers(0, vocab, x.shape)
    return jnp.asarray(np.where(real, x, noise), jnp.int32)

  longer, wide = shape
  tails = {
      name: wider(getattr(group, name), group.tail_lengths, wide)
      for name in ("tails", "tail_inputs") if getattr(group, name) is not None
  }
  prompt = wider(group.prompt, group.prompt_length, longer)
  return dataclasses.replace(group, prompt=prompt, **tails)


def schedule_of(run, params) -> br.Schedule:
  fields = dict(run.schedule)
  if run.devices > 1:
    fields["layout"] = sharding.sharded(params, run.devices)
  return br.Schedule(**fields)


def options_of(problem, run, params):
  options = dict(
      readout=readout.LogProbs(problem.temperature), prefix_gradient=run.mode,
      schedule=schedule_of(run, params),
  )
  if run.sampling is not None:
    options["sampling"] = run.sampling
  return options


def in_two_parts(model, params, group, schedule):
  """The state of a group's prefix, half of it appended to the other half."""
  length = int(group.prompt_length) - 1
  ids = np.asarray(group.prompt)[:length].tolist()
  half = length // 2
  state = br.capture(
      model, params, [*ids[:half], 0], schedule=schedule,
      capacity=group.prompt.shape[0] + 2,
  )
  return br.extend(model, params, state, ids[half:], schedule=schedule)


def prepare(problem, run, model, params):
  """The function of one run; texts of one shape are compiled for once.

  Args:
    problem: the problem.
    run: one of its runs.
    model: its decoder.
    params: parameters, or their shapes.

  Returns:
    A function (params, data, weights) -> (`Gradient`, `PrefixPass` or None).
  """
  options = options_of(problem, run, params)
  layout = options["schedule"].layout
  key = jax.random.key(problem.seed)
  placed = run.devices > 1 and problem.seed % 2

  def more_of(params, data):
    more = dict(key=key) if run.mode == "sampled" else {}
    if run.driver == "extended":
      more["state"] = in_two_parts(model, params, data, options["schedule"])
    elif run.driver in ("state", "state autodiff", "kept"):
      more["state"] = br.capture(
          model, params, data, schedule=options["schedule"],
          keep=run.driver == "kept",
      )
    return more

  def by_autodiff(params, data, weights):
    def loss(params):
      outputs = br.replay(
          model, params, data, **options, **more_of(params, data)
      )
      return tiny.loss(outputs, weights), outputs

    (value, outputs), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return Gradient(value, outputs, grads), None

  if "autodiff" in run.driver:
    return by_autodiff
  options |= dict(trainable=problem.trainable, balance=problem.balance)
  if run.driver in ("host", "offload"):
    function = br.value_and_grad(
        model, tiny.loss, **options,
        hosted=br.Hosted(offload=run.driver == "offload"),
    )
  else:
    function = br.value_and_grad(model, tiny.loss, **options)
  if run.driver == "jit":
    function = jax.jit(function)

  def one_pass(params, data, weights):
    if placed:
      params = layout.place(params)
    more = more_of(params, data)
    evaluation, grads = function(params, data, weights, **more)
    return (
        Gradient(evaluation.loss, evaluation.outputs, grads),
        evaluation.prefix_pass,
    )

  return one_pass
