# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""`RunSettings` as a config whose every field can be a flag, and back.

A config has a field for every setting, also for those whose names depend on a
choice: the task's, the algorithm's, the model's. `switch` gives the config the
fields of another choice.
"""

from collections.abc import Mapping
import dataclasses
import inspect
from typing import Any

import ml_collections
from ml_collections import config_dict

from branch_replay import config as config_lib
from branch_replay import tasks
from branch_replay.engine.schedule import Schedule
from branch_replay.tasks import task as task_lib
from branch_replay.training import by_name
from branch_replay.training import fields
from branch_replay.training import settings as settings_lib

# Set by other fields of a run.
_NOT_OF_MODEL = ("param_dtype", "compute_dtype", "adapter")


def to_config(settings: settings_lib.RunSettings) -> ml_collections.ConfigDict:
  """The config of a run: all fields, with their defaults where not given.

  Args:
    settings: the run. Every phase becomes a field of its own, with a field
      `kind`; `phases` are their names.
  """
  found = _plain(settings)
  phases = found.pop("phases")
  found |= {"phases": tuple(phases)} | {
      name: {"kind": settings.phases[name].kind, **phase}
      for name, phase in phases.items()
  }
  for phase in phases:
    algorithm = found[phase].get("algorithm")
    if algorithm is not None:
      algorithm["settings"] = _filled(
          by_name.settings_of(algorithm["name"]), algorithm["settings"]
      )
  found["task"] = of_task(**found["task"])
  found["model"] = _filled(_of_model(settings.pretrained), found["model"])
  found["schedule"] = _filled(_of_schedule(), found["schedule"])
  return ml_collections.ConfigDict(found)


def of_config(config: ml_collections.ConfigDict) -> settings_lib.RunSettings:
  """The settings of a config; fields that it lacks have their defaults.

  Raises:
    ValueError: a field that nobody reads, named with the nearest one that
      somebody does, or a phase that is not described.
  """
  values = dict(config.to_dict())
  names = values.pop("phases", ("reinforce",))
  # A phase that is described but not run is no mistake.
  described = {
      name: values.pop(name) for name in list(values)
      if isinstance(values[name], Mapping) and "kind" in values[name]
  }
  if not names:
    raise ValueError("phases=() names nothing to do.")
  phases = {}
  for name in names:
    if name not in described:
      raise task_lib.unknown("phase", name, described)
    of = dict(described[name])
    kind = of.pop("kind")
    if kind not in settings_lib.PHASES:
      raise task_lib.unknown(f"{name}.kind", kind, settings_lib.PHASES)
    phases[name] = fields.make(settings_lib.PHASES[kind], of, name)
  known = {x: y for x, y in fields.of(settings_lib.RunSettings).items()}
  fields.check_names(values, [*known, *described], "the config")
  if "model" in values:
    of_model = fields.of(config_lib.ModelConfig)
    fields.check_names(values["model"], of_model, "model")
    values["model"] = {
        name: value for name, value in values["model"].items()
        if value is not None or of_model[name].default is None
    }
  fields.check_names(values.get("schedule", {}), _of_schedule(), "schedule")
  for name in ("model", "task"):  # JSON has no tuples
    values[name] = {
        x: tuple(y) if isinstance(y, list) else y
        for x, y in values.get(name, {}).items()
    }
  return fields.make(settings_lib.RunSettings, {**values, "phases": phases})


def switch(config: ml_collections.ConfigDict, path: str, value: str) -> None:
  """Makes a choice, and gives the config the fields of what was chosen.

  Args:
    config: a config of `to_config`; it is changed.
    path: a field, as in "task.name" or "reinforce.algorithm.name". For fields
      that choose nothing, or that have this value already, nothing is done.
    value: the choice.

  Raises:
    ValueError: no such choice.
  """
  *parents, last = path.split(".")
  at = config
  for parent in parents:
    at = at.get(parent) if isinstance(at, ml_collections.ConfigDict) else None
  if at is None or at.get(last) == value:
    return
  with config.unlocked():
    if path == "task.name":
      config.task = ml_collections.ConfigDict(of_task(value))
    elif path == "pretrained" and not config.pretrained:
      config.model = ml_collections.ConfigDict()
    elif len(parents) == 2 and parents[1] == "algorithm" and last == "name":
      chosen = _filled(by_name.settings_of(value), {})
      at.settings = ml_collections.ConfigDict(chosen)


def meanings(config: ml_collections.ConfigDict) -> dict[str, str]:
  """What the fields of a config mean, by their dotted paths."""
  found = {}

  def add(source: Mapping[str, fields.Field], path: str):
    for name, field in source.items():
      found[f"{path}{name}"] = field.meaning
      if dataclasses.is_dataclass(field.hint):
        add(fields.of(field.hint), f"{path}{name}.")

  add(fields.of(settings_lib.RunSettings), "")
  add(fields.of(config_lib.ModelConfig), "model.")
  add(_of_schedule(), "schedule.")
  found |= task_meanings(config.task.name)
  for name, phase in config.items():
    if not isinstance(phase, ml_collections.ConfigDict) or "kind" not in phase:
      continue
    found[f"{name}.kind"] = f"one of {', '.join(settings_lib.PHASES)}."
    add(fields.of(settings_lib.PHASES[phase.kind]), f"{name}.")
    found |= task_meanings(config.task.name, f"{name}.task.")
    if "algorithm" in phase:
      add(by_name.settings_of(phase.algorithm.name),
          f"{name}.algorithm.settings.")
  return found


def _plain(value: Any) -> Any:
  """Nested dataclasses and mappings as dicts; a missing number as a
  placeholder, so that a flag can set it.
  """
  if isinstance(value, Mapping):
    return {name: _plain(one) for name, one in value.items()}
  if dataclasses.is_dataclass(value):
    return {
        name: _value(_plain(getattr(value, name)), field)
        for name, field in fields.of(type(value)).items()
    }
  return value


def _value(value: Any, field: fields.Field) -> Any:
  if value in (None, inspect.Parameter.empty) and field.kind is not None:
    return config_dict.placeholder(field.kind)
  # A flag of an integer would take no other number.
  return float(value) if field.kind is float else value


def _filled(known: Mapping[str, fields.Field], given: Mapping) -> dict:
  """The given settings, and the defaults of those that a flag can set."""
  return dict(given) | {
      name: _value(given.get(name, field.default), field)
      for name, field in known.items()
      if name in given or field.kind is not None
      or isinstance(field.default, tuple)
  }


def of_task(name: str, **settings) -> dict:
  """The fields of a task: its name, and all of its settings.

  Args:
    name: a key of `tasks.RECIPES`.
    **settings: those that differ from the defaults.

  Raises:
    ValueError: no such task.
  """
  if name not in tasks.RECIPES:
    raise task_lib.unknown("task", name, tasks.RECIPES)
  known = fields.of(tasks.RECIPES[name])
  return {"name": name, **_filled(known, settings)}


def task_meanings(name: str, path: str = "task.") -> dict[str, str]:
  """What the fields of a task mean, by their dotted paths."""
  known = fields.of(tasks.RECIPES[name])
  return {
      f"{path}{setting}": field.meaning for setting, field in known.items()
  } | {f"{path}name": f"one of {', '.join(sorted(tasks.RECIPES))}."}


def _of_model(pretrained: str) -> dict[str, fields.Field]:
  """The fields of a model's geometry; none if a file says it all."""
  return {} if pretrained else {
      name: field for name, field in fields.of(config_lib.ModelConfig).items()
      if name not in _NOT_OF_MODEL
  }


def _of_schedule() -> dict[str, fields.Field]:
  return {
      name: field for name, field in fields.of(Schedule).items()
      if name != "layout"
  }
