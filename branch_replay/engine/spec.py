# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a computation is asked for, and what it returns beside the gradient.

`Spec` holds the static settings: a program is compiled for one spec and one set
of shapes. `Evaluation` is what `value_and_grad` returns beside the gradient.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.data import group as group_lib
from branch_replay.devices import layout as layout_lib
from branch_replay.engine import balance as balance_lib
from branch_replay.engine import band as band_lib
from branch_replay.engine import estimators
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import segment
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import Schedule
from branch_replay.mixers import kinds
from branch_replay.models import adapters
from branch_replay.models import decoder
from branch_replay.models import params as params_lib


@dataclasses.dataclass(frozen=True)
class Spec:
  """The static settings of a computation; another spec compiles again.

  Attributes:
    model: the decoder.
    readout: function from hidden states to outputs, see `engine.readout`.
    prefix_gradient: "exact", "banded", "sampled", "stop" or "full".
    schedule: sizes and policies, which do not change the result.
    sampling: which chunks prefix_gradient="sampled" pulls back.
    band: how far prefix_gradient="banded" reaches inside the prefix.
    trainable: which parameters get a gradient, "all" or "adapters".
    balance: coefficient of the load-balance term of a mixture of experts.
  """

  model: decoder.Decoder
  readout: Any = readout_lib.LogProbs()
  prefix_gradient: str = "exact"
  schedule: Schedule = Schedule()
  sampling: estimators.Sampling = estimators.Sampling()
  band: band_lib.Band = band_lib.Band()
  trainable: str = "all"
  balance: float = 0.0

  def __post_init__(self):
    params_lib.check_model(self.model)
    checks.function(
        self.readout, "readout", "branch_replay.readout has some."
    )
    schedule_lib.check(self.schedule)
    schedule_lib.check_mode(self.prefix_gradient)
    checks.instance(self.sampling, "sampling", estimators.Sampling)
    checks.instance(self.band, "band", band_lib.Band)
    if self.prefix_gradient == "sampled" and kinds.recurrent(self.config):
      raise ValueError(
          "prefix_gradient='sampled' through recurrent layers would multiply "
          "the weights of chunks: use 'exact'."
      )
    adapters.check_trainable(self.trainable, self.config)
    balance_lib.check(self.balance, self.config)

  @property
  def config(self) -> config_lib.ModelConfig:
    return self.model.config

  @property
  def whole(self) -> bool:
    """Whether every sequence is run whole, on an empty prefix state."""
    return self.prefix_gradient == "full"

  @property
  def accumulates(self) -> bool:
    """Whether cotangents of the prefix state are accumulated."""
    return self.prefix_gradient in ("exact", "banded", "sampled")

  @property
  def keeps_attention(self) -> bool:
    """Whether outputs of attention are kept of what is pushed."""
    return bool(self.schedule.keep_attention) and self.accumulates

  @property
  def layout(self) -> layout_lib.Layout:
    schedule = self.schedule
    return dataclasses.replace(
        schedule.layout, implementation=schedule.attention
    )

  def trained(self, params):
    """Selects the parameters that get a gradient.

    Args:
      params: all parameters, a nested dict.

    Returns:
      `params` itself if `trainable` is "all"; if it is "adapters", a nested
      dict of the same arrays with nothing but the adapters, empty if there are
      none.
    """
    return adapters.select(params, self.trainable)

  def outer(self, params):
    """Gathers the parameters outside the layers, but not the vocabulary tables.
    """
    return self.layout.gather("", segment.outer(params))

  @property
  def state(self) -> state_lib.PrefixState:
    """How devices share each field of a state, see `state.sharing_of`."""
    return state_lib.sharing_of(self.layout.devices)

  def chunks(self, positions: int) -> state_lib.Chunks:
    """Cuts a prefix of so many positions into equal chunks."""
    return state_lib.chunks(
        positions, self.schedule.chunk_size, self.layout.devices
    )

  def at_once(self, branches: int) -> int:
    """How many of a group's `branches` branches are run side by side."""
    if self.whole:
      return 1
    return min(self.schedule.branches_at_once or branches, branches)

  def settled(self, prefix: int, row_tokens: int, held_tokens: int) -> "Spec":
    """Returns the spec with what its schedule left open.

    Args:
      prefix, row_tokens, held_tokens: as in `Schedule.settled`.
    """
    return dataclasses.replace(self, schedule=self.schedule.settled(
        self.config, prefix, row_tokens, held_tokens
    ))

  def with_policy(self, policy: str) -> "Spec":
    """The spec with this activation policy."""
    schedule = dataclasses.replace(self.schedule, activations=policy)
    return dataclasses.replace(self, schedule=schedule)


