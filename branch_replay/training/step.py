# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: gradient of a group or of stacked groups, and update.

Parameters, gradients and optimizer state are sharded alike, by the layout of
the schedule; an elementwise optimizer then needs no communication.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from branch_replay import adapters
from branch_replay import checks
from branch_replay import params as params_lib
from branch_replay import passes
from branch_replay import prefix_replay
from branch_replay.layout import Layout
from branch_replay.models import decoder
from branch_replay.schedule import Schedule


class TrainState(NamedTuple):
  """What a run carries from step to step.

  Attributes:
    params: all parameters, the frozen ones too.
    optimizer: optax state of the trained ones.
    step: i32[], updates done.
  """

  params: Any
  optimizer: Any
  step: jax.Array


class Report(NamedTuple):
  """Of one step.

  Attributes:
    evaluation: `passes.Evaluation`, before the update.
    grad_norm: f32[], of the whole gradient.
  """

  evaluation: passes.Evaluation
  grad_norm: jax.Array


def create(
    params,
    optimizer: optax.GradientTransformation,
    *,
    trainable: str = "all",
    layout: Layout = Layout(),
) -> TrainState:
  """The state before the first step, placed where the layout wants it.

  Args:
    params: all parameters. A step donates them: keep a copy of your own.
    optimizer: of the trained ones.
    trainable: "all" or "adapters".
    layout: of the schedule.
  """
  params_lib.check_tree(params)
  _check_optimizer(optimizer)
  adapters.check_name(trainable)
  if not adapters.select(params, trainable):
    raise ValueError(
        f"trainable={trainable!r}, but params has no adapters: use "
        "adapters.add."
    )
  where = shardings(params, optimizer, trainable=trainable, layout=layout)
  if where is None:
    moments = optimizer.init(adapters.select(params, trainable))
    return TrainState(params, moments, jnp.int32(0))
  params = jax.device_put(params, where.params)
  init = jax.jit(optimizer.init, out_shardings=where.optimizer)
  moments = init(adapters.select(params, trainable))
  return TrainState(params, moments, jax.device_put(jnp.int32(0), where.step))


def shardings(params, optimizer, *, trainable: str, layout: Layout):
  """A `TrainState` of shardings, or None on one device.

  Args:
    params: the parameters, or their shapes.
    optimizer: as in `create`.
    trainable: as in `create`.
    layout: as in `create`.
  """
  of_params = layout.shardings(params)
  if of_params is None:
    return None
  trained = adapters.select(params, trainable)
  mesh = jax.tree.leaves(of_params)[0].mesh
  everywhere = NamedSharding(mesh, PartitionSpec())
  of_optimizer = optax.tree.map_params(
      optimizer,
      lambda _, sharding: sharding,
      jax.eval_shape(optimizer.init, trained),
      layout.shardings(trained),
      transform_non_params=lambda _: everywhere,
  )
  return TrainState(of_params, of_optimizer, everywhere)


def update(
    optimizer: optax.GradientTransformation, train_state: TrainState, grads
):
  """Applies a gradient.

  Args:
    optimizer: of the trained parameters.
    train_state: before.
    grads: of the trained parameters.

  Returns:
    The state after, and the norm of the gradient.
  """
  params = train_state.params
  trained = adapters.pick(params, grads)
  updates, moments = optimizer.update(grads, train_state.optimizer, trained)
  trained = optax.apply_updates(trained, updates)
  params = adapters.replace(params, trained)
  norm = optax.tree.norm(grads)
  return TrainState(params, moments, train_state.step + 1), norm


def _check_optimizer(optimizer):
  checks.instance(
      optimizer, "optimizer", optax.GradientTransformation,
      "Call it, as in optax.adamw(1e-5).",
  )


def make_step(
    model: decoder.Decoder,
    loss,
    optimizer: optax.GradientTransformation,
    *,
    trainable: str = "all",
    schedule: Schedule = Schedule(),
    **options,
):
  """A compiled step that captures, replays and updates.

  Args:
    model: the decoder.
    loss: as in `prefix_replay.value_and_grad`, a sum over branches.
    optimizer: of the trained parameters.
    trainable: "all" or "adapters".
    schedule: sizes, policies and layout.
    **options: readout, prefix_gradient and sampling, as there.

  Returns:
    A jitted function (train_state, group, args, key=None) -> (train_state,
    `Report`), with args a tuple of arrays with leading axis G. It donates the
    train_state: what was passed in is gone.
  """
  _check_optimizer(optimizer)
  gradient = prefix_replay.value_and_grad(
      model, loss, schedule=schedule, trainable=trainable, **options
  )

  def step(train_state, group, args=(), key=None):
    evaluation, grads = gradient(train_state.params, group, *args, key=key)
    train_state, norm = update(optimizer, train_state, grads)
    where = shardings(
        train_state.params, optimizer, trainable=trainable,
        layout=schedule.layout,
    )
    if where is not None:
      train_state = jax.lax.with_sharding_constraint(train_state, where)
    return train_state, Report(evaluation, norm)

  return jax.jit(step, donate_argnums=0)
