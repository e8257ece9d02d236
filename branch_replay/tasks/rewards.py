# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards that are functions of an answer's text and its prompt's row.

  def score(answer: str, row: dict) -> float:
    return float(answer.strip() == row["answer"])

A function is named by its file, "reward.py:score", or given as such. Several
are added up with weights. Functions of files may run in processes of their own,
several at a time and each for a limited time; see `reward_pool`.
"""

from collections.abc import Callable
from collections.abc import Sequence
import copy
import dataclasses
import difflib
import functools
import hashlib
import inspect
import pathlib
from typing import Any

from branch_replay import checks
from branch_replay.tasks import reward_pool
from branch_replay.tasks import reward_worker
from branch_replay.tasks import task as task_lib
from branch_replay.tasks import text as text_lib

Function = Callable[[str, dict], float]
_SHOWN = 300  # characters of an answer in a message
# A part of this name would be logged under the name of another metric.
_TAKEN = ("mean", "spread")


@dataclasses.dataclass(frozen=True)
class Part:
  """One reward function with its weight.

  Attributes:
    name: name of the function, preceded by that of its file where other parts
      have the same.
    function: (text of an answer, fields of the row) -> a finite number or a
      bool.
    weight: factor of its values in the reward.
    digest: digest of the source that defines it, the whole file of one that is
      named by its file; "" if the source is not known.
    source: the file and the function's name; None for a function that was given
      as such.
  """

  name: str
  function: Function
  weight: float
  digest: str
  source: reward_pool.Source | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Rewards(task_lib.Scorer):
  """A weighted sum of reward functions.

  Attributes:
    text: how ids become text.
    parts: the functions, at least one.
    workers: processes that call them side by side; 0 calls them in this one.
    timeout: most seconds of one call; 0 for no limit. With a limit there is at
      least one process.
    timeout_reward: what a function's value is for an answer on which it took
      longer; None makes that an error.

  Raises:
    ValueError: a limit or processes for a function that is not of a file, or
      settings out of range.
  """

  text: text_lib.Text
  parts: tuple[Part, ...]
  workers: int = 0
  timeout: float = 0.0
  timeout_reward: float | None = None

  def __post_init__(self):
    checks.integer(self.workers, "workers", 0)
    checks.number(self.timeout, "timeout", 0)
    if self.timeout_reward is not None:
      checks.number(self.timeout_reward, "timeout_reward")
      if not self.timeout:
        raise ValueError(
            f"timeout_reward={self.timeout_reward} without a limit: set "
            "timeout, in seconds, or neither."
        )
    given = [part.name for part in self.parts if part.source is None]
    if given and (self.workers or self.timeout):
      raise ValueError(
          f"workers={self.workers}, timeout={self.timeout}: other processes "
          f"load rewards from files, and {given} were given as functions. Name "
          "them as 'FILE.py:FUNCTION', or set neither."
      )

  @property
  def names(self) -> tuple[str, ...]:
    """Names of the parts; () if there is only one."""
    return tuple(x.name for x in self.parts) if len(self.parts) > 1 else ()

  def scores(
      self, example: task_lib.Example, answers: Sequence[list[int]]
  ) -> list[task_lib.Scored]:
    """Scores answers to one prompt; see `task.Scorer`."""
    said = [self.text.decode(ids) for ids in answers]
    calls = [
        (number, answer) for answer in said for number in range(len(self.parts))
    ]
    values = self._values(example, calls)
    width, found = len(self.parts), []
    for at in range(0, len(values), width):
      parts = values[at : at + width]
      total = sum(
          part.weight * x for part, x in zip(self.parts, parts, strict=True)
      )
      found.append(task_lib.Scored(total, tuple(parts) if self.names else ()))
    return found

  def _values(self, example, calls) -> list[float]:
    if not (self.workers or self.timeout):
      return [self._here(example, self.parts[at], said) for at, said in calls]
    pool = _pool(tuple(part.source for part in self.parts), self.workers or 1)
    outcomes = pool.run(
        [reward_pool.Call(*call, dict(example.details)) for call in calls],
        timeout=self.timeout,
    )
    return [
        self._value(example, self.parts[at], said, outcome)
        for (at, said), outcome in zip(calls, outcomes, strict=True)
    ]

  def _here(self, example, part, answer) -> float:
    try:  # a copy, as the row is read again in later steps
      value = part.function(answer, copy.deepcopy(dict(example.details)))
    except (Exception, SystemExit) as error:
      said = f"{type(error).__name__}: {error}"
      raise _error(example, part, answer, f"failed: {said}") from error
    return task_lib.as_number(
        value, _what(example, part), f"the answer {_shown(answer)}"
    )

  def _value(self, example, part, answer, outcome) -> float:
    kind, value, detail = outcome
    if kind == "value":
      return task_lib.as_number(
          value, _what(example, part), f"the answer {_shown(answer)}"
      )
    if kind == "late":
      if self.timeout_reward is not None:
        return float(self.timeout_reward)
      raise _error(
          example, part, answer,
          f"took more than timeout={self.timeout} s and was stopped; raise it, "
          "or say by timeout_reward what such an answer is worth",
      )
    if kind == "died":
      raise _error(
          example, part, answer, f"ended its process, with status {value}"
      )
    if kind == "other":
      raise _error(
          example, part, answer,
          f"must be a number or a bool, not {value} of type {detail}",
      )
    # The traceback of another process, as its cause.
    raise _error(
        example, part, answer, f"failed: {value}"
    ) from RuntimeError(f"\n{detail}")


def _what(example, part) -> str:
  return f"Reward {part.name!r} of row {example.id!r}"


def _shown(answer: str) -> str:
  rest = len(answer) - _SHOWN
  cut = f" and {rest} more characters" if rest > 0 else ""
  return f"{answer[:_SHOWN]!r}{cut}"


def _error(example, part, answer: str, why: str) -> ValueError:
  return ValueError(
      f"{_what(example, part)} {why}. The answer was {_shown(answer)}."
  )


@functools.cache
def _pool(sources, workers: int) -> reward_pool.Pool:
  """One pool for all tasks of a process that have the same rewards."""
  return reward_pool.Pool(sources, workers)


def create(
    reward: str | Function | Sequence[str | Function],
    *,
    text: text_lib.Text,
    weights: Sequence[float] = (),
    workers: int = 0,
    timeout: float = 0.0,
    timeout_reward: float | None = None,
) -> Rewards:
  """Makes a reward of functions and names of functions.

  Args:
    reward: a function (text of an answer, fields of the row) -> a finite number
      or a bool; or "FILE.py:FUNCTION", or several of these separated by commas;
      or a sequence of functions and such names.
    text: how ids become text.
    weights: one for each function; () for 1 each.
    workers: see `Rewards`.
    timeout: see `Rewards`.
    timeout_reward: see `Rewards`.

  Returns:
    The reward. It has parts if there are several functions.

  Raises:
    TypeError: neither a function nor a name.
    ValueError: no such file or function, a file that fails, a function with
      other arguments, another number of weights, or what `Rewards` refuses.
  """
  if isinstance(reward, str):
    reward = [name.strip() for name in reward.split(",")]
  elif callable(reward):
    reward = [reward]
  reward = tuple(reward)
  weights = tuple(weights) or (1.0,) * len(reward)
  if not reward or len(weights) != len(reward):
    raise ValueError(
        f"weights={weights} for {len(reward)} rewards: one each is needed."
    )
  for weight in weights:
    checks.number(weight, "weights")
  parts = [
      _from_file(one, weight) if isinstance(one, str) else _given(one, weight)
      for one, weight in zip(reward, weights, strict=True)
  ]
  return Rewards(text, _named(parts), workers, timeout, timeout_reward)


def _named(parts: Sequence[Part]) -> tuple[Part, ...]:
  """The parts under names that differ."""
  said = [part.name for part in parts]
  found = []
  for part in parts:
    clashes = said.count(part.name) > 1 or part.name in _TAKEN
    name = part.name
    if clashes and part.source is not None:
      name = f"{pathlib.Path(part.source.path).stem}.{part.name}"
    found.append(dataclasses.replace(part, name=name))
  names = [part.name for part in found]
  if len(parts) > 1 and (
      len(set(names)) < len(names) or set(names) & set(_TAKEN)
  ):
    raise ValueError(
        f"Rewards named {', '.join(names)}: each is logged under its name, so "
        f"they must differ, and none may be {' or '.join(_TAKEN)}. Rename the "
        "functions."
    )
  return tuple(found)


def _given(function: Any, weight: float) -> Part:
  checks.function(
      function, "reward", "Or name one by its file, 'FILE.py:FUNCTION'."
  )
  name = getattr(function, "__name__", type(function).__name__)
  _check_arguments(function, name)
  return Part(name, function, float(weight), _digest_of(function))


def _digest_of(function) -> str:
  while isinstance(function, functools.partial):
    function = function.func
  plain = inspect.isroutine(function) or inspect.isclass(function)
  try:
    source = inspect.getsource(function if plain else type(function))
  except (OSError, TypeError):  # no source, as of a built-in function
    return ""
  return _digest(source.encode())


def _digest(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()[:16]


def _from_file(said: str, weight: float) -> Part:
  file, _, name = said.rpartition(":")
  if not file or not name:
    raise ValueError(
        f"reward={said!r} must be FILE.py:FUNCTION, as in 'reward.py:score'."
    )
  path = pathlib.Path(file).expanduser().resolve()
  if not path.is_file():
    there = [one.name for one in path.parent.glob("*.py")]
    raise ValueError(
        f"reward={said!r}: {path} is not a file.{_nearest(path.name, there)}"
    )
  content = path.read_bytes()
  try:
    module = reward_worker.load(str(path), content)
  except (Exception, SystemExit) as error:
    raise ValueError(
        f"reward={said!r}: {path} failed when it was loaded: "
        f"{type(error).__name__}: {error}"
    ) from error
  functions = [
      key for key, value in vars(module).items()
      if callable(value) and not key.startswith("__")
  ]
  if name not in functions:
    raise ValueError(
        f"reward={said!r}: {path} has no function {name!r}."
        f"{_nearest(name, functions)}"
    )
  function = getattr(module, name)
  _check_arguments(function, said)
  source = reward_pool.Source(str(path), content, name)
  return Part(name, function, float(weight), _digest(content), source)


def _nearest(name: str, there: Sequence[str]) -> str:
  near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
  if near:
    return f" Did you mean {near[0]!r}?"
  return f" There are {', '.join(sorted(there)[:10])}." if there else ""


def _check_arguments(function, name: str) -> None:
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some built-in functions have none
    return
  try:
    signature.bind("", {})
  except TypeError as error:
    raise ValueError(
        f"Reward {name!r} takes {signature}, and is called with the text of an "
        f"answer and the row: {error}."
    ) from error
