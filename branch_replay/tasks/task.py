# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training loop sees of a task: prompts, targets and a reward."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import math
import numbers

import numpy as np

from branch_replay import group
from branch_replay.tasks import splits


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
  """One prompt.

  Attributes:
    id: stable: the same row has it in every process and on every machine.
    prompt_ids: i32[P + 1].
    answer_ids: i32[T], a right answer and its stop id, to be learnt from; None
      where none is known, which only supervised phases refuse.
    answer: what `answer_ids` say, without the stop id; None as well.
    details: what the reward and an analysis need to know; JSON values.
  """

  id: str
  prompt_ids: np.ndarray
  answer_ids: np.ndarray | None = None
  answer: str | None = None
  details: Mapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """Prompts, and a reward of what is answered to them.

  Attributes:
    name: for messages.
    vocab_size: ids below it are the task's.
    stop_ids: ids that end an answer, all of equal rank.
    score: (example, ids before the stop) -> any finite number, or a bool; see
      `reward`.
    rows: split -> its examples, each at its own index.
    verifiable: whether every answer is right, 1, or not, 0, and an answer that
      does not stop is not. Then `check` demands as much of the reward, and
      `score` is not asked about answers that do not stop.
  """

  name: str
  vocab_size: int
  stop_ids: tuple[int, ...]
  score: Callable[[Example, list[int]], float]
  rows: Mapping[str, Sequence[Example]]
  verifiable: bool = False

  def split(self, name: str) -> Sequence[Example]:
    """The examples of one split in their own order.

    Raises:
      ValueError: no such split, or nothing in it.
    """
    if name not in self.rows:
      raise unknown(f"split of task {self.name!r}", name, self.rows)
    if not len(self.rows[name]):
      raise ValueError(f"Task {self.name!r} has no examples in {name!r}.")
    return self.rows[name]

  def examples(self, split: str, *, seed: int, start: int = 0) -> "Examples":
    """All examples, without end, from position `start`; see `Examples`."""
    return Examples(self, split, seed=seed, position=start)

  def reward(self, example: Example, answer_ids) -> float:
    """The reward of sampled ids; ids are never turned to text and back.

    Of the answer, what precedes its first stop id is scored; of one that was
    cut off before it stopped, all of it, unless the task is verifiable: then
    such an answer earns 0. An answer with an id outside the vocabulary earns 0.

    Args:
      example: what was asked.
      answer_ids: i[N], as sampled, without padding.

    Returns:
      A finite number.

    Raises:
      ValueError: the task's `score` failed, or gave no finite number.
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
      value = value.item()  # of an array of one number
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

  Position n is example n mod N of epoch n div N, whose order is a permutation
  keyed by seed and epoch. So `position`, one integer, is all that a checkpoint
  keeps of it: `task.examples(split, seed=seed, start=position)` goes on with
  what `next` would have given.

  Attributes:
    position: of the example that `next` gives.
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

  Of the first example of every split, the rewards of its own answer, where one
  is known, and of an empty, an unfinished and a meaningless one must be finite
  numbers. Of a verifiable task the first must be 1 and the others 0.

  Raises:
    ValueError: the vocabulary lacks an id, or a reward that is none, or is
      another than it must be.
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
    reward = task.reward(example, ids)  # raises where it is no finite number
    if task.verifiable and reward != right:
      raise ValueError(
          f"{where} the reward of {what}, {ids}, is {reward}; it must be "
          f"{right}."
      )


def unknown(what: str, name: str, known) -> ValueError:
  """The error for a name that is not there, with the nearest that is."""
  near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
  hint = f" Did you mean {near[0]!r}?" if near else ""
  return ValueError(
      f"Unknown {what}: {name!r}.{hint} There are {', '.join(sorted(known))}."
  )
