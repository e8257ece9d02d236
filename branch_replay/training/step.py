# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One optimizer step: gradient of a group or of stacked groups, and update.

Parameters, gradients and optimizer state are sharded alike, as the schedule's
layout says, so an elementwise optimizer needs no communication.

Trained parameters are stored in at least float32, whatever dtype their file
has: in bfloat16 the numbers around 1 are 2⁻⁷ apart, and an update of 1e-6 would
change next to nothing. The model still computes in its `compute_dtype`. An
update whose loss or gradient is not finite is skipped.
"""

import functools
from typing import Any
from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.devices.layout import Layout
from branch_replay.engine import gradients
from branch_replay.engine import spec
from branch_replay.engine.schedule import Schedule
from branch_replay.models import adapters
from branch_replay.models import decoder


class TrainState(NamedTuple):
  """What a run carries from step to step.

  Attributes:
    params: all parameters, frozen ones included.
    optimizer: optax state of the trained parameters.
    step: i32[], updates done, without those that were skipped.
    skipped: i32[], updates skipped in a row up to now.
  """

  params: Any
  optimizer: Any
  step: jax.Array
  skipped: jax.Array


class Applied(NamedTuple):
  """What became of one gradient.

  Attributes:
    grad_norm: norm of the whole gradient before clipping.
    skipped: bool[], whether the update was skipped because loss or gradient is
      not finite; parameters and optimizer state are then unchanged.
    rounded_away: f32[], among the nonzero updates of parameters narrower than
      float32 the share that rounding undid; 0 if no parameter is narrower.
  """

  grad_norm: jax.Array
  skipped: jax.Array
  rounded_away: jax.Array


class Report(NamedTuple):
  """What a compiled step reports.

  Attributes:
    evaluation: `spec.Evaluation` before the update: loss and outputs.
    grad_norm: see `Applied`.
    skipped: see `Applied`.
    rounded_away: see `Applied`.
  """

  evaluation: spec.Evaluation
  grad_norm: jax.Array
  skipped: jax.Array
  rounded_away: jax.Array


def as_trained(params, *, trainable: str = "all", param_dtype=None):
  """Casts the trained ones among the parameters to the training dtype.

  Args:
    params: all parameters.
    trainable: "all" or "adapters".
    param_dtype: None for at least float32; "file" for no cast; or the name of a
      dtype. Below float32 most updates of a small learning rate are rounded
      away, see `Applied.rounded_away`.

  Raises:
    ValueError: param_dtype is not a floating-point dtype.
  """
  check_param_dtype(param_dtype)

  def cast(x):
    if param_dtype == "file" or not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    wanted = param_dtype or config_lib.at_least_float32(x.dtype)
    return x.astype(wanted)

  trained = jax.tree.map(cast, adapters.select(params, trainable))
  return adapters.replace(params, trained)


def check_param_dtype(param_dtype: str | None):
  """Raises ValueError for a param_dtype that `as_trained` does not know."""
  if param_dtype is None or param_dtype == "file":
    return
  try:
    floating = jnp.issubdtype(jnp.dtype(param_dtype), jnp.floating)
  except TypeError:
    floating = False
  if not floating:
    raise ValueError(
        f"param_dtype={param_dtype!r}: use 'float32', another floating-point "
        "dtype, 'file' for the one that the parameters have, or None for at "
        "least float32."
    )


def narrow(trained) -> list[str]:
  """Names of the dtypes below float32 among the trained parameters."""
  dtypes = {x.dtype for x in jax.tree.leaves(trained)}
  return sorted(str(x) for x in dtypes if _is_narrow(x))


def _is_narrow(dtype) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) and (
      jnp.finfo(dtype).nmant < jnp.finfo(jnp.float32).nmant
  )


def create(
    params,
    optimizer: optax.GradientTransformation,
    *,
    trainable: str = "all",
    layout: Layout = Layout(),
    param_dtype: str | None = None,
) -> TrainState:
  """Makes the train state before the first step, placed as the layout says.

  Trained parameters and the optimizer's state are cast to at least float32,
  unless param_dtype or the optimizer says otherwise. No update changes a dtype
  after that.

  Args:
    params: all parameters. A step donates them: keep a copy if you need one.
    optimizer: optax optimizer of the trained parameters.
    trainable: "all" or "adapters".
    layout: the schedule's layout.
    param_dtype: see `as_trained`; dtypes below float32 cause a warning.

  Raises:
    ValueError: an unknown param_dtype, or no adapters to train.
  """
  checks.params_tree(params)
  _check_optimizer(optimizer)
  adapters.check_name(trainable)
  if not adapters.select(params, trainable):
    raise ValueError(
        f"trainable={trainable!r}, but params has no adapters: use "
        "adapters.add."
    )
  where = shardings(params, optimizer, trainable=trainable, layout=layout)
  if where is not None:
    params = jax.device_put(params, where.params)
  params = as_trained(params, trainable=trainable, param_dtype=param_dtype)
  trained = adapters.select(params, trainable)
  if narrow(trained):
    warnings.warn(
        f"Parameters are trained in {', '.join(narrow(trained))}: updates "
        "smaller than half a step of it are rounded away, and `rounded_away` "
        "of each report says what share. Leave param_dtype out to train in "
        "float32.",
        stacklevel=2,
    )
  zero = jnp.int32(0)
  if where is None:
    return TrainState(params, initial(optimizer, trained), zero, jnp.copy(zero))
  init = jax.jit(
      functools.partial(initial, optimizer), out_shardings=where.optimizer
  )
  zero = jax.device_put(zero, where.step)
  return TrainState(params, init(trained), zero, jnp.copy(zero))


def initial(optimizer: optax.GradientTransformation, trained):
  """Makes the optimizer's state, in the dtypes that it has after an update.

  Args:
    optimizer: optax optimizer of the trained parameters.
    trained: the trained parameters.
  """
  wide = _widened(trained)
  moments = optimizer.init(wide)
  _, after = jax.eval_shape(optimizer.update, wide, moments, wide)
  return jax.tree.map(_cast_like, moments, after)


def _widened(tree):
  """Floating-point leaves in at least float32."""
  return jax.tree.map(
      lambda x: x.astype(config_lib.at_least_float32(x.dtype))
      if jnp.issubdtype(x.dtype, jnp.floating) else x,
      tree,
  )


def _cast_like(x, like):
  # A PRNG key cannot be cast; casting an array to its own dtype makes it
  # strongly typed, so that the next update does not compile again.
  if jnp.issubdtype(like.dtype, jax.dtypes.extended):
    return x
  return jnp.asarray(x).astype(like.dtype)


def shardings(params, optimizer, *, trainable: str, layout: Layout):
  """Finds the sharding of each array of a train state.

  Args:
    params: all parameters, or their shapes.
    optimizer: as in `create`.
    trainable: as in `create`.
    layout: as in `create`.

  Returns:
    A `TrainState` of shardings; None on one device.
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
  return TrainState(of_params, of_optimizer, everywhere, everywhere)


