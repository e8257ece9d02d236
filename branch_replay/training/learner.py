# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""From a batch of experience to one update, a group's gradient at a time.

The states that sampling left behind are replayed as long as their parameters
are those of now; after an update they are captured anew, or knowingly replayed
stale, which is an approximation to be studied.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from branch_replay import adapters
from branch_replay import balance
from branch_replay import gradients
from branch_replay import schedule as schedule_lib
from branch_replay.estimators import Sampling
from branch_replay.models import decoder
from branch_replay.rl import objectives
from branch_replay.schedule import Schedule
from branch_replay.training import algorithms
from branch_replay.training import experience as experience_lib
from branch_replay.training import step as step_lib


class Update(NamedTuple):
  """What one update did.

  Attributes:
    train_state: after it.
    loss: of the batch before it.
    grad_norm: of its gradient, before any clipping.
    report: of the algorithm, before the update; and `rounded_away` of
      `step.Applied` where parameters are narrower than float32.
    skipped: see `step.Applied`.
  """

  train_state: step_lib.TrainState
  loss: jax.Array
  grad_norm: jax.Array
  report: dict
  skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class Learner:
  """An algorithm with everything that turns its loss into an update.

  Attributes:
    model: the decoder.
    algorithm: see `algorithms`.
    optimizer: of the trained parameters.
    prefix_gradient: as in `gradients.replay`.
    sampling: of "sampled".
    schedule: sizes, policies and layout.
    trainable: "all" or "adapters".
    balance: of a mixture of experts, as in `gradients.value_and_grad`; of
      a batch the mean of its groups' terms.
    param_dtype: of trained parameters, as in `step.create`.
  """

  model: decoder.Decoder
  algorithm: algorithms.Algorithm
  optimizer: optax.GradientTransformation
  prefix_gradient: str = "exact"
  sampling: Sampling = Sampling()
  schedule: Schedule = Schedule()
  trainable: adapters.Trainable = "all"
  balance: float = 0.0
  param_dtype: str | None = None

  def __post_init__(self):
    step_lib.check_param_dtype(self.param_dtype)
    schedule_lib.check_mode(self.prefix_gradient)
    adapters.check_trainable(self.trainable, self.model.config)
    balance.check(self.balance, self.model.config)
    proximal = isinstance(self.algorithm, algorithms.ProximalPolicy)
    if self.trainable == "adapters" and proximal:
      raise ValueError(
          "PPO's value head is no adapter and would stay 0: train all "
          "parameters, or take an algorithm without a value head."
      )

  @functools.cached_property
  def _gradient(self):
    return gradients.value_and_grad(
        self.model, self.algorithm.loss, readout=self.algorithm.readout,
        prefix_gradient=self.prefix_gradient, sampling=self.sampling,
        schedule=self.schedule, trainable=self.trainable, balance=self.balance,
    )

  @functools.cached_property
  def _linear(self):
    """The second of two passes, for losses that need a whole group at once."""
    return gradients.value_and_grad(
        self.model, objectives.linear, readout=self.algorithm.readout,
        prefix_gradient=self.prefix_gradient, schedule=self.schedule,
        trainable=self.trainable, balance=self.balance,
    )

  @functools.cached_property
  def _pull(self):
    return jax.jit(jax.value_and_grad(self.algorithm.loss))

  def gradient(
      self, params, one, args, *, version, key, stale=False, share=1.0
  ):
    """Loss, outputs and gradient of one group.

    Where branches are run one by one ("full") and the loss needs pairs of them,
    log-probs come first, and then the gradient of their linear combination.

    Args:
      params: parameters.
      one: an experience; a state that it holds is replayed.
      args: of the loss, with leading axis G.
      version: of these parameters.
      key: a PRNG key, for "sampled".
      stale: accept a state that was captured under other parameters.
      share: of this group in the load-balance term, 1 / N of N groups.
    """
    of_balance = {"balance_share": share} if self.balance else {}
    if self.prefix_gradient == "full":
      if isinstance(self.algorithm, algorithms.Preference):
        outputs = gradients.replay(
            self.model, params, one.group, readout=self.algorithm.readout,
            prefix_gradient="full", schedule=self.schedule,
        )
        loss, coefficients = self._pull(outputs, *args)
        _, grads = self._linear(
            params, one.group, coefficients, **of_balance
        )
        return loss, outputs, grads
      one = dataclasses.replace(one, state=None)
    evaluation, grads = self._gradient(
        params, one.group, *args, state=one.state, key=key, allow_stale=stale,
        version=None if one.state is None else version, **of_balance,
    )
    return evaluation.loss, evaluation.outputs, grads

  def create(self, params) -> step_lib.TrainState:
    """The state before the first update; see `step.create`."""
    return step_lib.create(
        params, self.optimizer, trainable=self.trainable,
        layout=self.schedule.layout, param_dtype=self.param_dtype,
    )

  @functools.cached_property
  def _apply(self):
    def apply(train_state, grads, loss):
      train_state, applied = step_lib.update(
          self.optimizer, train_state, grads, loss
      )
      where = step_lib.shardings(
          train_state.params, self.optimizer, trainable=self.trainable,
          layout=self.schedule.layout,
      )
      if where is not None:
        train_state = jax.lax.with_sharding_constraint(train_state, where)
      return train_state, applied

    return jax.jit(apply, donate_argnums=0)

  @functools.cached_property
  def _warned(self) -> list:
    return []

  @functools.cached_property
  def _report(self):
    return jax.jit(self.algorithm.report)

  def know(
      self, params, batch: Sequence[experience_lib.Experience], *, version: int,
      reference=None,
  ) -> list[algorithms.Known]:
    """What the algorithm needs of every experience before the first update.

    Args:
      params: those that sampled.
      batch: experiences.
      version: of `params`.
      reference: parameters of the reference policy, if there is one.

    Returns:
      One `Known` an experience.
    """
    def outputs(params, one, state):
      return gradients.replay(
          self.model, params, one.group, readout=self.algorithm.readout,
          prefix_gradient="stop", schedule=self.schedule, state=state,
          version=None if state is None else version,
      )

    known = []
    for one in batch:
      of_reference = mine = None
      if self.algorithm.needs_reference:
        of_reference = outputs(reference, one, None)
        if self.algorithm.needs_outputs:
          of_reference = of_reference.log_probs
      if self.algorithm.needs_outputs:
        mine = outputs(params, one, one.state)
      known.append(algorithms.Known(of_reference, mine))
    return known

  def batch_gradient(self, params, batch, args, *, version, key, stale=False):
    """Sums of losses and gradients of a batch, and outputs [N, G, ...].

    Args:
      params: parameters.
      batch: experiences, as the algorithm prepared them.
      args: of the loss, with leading axes [N, G].
      version: of these parameters.
      key: a PRNG key, for "sampled".
      stale: accept states that were captured under other parameters.
    """
    grads, outputs, loss = None, [], 0.0
    # A group of empty tails has no load to balance, as in stacked groups.
    groups = sum(bool(np.any(one.group.tail_lengths)) for one in batch)
    share = 1 / max(groups, 1)
    for place, one in enumerate(batch):
      value, read, more = self.gradient(
          params, one, jax.tree.map(lambda x, place=place: x[place], args),
          version=version, key=jax.random.fold_in(key, place), stale=stale,
          share=share,
      )
      grads = more if grads is None else _add(grads, more)
      outputs.append(read)
      loss += value
    return loss, jax.tree.map(lambda *x: jnp.stack(x), *outputs), grads

  def update(
      self,
      train_state: step_lib.TrainState,
      batch: Sequence[experience_lib.Experience],
      known: Sequence[algorithms.Known],
      *,
      version: int,
      key,
      stale: bool = False,
  ) -> Update:
    """One update from the gradients of all groups of a batch.

    Args:
      train_state: before; it is donated.
      batch: experiences of one shape; a state that one holds is replayed.
      known: of `know`, of the same experiences.
      version: of these parameters.
      key: a PRNG key of this update, for "sampled".
      stale: accept states that were captured under other parameters.

    Returns:
      The update.
    """
    batch, args = self.algorithm.prepare(batch, joined(known))
    loss, outputs, grads = self.batch_gradient(
        train_state.params, batch, args, version=version, key=key, stale=stale
    )
    report = self._report(outputs, algorithms.log_probs(batch), args)
    narrow = step_lib.narrow(
        adapters.select(train_state.params, self.trainable)
    )
    train_state, applied = self._apply(train_state, grads, loss)
    if narrow:
      report |= {"rounded_away": applied.rounded_away}
      self._warn(narrow, applied)
    return Update(train_state, loss, applied.grad_norm, report, applied.skipped)

  def _warn(self, narrow: list[str], applied: step_lib.Applied):
    """Says what the first update lost to dtypes below float32."""
    if self._warned or applied.skipped or not applied.grad_norm:
      return
    self._warned.append(True)
    warnings.warn(
        f"{float(applied.rounded_away):.1%} of the first update were rounded "
        f"away: parameters are trained in {', '.join(narrow)}. Train them in "
        "float32, param_dtype=None.",
        stacklevel=3,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _add(grads, more):
  return jax.tree.map(jnp.add, grads, more)


def joined(known: Sequence[algorithms.Known]) -> algorithms.Known:
  """One `Known` of lists instead of a list of them."""
  def column(values: list[Any]):
    return None if values[0] is None else values

  return algorithms.Known(*(column(list(x)) for x in zip(*known, strict=True)))
