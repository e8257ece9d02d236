# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of a class or function: names, defaults, types and meanings.

Defaults and types are read from the signature, meanings from the docstring, so
that a config, its flags and its help need not repeat them.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import inspect
import types
import typing
from typing import Any
from typing import NamedTuple

import docstring_parser

from branch_replay.tasks import task as task_lib


class Field(NamedTuple):
  """One setting.

  Attributes:
    default: the default; `inspect.Parameter.empty` if there is none.
    hint: its type.
    meaning: what the docstring says of it, on one line; "" if nothing.
  """

  default: Any
  hint: Any
  meaning: str

  @property
  def kind(self) -> type | None:
    """int, float, bool or str for a setting that a flag of that type can set.
    """
    union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
    kinds = [
        str if typing.get_origin(x) is typing.Literal else x
        for x in (typing.get_args(self.hint) if union else (self.hint,))
        if x is not type(None)
    ]
    plain = (int, float, bool, str)
    if len(kinds) == 1:
      return kinds[0] if kinds[0] in plain else None
    # One of several types: that of the default can be given by a flag.
    return type(self.default) if type(self.default) in plain else None


def of(source: Callable) -> dict[str, Field]:
  """The settings of a dataclass or of a function's keyword arguments."""
  hints = typing.get_type_hints(source)
  if inspect.isclass(source):
    hints |= typing.get_type_hints(source.__init__)
  said = {
      one.arg_name: " ".join((one.description or "").split())
      for kind in reversed(getattr(source, "__mro__", (source,)))
      for one in docstring_parser.parse(kind.__doc__ or "").params
  }
  factories = {}
  if dataclasses.is_dataclass(source):
    factories = {
        field.name: field.default_factory
        for field in dataclasses.fields(source)
        if field.default_factory is not dataclasses.MISSING
    }
  return {
      name: Field(
          factories[name]() if name in factories else one.default,
          hints.get(name), said.get(name, ""),
      )
      for name, one in inspect.signature(source).parameters.items()
  }


def check_names(given: Mapping, known, where: str) -> None:
  """ValueError for a name that is not known, with the nearest one that is."""
  for name in given:
    if name not in known:
      raise task_lib.unknown(f"field of {where}", name, known)


def make(kind: type, values: Mapping, where: str = "") -> Any:
  """A settings dataclass of nested plain values, as a config gives them.

  Args:
    kind: the class; fields that are dataclasses are made of mappings.
    values: fields by name; those not given have their defaults.
    where: path of these settings, for messages.

  Raises:
    ValueError: an unknown field, named with the nearest known one.
  """
  if isinstance(values, kind):
    return values
  if not isinstance(values, Mapping):
    raise ValueError(
        f"{where or kind.__name__} must be a mapping of settings, not "
        f"{values!r}."
    )
  known = of(kind)
  check_names(values, known, where or "the config")
  found = {}
  for name, value in values.items():
    hint = known[name].hint
    if dataclasses.is_dataclass(hint):
      value = make(hint, value, f"{where}.{name}".lstrip("."))
    elif isinstance(value, list):
      value = tuple(value)
    found[name] = value
  return kind(**found)
