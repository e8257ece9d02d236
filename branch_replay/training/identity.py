# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A run described as JSON, to tell whether a checkpoint is of the same run.

The description contains everything the result of a run depends on: the fields
of its dataclasses, and for a function (optimizers are closures) its name, the
values it closes over and the numbers in its code. So a learning rate hidden in
an optimizer is compared like any other field.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import math
import types
from typing import Any
import warnings

import numpy as np

from branch_replay.mixers import mixer
from branch_replay.tasks import files
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

_ROWS = 256  # read of a split for its digest
_SMALL = 1 << 16  # numbers; of larger arrays only shape and dtype are compared
# Fields that are left out, by class: they change no result, or, like a
# learner's model, are described elsewhere.
_FREE = {
    "Schedule": ("layout",),
    "Rollouts": ("hold",),
    "Learner": ("model",),
    "Part": ("source",),  # where the file is; its content is in `digest`
    "Rewards": ("workers", "timeout"),
    "HeldOutEvaluation": ("every",),
    "Supervised": ("learning_rate",),  # a copy for the log
    "Pairwise": ("learning_rate",),
    "Reinforce": ("learning_rate", "speculator"),
}
# Fields that checkpoints of earlier versions lack, by class: they are left out
# where they have their defaults, so that such a checkpoint is still accepted.
_LATER = {
    "Learner": ("band",),
    "Schedule": ("keep_attention",),
    "LatentAttention": ("norm_eps",),
}
# Classes that checkpoints know by another name. Without this, the checkpoint of
# the same run would be refused.
_SAVED_NAMES = {
    "MaximumLikelihood": "Supervised",
    "HeldOutEvaluation": "Evaluation",
}


def of_run(run) -> dict:
  """The description of a `loop.TrainingRun`; see the module."""
  return {
      "seed": run.seed,
      "model": describe(run.model.config),
      "phases": [
          describe(phase) | {"type": _kind(type(phase))} for phase in run.phases
      ],
      "evaluation": describe(run.evaluation),
  }


def check(
    there: dict | None, here: dict, step: int, may_differ: Sequence[str] = ()
) -> None:
  """Raises ValueError if two descriptions are not of the same run.

  The number of steps of the phase the run is in may differ, as long as it is
  not below the steps done, and phases may be added at the end.

  Args:
    there: description of the saved run; None if its checkpoint has none, which
      only causes a warning.
    here: description of this run.
    step: steps the saved run has done, of all phases.
    may_differ: paths of further parts that may differ.

  Raises:
    ValueError: the runs differ; the message names every difference with both
      values.
  """
  if there is None:
    warnings.warn(
        "The checkpoint does not say what run it is of: that it is of this one "
        "was not checked.", stacklevel=2,
    )
    return
  there, here = copy.deepcopy(there), copy.deepcopy(here)
  before, phases = 0, list(zip(there["phases"], here["phases"], strict=False))
  for saved, mine in phases:
    steps = saved["steps"]
    if before < step <= before + steps and mine["steps"] >= step - before:
      mine["steps"] = steps
    before += steps
  here["phases"] = here["phases"][: len(there["phases"])]
  found = [
      f"{path}: {_shown(one)} there, {_shown(other)} here"
      for path, one, other in differences(there, here)
      if not any(_within(path, free) for free in may_differ)
  ]
  if found:
    advice = (
        " A learning rate that falls until the last update changes with the "
        "steps: only a run whose rate ends constant can be made longer."
        if any(".optimizer" in one for one in found) else ""
    )
    more = f"; and {len(found) - 8} more" * (len(found) > 8)
    raise ValueError(
        f"The checkpoint of step {step} is of another run: "
        f"{'; '.join(found[:8])}{more}. Take another workdir, or the settings "
        f"of then.{advice}"
    )


def _within(path: str, of: str) -> bool:
  return path == of or path.startswith((f"{of}.", f"{of}["))


def _shown(value) -> str:
  text = repr(value)
  return text if len(text) <= 120 else f"{text[:120]}…"


def _kind(kind: type) -> str:
  """Name of a class, or of the class of this package that it extends."""
  ours = (x for x in kind.__mro__ if x.__module__.startswith("branch_replay."))
  return next(ours, kind).__qualname__


def _class_name(kind: type) -> str:
  """Name of a class; with its module for a kind of layer of the caller's own.

  Two modules may each have a mixer of the same name.
  """
  own = issubclass(kind, mixer.Mixer) and not kind.__module__.startswith(
      "branch_replay."
  )
  return f"{kind.__module__}.{kind.__qualname__}" if own else kind.__qualname__


