# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement algorithms by name, with the settings that each has."""

from collections.abc import Callable
from collections.abc import Mapping
import inspect
from typing import Any
from typing import NamedTuple

from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import fields


class _Known(NamedTuple):
  """How an algorithm is made.

  Attributes:
    loss: makes its loss from settings.
    wrapper: class of `algorithms` that takes the loss, and settings of its own.
    defaults: settings that this algorithm has other defaults for.
  """

  loss: Callable
  wrapper: type
  defaults: Mapping[str, Any] = {}


_POLICY = algorithms.PolicyGradient
ALGORITHMS = {
    # The paper has 0.04. Without a KL penalty there is no reference policy,
    # whose parameters would take as much memory again.
    "grpo": _Known(objectives.grpo, _POLICY, {"kl_coefficient": 0.0}),
    # Its advantages are not divided by the group's standard deviation, and its
    # constant is the phase's max_tokens.
    "dr_grpo": _Known(
        objectives.dr_grpo, _POLICY,
        {"advantage": "group_centred", "max_tokens": None},
    ),
    "dapo": _Known(objectives.dapo, _POLICY),
    "gspo": _Known(objectives.gspo, _POLICY),
    "reinforce": _Known(
        objectives.reinforce, _POLICY, {"advantage": "leave_one_out"}
    ),
    "ppo": _Known(objectives.ppo, algorithms.ProximalPolicy),
    "dpo": _Known(preference.Dpo, algorithms.Preference),
    "ipo": _Known(preference.Ipo, algorithms.Preference),
}
# Given by the phase, or made here.
_NOT_SETTINGS = (
    "objective", "loss", "temperature", "needs_reference", "needs_outputs",
)


def settings_of(name: str) -> dict[str, fields.Field]:
  """The settings of an algorithm.

  Raises:
    ValueError: no such algorithm.
  """
  if name not in ALGORITHMS:
    raise task_lib.unknown("algorithm", name, ALGORITHMS)
  known = ALGORITHMS[name]
  found = fields.of(known.loss) | {
      setting: field for setting, field in fields.of(known.wrapper).items()
      if setting not in _NOT_SETTINGS
  }
  for setting, default in known.defaults.items():
    found[setting] = found[setting]._replace(default=default)
  return found


def make(
    name: str, settings: Mapping[str, Any], *, temperature: float,
    max_tokens: int,
) -> algorithms.Algorithm:
  """An algorithm by its name.

  Args:
    name: a key of `ALGORITHMS`.
    settings: those that differ from the algorithm's defaults.
    temperature: temperature that answers are sampled at.
    max_tokens: the most tokens of an answer.

  Raises:
    ValueError: no such algorithm or setting.
  """
  known = settings_of(name)
  fields.check_names(settings, known, f"algorithm.settings of {name!r}")
  values = {
      setting: field.default for setting, field in known.items()
      if field.default is not inspect.Parameter.empty
  } | dict(settings)
  if "max_tokens" in known and values["max_tokens"] is None:
    values["max_tokens"] = max_tokens
  loss, wrapper, _ = ALGORITHMS[name]
  of_loss = {x: values.pop(x) for x in fields.of(loss)}
  if wrapper is not algorithms.Preference:
    values["temperature"] = temperature
  return wrapper(loss(**of_loss), **values)
