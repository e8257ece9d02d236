# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A value head beside the log-probs, for PPO."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import readout as readout_lib
from branch_replay.models import decoder
from branch_replay.rl import objectives
from branch_replay.rl import surrogates

PATH = "value_head"


class Outputs(NamedTuple):
  """Leaves [..., G, T]: log-probs, and V before every token."""

  log_probs: jax.Array
  values: jax.Array


class Targets(NamedTuple):
  """Constants of the value loss, [..., G, T]."""

  old_values: jax.Array
  returns: jax.Array


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Log-probs, and V = w · h + b of the state before the token.

  Attributes:
    temperature: of the log-probs.
  """

  temperature: float = 1.0

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """`Outputs` of rows, leaves [N], at least float32."""
    of_token = readout_lib.LogProbs(self.temperature)
    head = params[PATH]
    dtype = config_lib.at_least_float32(hidden_NM.dtype)
    values_N = hidden_NM.astype(dtype) @ head["kernel"].astype(dtype)
    return Outputs(
        of_token(model, params, hidden_NM, targets_N, layout),
        values_N + head["bias"].astype(dtype),
    )


@dataclasses.dataclass(frozen=True)
class Loss:
  """The policy loss and c times the value loss, a sum over branches.

  Attributes:
    objective: of the log-probs.
    coefficient: c.
    clip: of `surrogates.value_loss`.
  """

  objective: objectives.PolicyLoss
  coefficient: float
  clip: float | None

  def __call__(
      self, outputs: Outputs, answers: objectives.Answers, targets: Targets
  ) -> jax.Array:
    """The sum over the branches it is given, a scalar."""
    value_GT = surrogates.value_loss(
        outputs.values, targets.old_values, targets.returns, answers.mask,
        clip=self.clip,
    )
    policy = self.objective(outputs.log_probs, answers)
    return policy + self.coefficient * jnp.sum(answers.weights * value_GT)


def add_head(params, config: config_lib.ModelConfig):
  """The parameters with a value head of zeros, unless there is one.

  It is at least float32.
  """
  if PATH in params:
    return params
  dtype = config_lib.at_least_float32(config.param_dtype)
  kernel, bias = jnp.zeros(config.width, dtype), jnp.zeros((), dtype)
  return params | {PATH: {"kernel": kernel, "bias": bias}}


def without_head(params):
  """The parameters of the decoder alone."""
  return {name: child for name, child in params.items() if name != PATH}