def update(
    optimizer: optax.GradientTransformation, train_state: TrainState, grads,
    loss,
) -> tuple[TrainState, Applied]:
  """Applies a gradient, unless it or its loss is not finite.

  A skipped update leaves parameters and optimizer state bit for bit as they
  were, the optimizer's own count included, so learning rates continue where
  they were. It adds 1 to `TrainState.skipped`, which the next good update sets
  to 0, and nothing to `TrainState.step`, so a version still names the same
  parameters.

  Args:
    optimizer: optax optimizer of the trained parameters.
    train_state: the train state before the update.
    grads: gradient with respect to the trained parameters.
    loss: the loss that was differentiated, a scalar.

  Returns:
    The train state after the update, and what became of the gradient.
  """
  params = train_state.params
  trained, moments, applied = apply(
      optimizer, adapters.pick(params, grads), train_state.optimizer, grads,
      loss,
  )
  good = ~applied.skipped
  return TrainState(
      adapters.replace(params, trained), moments,
      train_state.step + good.astype(jnp.int32),
      jnp.where(good, 0, train_state.skipped + 1),
  ), applied


def apply(
    optimizer: optax.GradientTransformation, trained, moments, grads, loss
) -> tuple[Any, Any, Applied]:
  """`update` for parameters and optimizer state that are not in a train state.

  Args:
    optimizer: optax optimizer of these parameters.
    trained: parameters, all of them trained.
    moments: optimizer state, made by `initial`.
    grads: gradient, a tree like `trained`.
    loss: the loss that was differentiated, a scalar.

  Returns:
    Parameters and optimizer state in the dtypes they had, and what became of
    the gradient.
  """
  grads = _widened(grads)
  norm = optax.tree.norm(grads)
  good = jnp.isfinite(norm) & jnp.isfinite(loss)

  def make(grads, trained, moments):
    updates, after = optimizer.update(grads, moments, _widened(trained))
    moved = optax.apply_updates(trained, updates)
    lost = _rounded_away(trained, moved, updates)
    return moved, jax.tree.map(_cast_like, after, moments), lost

  def skip(_, trained, moments):
    return trained, moments, jnp.float32(0)

  # Selecting between old and new would keep a second copy of both.
  trained, moments, lost = jax.lax.cond(
      good, make, skip, grads, trained, moments
  )
  return trained, moments, Applied(norm, ~good, lost)


def _rounded_away(before, after, updates) -> jax.Array:
  """See `Applied`."""
  def count(found):
    # By rows first: adding ones to a float32 stops at 2²⁴.
    rows = jnp.sum(jnp.atleast_1d(found), axis=-1, dtype=jnp.float32)
    return jnp.sum(rows)

  lost = there = jnp.float32(0)
  for old, new, wanted in zip(
      *map(jax.tree.leaves, (before, after, updates)), strict=True
  ):
    if _is_narrow(old.dtype):
      there += count(wanted != 0)
      lost += count((wanted != 0) & (old == new))
  return lost / jnp.maximum(there, 1)


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
  """A compiled step: captures the prefix, replays it, and updates parameters.

  Args:
    model: the decoder.
    loss: a sum over branches, as in `gradients.value_and_grad`.
    optimizer: optax optimizer of the trained parameters.
    trainable: "all" or "adapters".
    schedule: sizes, policies and layout of the computation.
    **options: readout, prefix_gradient and sampling, as in
      `gradients.value_and_grad`.

  Returns:
    A jitted function (train_state, group, args, key=None) -> (train_state,
    `Report`), where args is a tuple of arrays with leading axis G. It donates
    the train state: the one passed in cannot be used again.
  """
  _check_optimizer(optimizer)
  gradient = gradients.value_and_grad(
      model, loss, schedule=schedule, trainable=trainable, **options
  )

  def step(train_state, group, args=(), key=None):
    evaluation, grads = gradient(train_state.params, group, *args, key=key)
    train_state, applied = update(
        optimizer, train_state, grads, evaluation.loss
    )
    where = shardings(
        train_state.params, optimizer, trainable=trainable,
        layout=schedule.layout,
    )
    if where is not None:
      train_state = jax.lax.with_sharding_constraint(train_state, where)
    return train_state, Report(evaluation, *applied)

  return jax.jit(step, donate_argnums=0)
