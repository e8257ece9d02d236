# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What training reads of a task: prompts, right answers, and a reward."""

import abc
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import math
import numbers
from typing import NamedTuple

import numpy as np

from branch_replay.data import group
from branch_replay.tasks import splits


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """One prompt.

  Attributes:
    id: name of the row, the same in every process and on every machine.
    prompt_ids: i32[P + 1].
    answer_ids: i32[T], a right answer with its stop id, to learn from; None if
      none is known, which only supervised phases refuse.
    answer: text of `answer_ids` without the stop id, or None.
    details: whatever the reward or an analysis needs, as JSON values.
    rejected_ids: i32[T], an answer with its stop id that is worse than
      `answer_ids`, for phases that learn from such pairs; None if there is
      none.
  """

  id: str
  prompt_ids: np.ndarray
  answer_ids: np.ndarray | None = None
  answer: str | None = None
  details: Mapping = dataclasses.field(default_factory=dict)
  rejected_ids: np.ndarray | None = None


class Scored(NamedTuple):
  """What one answer earned.

  Attributes:
    value: the reward, which is learnt from.
    parts: numbers that the reward was made of, to be logged; one for each of
      the task's `part_names`.
  """

  value: float
  parts: tuple[float, ...] = ()


class Scorer(abc.ABC):
  """A reward that scores several answers at once, and may have parts.

  Attributes:
    names: names of the parts; () for none.
  """

  names: tuple[str, ...] = ()

  @abc.abstractmethod
  def scores(
      self, example: Example, answers: Sequence[list[int]]
  ) -> list[Scored]:
    """Scores answers to one prompt, each as ids before the stop id.

    Raises:
      ValueError: an answer could not be scored; the message names the example
        and the answer.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """Prompts, and a reward for answers to them.

  Attributes:
    name: name for messages.
    vocab_size: ids below it are valid.
    stop_ids: ids that end an answer.
    score: function (example, ids before the stop id) -> a finite number or a
      bool, see `reward`; or a `Scorer`. None if no answer can be scored, which
      phases and evaluations that sample answers refuse.
    rows: examples by the name of their split.
    verifiable: whether every answer is either right, reward 1, or wrong, reward
      0, and answers that do not stop are wrong. Then `check` tests this, and
      `score` is not called for answers that do not stop.
  """

  name: str
  vocab_size: int
  stop_ids: tuple[int, ...]
  score: Callable[[Example, list[int]], float] | Scorer | None
  rows: Mapping[str, Sequence[Example]]
  verifiable: bool = False

  def split(self, name: str) -> Sequence[Example]:
    """The examples of one split, in order.

    Raises:
      ValueError: no such split, or it is empty.
    """
    if name not in self.rows:
      raise unknown(f"split of task {self.name!r}", name, self.rows)
    if not len(self.rows[name]):
      raise ValueError(f"Task {self.name!r} has no examples in {name!r}.")
    return self.rows[name]

  def examples(self, split: str, *, seed: int, start: int = 0) -> "Examples":
    """An endless iterator over a split, from position `start`; see `Examples`.
    """
    return Examples(self, split, seed=seed, position=start)

  @property
  def part_names(self) -> tuple[str, ...]:
    """Names of the numbers that a reward is made of; () if it is only one."""
    return self.score.names if isinstance(self.score, Scorer) else ()

  @property
  def unscored(self) -> Scored:
    """What an answer earns that is 0 without being scored."""
    return Scored(0.0, (0.0,) * len(self.part_names))

  def rewards(self, example: Example, answers: Sequence) -> list[Scored]:
    """The rewards of several answers to one prompt; see `reward`.

    A `Scorer` is given all answers at once and may score them side by side.
    """
    check_scored(self)
    scored = [self._scored(answer) for answer in answers]
    asked = [ids for ids in scored if ids is not None]
    where = f"The reward of task {self.name!r}, example {example.id!r},"
    if isinstance(self.score, Scorer):
      found = list(self.score.scores(example, asked)) if asked else []
    else:
      found = [Scored(self._value(example, ids, where)) for ids in asked]
    found = iter([
        Scored(as_number(one.value, where, f"the ids {ids}"), one.parts)
        for one, ids in zip(found, asked, strict=True)
    ])
    return [self.unscored if ids is None else next(found) for ids in scored]

  def reward(self, example: Example, answer_ids) -> float:
    """The reward of sampled ids, which are never turned to text and back.

    Only ids before the first stop id are scored. An answer without a stop id is
    scored as a whole, or has reward 0 if the task is verifiable. An answer with
    an id outside the vocabulary has reward 0.

    Args:
      example: the prompt that was answered.
      answer_ids: i[N], as sampled, without padding.

    Returns:
      A finite number.

    Raises:
      ValueError: the task's `score` failed or returned no finite number, or
        there is none.
    """
    return self.rewards(example, [answer_ids])[0].value

  def _scored(self, answer_ids) -> list[int] | None:
    """The ids that are scored; None for an answer that is 0 unseen."""
    ids = group.as_ids(answer_ids, "answer").tolist()
    ends = [at for at, id_ in enumerate(ids) if id_ in self.stop_ids]
    if not ends and self.verifiable:
      return None
    ids = ids[: ends[0]] if ends else ids
    return ids if all(0 <= id_ < self.vocab_size for id_ in ids) else None

  def _value(self, example, ids, where):
    try:
      return self.score(example, ids)
    except Exception as error:
      raise ValueError(
          f"{where} failed on the ids {ids}: {type(error).__name__}: {error}"
      ) from error


class Examples:
  """An endless iterator over a split, reshuffled every epoch.

  Position n is element n mod N of epoch n div N, whose order is a permutation
  that depends on seed and epoch. So the integer `position` is all a checkpoint
  has to save: `task.examples(split, seed=seed, start=position)` continues with
  what `next` would have returned.

  Attributes:
    position: position of the example that `next` will return.
  """

  def __init__(self, task: Task, split: str, *, seed: int, position: int):
    for what, value in (("seed", seed), ("start", position)):
      if value < 0:
        raise ValueError(f"{what}={value} must not be negative.")
    self._rows = task.split(split)
    self._seed = seed
    self._epoch = None
    self.position = position

  def __iter__(self) -> "Examples":
    return self

  def __next__(self) -> Example:
    epoch, at = divmod(self.position, len(self._rows))
    if epoch != self._epoch:
      self._epoch = epoch
      self._order = splits.permutation(self._seed, epoch, len(self._rows))
    self.position += 1
    return self._rows[int(self._order[at])]


def check(task: Task) -> None:
  """Runs the reward on known answers, before anything is spent on a model.

  For the first example of every split it scores the example's own answer, if
  there is one, and an empty, an unfinished and a meaningless answer. All
  rewards must be finite. In a verifiable task the first must be 1 and the
  others 0. A task without a reward has only its ids checked.

  Raises:
    ValueError: a stop id is outside the vocabulary, or a reward is not what it
      must be.
  """
  outside = [id_ for id_ in task.stop_ids if not 0 <= id_ < task.vocab_size]
  if not task.stop_ids or outside:
    raise ValueError(
        f"Task {task.name!r} needs stop ids inside its vocabulary of "
        f"{task.vocab_size}, not {task.stop_ids}."
    )
  for split in task.rows:
    check_example(task, task.split(split)[0])


def check_example(task: Task, example: Example) -> None:
  """`check` for one example; raises ValueError."""
  where = f"Task {task.name!r}, example {example.id!r}:"
  known = example.answer_ids is not None
  there = [
      what for what in ("prompt_ids", "answer_ids", "rejected_ids")
      if what == "prompt_ids" or getattr(example, what) is not None
  ]
  for what in there:
    ids = group.as_ids(getattr(example, what), what)
    if not ids.size or ids.min() < 0 or ids.max() >= task.vocab_size:
      raise ValueError(
          f"{where} {what} must be ids below {task.vocab_size}, at least one, "
          f"not {ids}."
      )
  for what in there[1:]:
    own = np.asarray(getattr(example, what)).tolist()
    if own[-1] not in task.stop_ids or set(own[:-1]) & set(task.stop_ids):
      raise ValueError(
          f"{where} {what} {own} must end with a stop id, one of "
          f"{task.stop_ids}, and have no other."
      )
  if task.score is None:
    return
  other = next(x for x in range(task.vocab_size) if x not in task.stop_ids)
  stop = [task.stop_ids[0]]
  answers = []
  if known:
    own = np.asarray(example.answer_ids).tolist()
    stop = own[-1:]
    answers = [
        ("its own answer", own, 1.0),
        ("an answer that does not stop", own[:-1], 0.0),
    ]
  answers += [
      ("an answer of no tokens", [], 0.0),
      ("an empty answer", stop, 0.0),
      ("a meaningless answer", [other] * 3 + stop, 0.0),
  ]
  for what, ids, right in answers:
    reward = task.reward(example, ids)  # raises if it is not finite
    if task.verifiable and reward != right:
      raise ValueError(
          f"{where} the reward of {what}, {ids}, is {reward}; it must be "
          f"{right}."
      )


def check_scored(task: Task) -> None:
  """Raises ValueError for a task without a reward."""
  if task.score is None:
    raise ValueError(
        f"Task {task.name!r} has no reward, and sampled answers need one. Of a "
        "task of files, name the function: reward='FILE.py:FUNCTION'."
    )


def as_number(value, what: str, of: str) -> float:
  """A reward as a float.

  Args:
    value: what a reward returned: a finite number, a bool, or an array of one.
    what: what the value is, to begin the message with.
    of: what was scored, to end the message with.

  Raises:
    ValueError: no number, or none that is finite.
  """
  if getattr(value, "ndim", None) == 0:
    value = value.item()  # an array of one number
  if not isinstance(value, numbers.Real):
    raise ValueError(
        f"{what} must be a number or a bool, not {value!r} of type "
        f"{type(value).__name__}, for {of}."
    )
  try:
    number = float(value)
  except OverflowError:  # an int with hundreds of digits
    number = math.inf
  if not math.isfinite(number):
    raise ValueError(f"{what} is {number} for {of}.")
  return number


def unknown(what: str, name: str, known) -> ValueError:
  """A ValueError for an unknown name, which suggests the nearest known one."""
  near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  return ValueError(
      f"Unknown {what}: {name!r}.{hint} There are {', '.join(sorted(known))}."
  )