def of_group(
    model, group, readout, prefix_gradient, schedule,
    sampling=estimators.Sampling(), band=band_lib.Band(), *, one_pass=True,
    trainable="all", balance=0.0,
) -> Spec:
  """Builds the spec of a group's gradient and chooses its activation policy.

  Args:
    model, readout, prefix_gradient, schedule, sampling, band, trainable,
      balance: as in `gradients.value_and_grad`.
    group: the group, or its shapes.
    one_pass: whether each visit's backward pass follows its forward pass at
      once, so that the activations of only one visit are held at a time.
  """
  params_lib.check_model(model)
  group_lib.check(group, model.config)
  spec = Spec(
      model, readout, prefix_gradient, schedule, sampling, band, trainable,
      balance,
  )
  branches, tokens = group.tails.shape[-2:]
  prefix = group.prompt.shape[-1] - 1
  if spec.whole:
    tokens, prefix = prefix + tokens, 0
  elif not spec.accumulates:
    prefix = 0
  rows = spec.at_once(branches) * tokens
  # On several devices `compiled.forward` keeps no activations of tails.
  one_pass = one_pass or spec.layout.devices > 1
  return spec.settled(prefix, rows, rows if one_pass else branches * tokens)


def check_key(spec: Spec, key):
  """Checks a PRNG key; in "sampled", which draws chunks, it must be there."""
  if spec.prefix_gradient == "sampled" and key is None:
    raise ValueError("prefix_gradient='sampled' draws chunks: pass key=.")
  if key is not None:
    checks.key(key)


def check_share(spec: Spec, balance_share) -> float:
  """Returns the factor on the load-balance term, 1 for None.

  Raises:
    TypeError: the factor is no number.
    ValueError: it is negative, or the spec has no load-balance term.
  """
  if balance_share is None:
    return 1.0
  if not spec.balance:
    raise ValueError(
        f"balance_share={balance_share} belongs to a load-balance term: say "
        "balance=, or leave it out."
    )
  if group_lib.is_concrete(balance_share):
    checks.number(balance_share, "balance_share", 0)
  return balance_share


class Evaluation(NamedTuple):
  """What `value_and_grad` returns beside the gradient.

  Attributes:
    loss: the sum over branches or tokens, and over stacked groups.
    outputs: the readout's pytree: [G, T, ...] for a group, [groups, G, T, ...]
      for stacked groups, [N, ...] for a tree.
    prefix_pass: in "sampled" an `estimators.PrefixPass`, which chunks ran and
      with what probability; None in the other modes and without a prefix.
  """

  loss: jax.Array
  outputs: Any
  prefix_pass: Any


class Balanced(NamedTuple):
  """An `Evaluation` where the gradient includes a load-balance term.

  Attributes:
    loss: as in `Evaluation`; the load-balance term is not part of it.
    outputs, prefix_pass: as in `Evaluation`.
    load: the share of the choices that fell on each expert, [L, E] over the
      layers with experts; [groups, L, E] for stacked groups.
  """

  loss: jax.Array
  outputs: Any
  prefix_pass: Any
  load: jax.Array


def evaluation(loss, outputs, prefix_pass, load) -> Evaluation | Balanced:
  """Makes a `Balanced`, or an `Evaluation` if there is no load."""
  if load is None:
    return Evaluation(loss, outputs, prefix_pass)
  return Balanced(loss, outputs, prefix_pass, load)


def cotangent_of(loss):
  """Turns a loss into a function that returns the cotangent of its outputs.

  Args:
    loss: (outputs, *args) -> scalar. None if args is that cotangent itself,
      which is then passed through with a loss of 0.

  Returns:
    (outputs, *args) -> (cotangent of the outputs, loss). It raises TypeError
    or ValueError if the loss returns anything but one float.
  """
  if loss is None:
    return lambda outputs, d_outputs: (d_outputs, jnp.zeros(()))

  def cotangent(outputs, *args):
    value, pull = jax.vjp(lambda outputs: loss(outputs, *args), outputs)
    if not isinstance(value, jax.Array) or not jnp.issubdtype(
        value.dtype, jnp.floating
    ):
      raise TypeError(
          "The loss must return one float, the sum over the branches it is "
          f"given, not {value!r}."
      )
    if value.shape:
      raise ValueError(
          f"The loss has shape {value.shape}: it must be a scalar, the sum "
          "over the branches it is given."
      )
    (d_outputs,) = pull(jnp.ones_like(value))
    return d_outputs, value

  return cotangent


def zero_grads(params):
  """Zeros in the shapes of the parameters, in at least float32."""
  return jax.tree.map(
      lambda x: jnp.zeros(x.shape, config_lib.at_least_float32(x.dtype)),
      params,
  )
