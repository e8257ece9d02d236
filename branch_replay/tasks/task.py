# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What training reads of a task: prompts, right answers, and a reward."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import math
import numbers

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
  """

  id: str
  prompt_ids: np.ndarray
  answer_ids: np.ndarray | None = None
  answer: str | None = None
  details: Mapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """Prompts, and a reward for answers to them.

  Attributes:
    name: name for messages.
    vocab_size: ids below it are valid.
    stop_ids: ids that end an answer.
    score: function (example, ids before the stop id) -> a finite number or a
      bool; see `reward`.
    rows: examples by the name of their split.
    verifiable: whether every answer is either right, reward 1, or wrong, reward
      0, and answers that do not stop are wrong. Then `check` tests this, and
      `score` is not called for answers that do not stop.
  """

  name: str
  vocab_size: int
  stop_ids: tuple[int, ...]
  score: Callable[[Example, list[int]], float]
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
      ValueError: the task's `score` failed or returned no finite number.
    """
    ids = group.as_ids(answer_ids, "answer").tolist()
    ends = [at for at, id_ in enumerate(ids) if id_ in self.stop_ids]
    if not ends and self.verifiable:
      return 0.0
    ids = ids[: ends[0]] if ends else ids
    if not all(0 <= id_ < self.vocab_size for id_ in ids):
      return 0.0
    where = f"The reward of task {self.name!r}, example {example.id!r},"
    try:
      value = self.score(example, ids)
    except Exception as error:
      raise ValueError(
          f"{where} failed on the ids {ids}: {type(error).__name__}: {error}"
      ) from error
    if getattr(value, "ndim", None) == 0:
      value = value.item()  # an array of one number
    if not isinstance(value, numbers.Real):
      raise ValueError(
          f"{where} must be a number or a bool, not {value!r} of type "
          f"{type(value).__name__}, for the ids {ids}."
      )
    if not math.isfinite(value):
      raise ValueError(f"{where} is {value} for the ids {ids}.")
    return float(value)


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
  others 0.

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
  for what in ("prompt_ids", "answer_ids") if known else ("prompt_ids",):
    ids = group.as_ids(getattr(example, what), what)
    if not ids.size or ids.min() < 0 or ids.max() >= task.vocab_size:
      raise ValueError(
          f"{where} {what} must be ids below {task.vocab_size}, at least one, "
          f"not {ids}."
      )
  other = next(x for x in range(task.vocab_size) if x not in task.stop_ids)
  stop = [task.stop_ids[0]]
  answers = []
  if known:
    own = np.asarray(example.answer_ids).tolist()
    if own[-1] not in task.stop_ids or set(own[:-1]) & set(task.stop_ids):
      raise ValueError(
          f"{where} answer_ids {own} must end with a stop id, one of "
          f"{task.stop_ids}, and have no other."
      )
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


def unknown(what: str, name: str, known) -> ValueError:
  """A ValueError for an unknown name, which suggests the nearest known one."""
  near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  return ValueError(
      f"Unknown {what}: {name!r}.{hint} There are {', '.join(sorted(known))}."
  )
