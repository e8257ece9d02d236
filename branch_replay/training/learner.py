# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates: from a batch of experience to new parameters, one group at a time.

States captured for sampling are replayed as long as the parameters are those
they were captured under. After an update they are captured again, or replayed
although they are stale, which is an approximation and has to be asked for.
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

from branch_replay import checks
from branch_replay.engine import balance
from branch_replay.engine import gradients
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine.band import Band
from branch_replay.engine.estimators import Sampling
from branch_replay.engine.schedule import Schedule
from branch_replay.models import adapters
from branch_replay.models import decoder
from branch_replay.rl import objectives
from branch_replay.training import algorithms
from branch_replay.training import experience as experience_lib
from branch_replay.training import step as step_lib


class Update(NamedTuple):
  """What one update returns.

  Attributes:
    train_state: the train state after the update.
    loss: loss of the batch before the update.
    grad_norm: norm of the gradient before clipping.
    report: the algorithm's scalars before the update; also `rounded_away` of
      `step.Applied` if parameters are narrower than float32.
    skipped: bool[], see `step.Applied`.
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
    algorithm: one of `algorithms`.
    optimizer: optax optimizer of the trained parameters.
    prefix_gradient: how the prefix is differentiated, as in
      `gradients.replay`.
    sampling: which chunks prefix_gradient="sampled" runs.
    schedule: sizes, policies and layout of the computation.
    trainable: "all" or "adapters".
    balance: coefficient of the load-balance term of mixtures of experts, as in
      `gradients.value_and_grad`; a batch has the mean of its groups' terms.
    param_dtype: dtype of the trained parameters, as in `step.create`.
    band: how far prefix_gradient="banded" reaches inside the prefix.
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
  band: Band = Band()

  def __post_init__(self):
    step_lib.check_param_dtype(self.param_dtype)
    schedule_lib.check_mode(self.prefix_gradient)
    checks.instance(self.band, "band", Band)
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
        band=self.band, schedule=self.schedule, trainable=self.trainable,
        balance=self.balance,
    )

  @functools.cached_property
  def _linear(self):
    """Second of two passes, for losses that need a whole group at once."""
    return gradients.value_and_grad(
        self.model, objectives.linear, readout=self.algorithm.readout,
        prefix_gradient=self.prefix_gradient, band=self.band,
        schedule=self.schedule, trainable=self.trainable, balance=self.balance,
    )

  @functools.cached_property
  def _pull(self):
    return jax.jit(jax.value_and_grad(self.algorithm.loss))

  def gradient(
      self, params, one, args, *, version, key, stale=False, share=1.0
  ):
    """Computes loss, outputs and gradient of one group.

    With prefix_gradient="full" branches are run one by one. If the loss needs
    pairs of them, a first pass computes log-probs and the loss's gradient with
    respect to them, and a second one the gradient of that linear combination.

    Args:
      params: all parameters.
      one: an experience; its state is replayed if it holds one.
      args: arguments of the loss, with leading axis G.
      version: u32 that stands for these parameters.
      key: a PRNG key, for "sampled".
      stale: whether a state captured under other parameters is accepted.
      share: weight of this group in the load-balance term, 1 / N for N groups.

    Returns:
      The loss, the readout's outputs [G, T, ...], and the gradient of the
      trained parameters.
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
    """Makes the train state before the first update; see `step.create`."""
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
    """Computes what the algorithm needs of a batch before its first update.

    Args:
      params: the parameters that sampled the batch.
      batch: experiences.
      version: u32 that stands for `params`.
      reference: parameters of the reference policy, or None.

    Returns:
      One `Known` for each experience.
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
    """Loss and gradient summed over a batch, and its outputs [N, G, ...].

    Args:
      params: all parameters.
      batch: experiences, as the algorithm's `prepare` returned them.
      args: arguments of the loss, with leading axes [N, G].
      version: u32 that stands for these parameters.
      key: a PRNG key, for "sampled".
      stale: whether states captured under other parameters are accepted.
    """
    grads, outputs, loss = None, [], 0.0
    # A group of empty tails has no balance term, as in stacked groups.
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
    """Makes one update from the gradients of all groups of a batch.

    Args:
      train_state: the train state before the update; it is donated.
      batch: experiences of one shape; states that they hold are replayed.
      known: what `know` returned for these experiences.
      version: u32 that stands for these parameters.
      key: a PRNG key for this update, for "sampled".
      stale: whether states captured under other parameters are accepted.

    Returns:
      The train state after the update, and what there is to log.
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
    """Warns once of the share of an update that narrow dtypes round away."""
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
  """Joins one `Known` per experience into one `Known` of lists."""
  def column(values: list[Any]):
    return None if values[0] is None else values

  return algorithms.Known(*(column(list(x)) for x in zip(*known, strict=True)))
