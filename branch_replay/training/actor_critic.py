# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO's readout and loss: log-probs and a value head."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import readout as readout_lib
from branch_replay.models import decoder
from branch_replay.rl import objectives
from branch_replay.rl import surrogates

PATH = "value_head"


class Outputs(NamedTuple):
  """Log-probs of the tokens and V before every token, both [..., G, T]."""

  log_probs: jax.Array
  values: jax.Array


class Targets(NamedTuple):
  """Constants of the value loss, both [..., G, T]."""

  old_values: jax.Array
  returns: jax.Array


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Readout of log-probs and of V = w · h + b, h the state before the token.

  Attributes:
    temperature: temperature of the log-probs.
  """

  temperature: float = 1.0

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """`Outputs` of N rows, at least float32; arguments as of any readout."""
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
  """The policy loss plus c times the value loss, summed over branches.

  Attributes:
    objective: the policy loss.
    coefficient: c.
    clip: ε of `surrogates.value_loss`; None for no clipping.
  """

  objective: objectives.PolicyLoss
  coefficient: float
  clip: float | None

  def __call__(
      self, outputs: Outputs, answers: objectives.Answers, targets: Targets
  ) -> jax.Array:
    """The sum over the given branches, a scalar."""
    value_GT = surrogates.value_loss(
        outputs.values, targets.old_values, targets.returns, answers.mask,
        clip=self.clip,
    )
    policy = self.objective(outputs.log_probs, answers)
    return policy + self.coefficient * jnp.sum(answers.weights * value_GT)


def add_head(params, config: config_lib.ModelConfig):
  """Adds a value head of zeros, at least float32, unless there is one."""
  if PATH in params:
    return params
  dtype = config_lib.at_least_float32(config.param_dtype)
  kernel, bias = jnp.zeros(config.width, dtype), jnp.zeros((), dtype)
  return params | {PATH: {"kernel": kernel, "bias": bias}}


def without_head(params):
  """The parameters without the value head."""
  return {name: child for name, child in params.items() if name != PATH}