def describe(
    value: Any, *, fluid: bool = True, _inside: tuple[int, ...] = ()
) -> Any:
  """Describes a value as JSON; equal values have equal descriptions.

  This holds across processes too.

  Args:
    value: anything. Numbers, text, containers, arrays, dataclasses and
      functions are described by content; of any other object only the type is.
    fluid: whether lists, dicts and sets are described by content. False is for
      reward functions, which may fill a cache while they are used.
  """
  if isinstance(value, enum.Enum):
    return f"{type(value).__qualname__}.{value.name}"
  if isinstance(value, (bool, str, int, type(None))):
    return value
  if isinstance(value, (float, np.number)):
    value = value.item() if isinstance(value, np.number) else value
    return value if math.isfinite(value) else str(value)
  if id(value) in _inside:
    return "…"
  inner = functools.partial(
      describe, fluid=fluid, _inside=(*_inside, id(value))
  )
  if isinstance(value, type):
    return _class_name(value)
  if not fluid and isinstance(value, (list, dict, set)):
    return type(value).__qualname__
  if isinstance(value, task_lib.Task):
    return _task(value, inner)
  if isinstance(value, functools.partial):
    return {
        "of": inner(value.func), "arguments": inner(value.args),
        **{name: inner(one) for name, one in value.keywords.items()},
    }
  if isinstance(value, types.MethodType):
    return {"method": value.__name__, "of": inner(value.__self__)}
  if inspect.isfunction(inspect.unwrap(value)):
    return _function(inspect.unwrap(value), inner)
  if isinstance(value, (text_lib.Characters, text_lib.Chat)):
    return {"text": value.name, "fingerprint": value.fingerprint()}
  if dataclasses.is_dataclass(value):
    free = [
        name for kind in type(value).__mro__
        for name in _FREE.get(kind.__name__, ())
    ]
    name = type(value).__qualname__
    later = _LATER.get(name, ())
    return {"type": _SAVED_NAMES.get(name, name)} | {
        field.name: inner(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.name not in free and not (
            field.name in later
            and getattr(value, field.name) == field.default
        )
    }
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return {name: inner(one) for name, one in value._asdict().items()}
  if isinstance(value, Mapping):
    return {str(name): inner(one) for name, one in value.items()}
  if isinstance(value, (list, tuple)):
    return [inner(one) for one in value]
  if isinstance(value, (set, frozenset)):
    return sorted((inner(one) for one in value), key=repr)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return _array(value)
  return getattr(value, "__qualname__", type(value).__qualname__)


def _function(value, inner) -> Any:
  """A function's name, closure, defaults, and the floats in its code."""
  found = {}
  names, cells = value.__code__.co_freevars, value.__closure__ or ()
  for name, cell in zip(names, cells, strict=True):
    try:
      found[name] = inner(cell.cell_contents)
    except ValueError:  # an empty cell
      continue
  if value.__defaults__:
    found["defaults"] = inner(value.__defaults__)
  if value.__kwdefaults__:
    found |= {name: inner(one) for name, one in value.__kwdefaults__.items()}
  numbers = [
      one for one in value.__code__.co_consts if isinstance(one, float)
  ]
  if numbers:
    found["numbers"] = inner(numbers)
  name = value.__qualname__
  return {"function": name, **found} if found else name


def _array(value) -> str:
  text = f"{value.dtype}{list(value.shape)}"
  if math.prod(value.shape) > _SMALL:
    return text
  return f"{text} {_digest([np.asarray(value)])}"


def _task(task: task_lib.Task, inner) -> dict:
  """A task's name, reward and rows.

  At most `_ROWS` rows of a split are read; rows of files have digests.
  """
  rows = {}
  for name in sorted(task.rows):
    split = task.rows[name]
    if isinstance(split, files.Rows):  # knows every byte of its file
      rows[name] = f"{len(split)} rows {split.digest}"
      continue
    step = max(1, -(-len(split) // _ROWS))
    digest = _digest(
        part
        for at in range(0, len(split), step)
        for part in _parts(split[at])
    )
    rows[name] = f"{len(split)} rows {digest}"
  return {
      "name": task.name, "vocab_size": task.vocab_size,
      "stop_ids": inner(task.stop_ids), "verifiable": task.verifiable,
      "score": inner(task.score, fluid=False), "rows": rows,
  }


def _parts(row: task_lib.Example):
  yield np.frombuffer(row.id.encode(), np.uint8)
  yield np.asarray(row.prompt_ids, np.int64)
  if row.answer_ids is not None:
    yield np.asarray(row.answer_ids, np.int64)
  if row.rejected_ids is not None:
    yield np.asarray(row.rejected_ids, np.int64)


def _digest(arrays) -> str:
  found = hashlib.sha256()
  for array in arrays:
    found.update(f"{array.shape}".encode())
    found.update(np.ascontiguousarray(array).tobytes())
  return found.hexdigest()[:16]


def differences(there: Any, here: Any, path: str = "") -> list[tuple]:
  """Lists where two descriptions differ, as (path, value there, value here).

  A field that only one of them has is "missing" in the other.
  """
  if isinstance(there, Mapping) and isinstance(here, Mapping):
    pairs = [
        (f"{path}.{name}".lstrip("."), there.get(name, "missing"),
         here.get(name, "missing"))
        for name in dict.fromkeys([*there, *here])
    ]
  elif _is_list(there) and _is_list(here):
    pairs = [
        (f"{path}[{at}]", there[at] if at < len(there) else "missing",
         here[at] if at < len(here) else "missing")
        for at in range(max(len(there), len(here)))
    ]
  else:
    same = there == here and isinstance(there, bool) == isinstance(here, bool)
    return [] if same else [(path, there, here)]
  return [
      found for where, one, other in pairs
      for found in differences(one, other, where)
  ]


def _is_list(value) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str)
