# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of a learned drafter, one lesson at a time."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from branch_replay.models import decoder
from branch_replay.rollout.drafters import learned
from branch_replay.rollout.drafters import learned_loss
from branch_replay.training import step as step_lib
from branch_replay.training.drafting import lessons


class Trained(NamedTuple):
  """The part of a drafter that training changes.

  Attributes:
    params: parameters of the drafter.
    optimizer: optax state.
    version: i32[], updates done.
  """

  params: Any
  optimizer: Any
  version: jax.Array


@dataclasses.dataclass(frozen=True)
class Trainer:
  """How a drafter is trained.

  Attributes:
    model: the decoder it drafts for.
    optimizer: optax optimizer of the drafter's parameters.
    rows: N, rows in an update.
    width: T, tokens of a row.
    temperature: temperature answers are sampled at.
  """

  model: decoder.Decoder
  optimizer: optax.GradientTransformation
  rows: int
  width: int
  temperature: float = 1.0

  def __post_init__(self):
    if self.rows < 1 or self.width < 2:
      raise ValueError(
          f"rows={self.rows} must be at least 1 and width={self.width} at "
          "least 2: an item is a token with one after it."
      )

  def create(self, drafter: learned.Learned) -> Trained:
    """The state before the first update; parameters are at least float32."""
    params = jax.tree.map(jnp.copy, drafter.params)  # an update donates them
    params = step_lib.as_trained(params)
    moments = step_lib.initial(self.optimizer, params)
    return Trained(params, moments, jnp.int32(0))

  def update(
      self, trained: Trained, vocabulary_U, params, lesson: lessons.Lesson
  ) -> tuple[Trained, jax.Array]:
    """Makes one update, unless loss or gradient is not finite.

    Args:
      trained: the state before; it is donated.
      vocabulary_U: ids the drafter drafts.
      params: parameters of the model, on one device.
      lesson: what is learnt from.

    Returns:
      The state after the update, and the mean loss before it in nats per item.
    """
    packed = lessons.pack(lesson, self.rows, self.width)
    return self._update(
        trained, vocabulary_U, params, packed, lessons.on_device(lesson)
    )

  @functools.cached_property
  def _update(self):
    def mean_loss(drafter_params, vocabulary_U, params, packed, prompt):
      losses_NT, weights_NT = learned_loss.losses(
          drafter_params, vocabulary_U, self.model, params, packed,
          state=prompt, temperature=self.temperature,
      )
      return jnp.sum(losses_NT) / jnp.maximum(1, jnp.sum(weights_NT))

    def update(trained, *args):
      loss, grads = jax.value_and_grad(mean_loss)(trained.params, *args)
      params, moments, applied = step_lib.apply(
          self.optimizer, trained.params, trained.optimizer, grads, loss
      )
      version = trained.version + (~applied.skipped).astype(jnp.int32)
      return Trained(params, moments, version), loss

    return jax.jit(update, donate_argnums=0)
