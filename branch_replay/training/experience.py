# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Experience: a prompt with its answers and their rewards, ready to learn from.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.data import group as group_lib
from branch_replay.engine import prefix
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import Schedule
from branch_replay.models import decoder
from branch_replay.rl import advantages
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import sample as sample_lib
from branch_replay.tasks import task as task_lib

Hold = Literal["nothing", "state", "activations"]
Truncated = Literal["score", "zero", "leave_out"]


@dataclasses.dataclass(frozen=True)
class Rollouts:
  """How answers are sampled, and what of them is kept for learning.

  Attributes:
    branches: G, answers to every prompt.
    max_tokens: T, the most tokens of an answer.
    law: temperature and truncation. Training needs a temperature above 0 and no
      top-k or top-p: the ratio of the policy to a truncated one is never 1.
    hold: what stays in memory from sampling to learning. "state" holds the
      captured state of every prompt; "activations" also holds the prefix's
      activations, so that the backward pass need not compute them again;
      "nothing" captures the prompt again for learning, so that there is only
      one state at a time, whatever the number of prompts.
    truncated: reward of an answer that reached `max_tokens` before it stopped.
      "score" asks the task (a verifiable task says 0), "zero" is 0, and
      "leave_out" takes the answer out of learning: it has no weight in the loss
      and the others of its group are not compared with it.
  """

  branches: int
  max_tokens: int
  law: law_lib.Law = law_lib.Law()
  hold: Hold = "state"
  truncated: Truncated = "score"

  def __post_init__(self):
    if self.branches < 1 or self.max_tokens < 1:
      raise ValueError(
          f"branches={self.branches} and max_tokens={self.max_tokens} must be "
          "at least 1."
      )
    for field, allowed in (("hold", Hold), ("truncated", Truncated)):
      value = getattr(self, field)
      if value not in get_args(allowed):
        raise ValueError(
            f"Unknown {field}={value!r}: use one of "
            f"{', '.join(get_args(allowed))}."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Experience:
  """One prompt, its answers, and their rewards.

  Attributes:
    id: id of the example.
    group: prompt and answers; the tails are [G, T].
    log_probs: f32[G, T], log-probs that the sampler recorded at its
      temperature.
    rewards: f32[G]; 0 for an answer that is left out.
    finished: bool[G], whether a stop id ended the answer; None for all.
    state: the captured state of the prompt, if it is held.
    counts: bool[G], whether the answer is learnt from; None for all.
    parts: f32[G] by name, numbers that the rewards were made of.
  """

  id: str
  group: group_lib.Group
  log_probs: np.ndarray
  rewards: np.ndarray
  finished: np.ndarray | None = None
  state: state_lib.PrefixState | None = None
  counts: np.ndarray | None = None
  parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if self.finished is None:
      object.__setattr__(self, "finished", np.ones(self.rewards.shape, bool))

  @property
  def counted(self) -> np.ndarray:
    """bool[G]: `counts`, with None replaced by all true."""
    if self.counts is None:
      return np.ones(self.rewards.shape, bool)
    return self.counts


def collect(
    model: decoder.Decoder,
    params,
    task: task_lib.Task,
    example: task_lib.Example,
    rollouts: Rollouts,
    *,
    key,
    version: int,
    schedule: Schedule = Schedule(),
    speculator=None,
) -> Experience:
  """Samples answers to one prompt and scores them.

  Args:
    model: the decoder.
    params: its parameters, on one device.
    task: the task that scores the answers; its stop ids end an answer.
    example: the prompt.
    rollouts: how answers are sampled.
    key: a PRNG key for this prompt and step.
    version: u32 that stands for these parameters.
    schedule: chunk size and policies of the capture.
    speculator: a `drafting.speculator.Speculator` that drafts tokens, or None.

  Returns:
    The experience.

  Raises:
    ValueError: a prompt that the model cannot run, or a reward that is not a
      finite number.
  """
  prompt = group_lib.Group.create(
      example.prompt_ids, [[]], config=model.config
  )
  state = prefix.capture(
      model, params, prompt, keep=rollouts.hold == "activations",
      schedule=schedule, version=version,
  )
  rollout = sample_lib.sample(
      model, params, example.prompt_ids, key=key, branches=rollouts.branches,
      max_tokens=rollouts.max_tokens, law=rollouts.law,
      stop_ids=task.stop_ids, state=state, version=version,
      **({} if speculator is None else speculator.options(rollouts.branches)),
  )
  if speculator is not None:
    speculator.saw(rollout)
  tokens, lengths, log_probs, finished = jax.device_get(
      (rollout.tokens, rollout.lengths, rollout.log_probs, rollout.finished)
  )
  # On the host, because learning may run on other devices.
  group = dataclasses.replace(
      prompt, tails=jnp.asarray(tokens), tail_lengths=jnp.asarray(lengths)
  )
  asked = finished | (rollouts.truncated == "score")
  scored = scored_rows(task, example, tokens, lengths, asked)
  # Learning reads them as float32; one too large becomes ∞ and is refused.
  with np.errstate(over="ignore"):
    rewards = np.asarray([one.value for one in scored], np.float32)
    parts_NG = np.asarray([one.parts for one in scored], np.float32).T
  rewards = advantages.check_rewards(rewards, (rollouts.branches,))
  return Experience(
      example.id, group, log_probs, rewards, finished,
      None if rollouts.hold == "nothing" else state,
      finished if rollouts.truncated == "leave_out" else None,
      dict(zip(task.part_names, parts_NG, strict=True)),
  )


def scored_rows(
    task: task_lib.Task, example: task_lib.Example, tokens_GT, lengths_G,
    asked_G,
) -> list[task_lib.Scored]:
  """What the answers of a rollout earned; 0 for those that are not asked for.
  """
  answers = [
      row[:length]
      for row, length, ask in zip(tokens_GT, lengths_G, asked_G, strict=True)
      if ask
  ]
  found = iter(task.rewards(example, answers))
  return [next(found) if ask else task.unscored for ask in asked_G]


def bare(one: Experience) -> Experience:
  """Returns the experience without its state, so that memory can be freed."""
  return dataclasses.replace(one, state=None)


def learnt(one: Experience) -> Experience:
  """Makes the answers that are left out of learning empty.

  An empty answer has no weight in a loss, and no other answer is compared with
  it.
  """
  if one.counted.all():
    return one
  lengths = jnp.where(jnp.asarray(one.counted), one.group.tail_lengths, 0)
  return dataclasses.replace(
      one, group=dataclasses.replace(one.group, tail_lengths=lengths)
  )


def recapture(
    model: decoder.Decoder,
    params,
    one: Experience,
    rollouts: Rollouts,
    *,
    version: int,
    schedule: Schedule = Schedule(),
) -> Experience:
  """The experience with its prompt's state captured under new parameters.

  Args:
    model: the decoder.
    params: the new parameters.
    one: the experience.
    rollouts: their `hold` says whether activations are kept.
    version: u32 that stands for the new parameters.
    schedule: chunk size and policies of the capture.
  """
  state = prefix.capture(
      model, params, one.group, keep=rollouts.hold == "activations",
      schedule=schedule, version=version,
  )
  return dataclasses.replace(one, state=state)


def given(
    model: decoder.Decoder, example: task_lib.Example, *, width: int
) -> Experience:
  """An experience whose only answer is the example's own.

  Args:
    model: the decoder.
    example: an example with an answer of at most `width` tokens.
    width: T, tokens that the answer is padded to, so that batches have one
      shape.

  Returns:
    The experience; its reward is 1.

  Raises:
    ValueError: the example has no answer, or a longer one.
  """
  check_answer(example)
  return _known(model, example, [example.answer_ids], [1.0], width)


def given_pair(
    model: decoder.Decoder, example: task_lib.Example, *, width: int
) -> Experience:
  """An experience of two answers: the example's own, and its rejected one.

  Args:
    model: the decoder.
    example: an example with both, of at most `width` tokens each.
    width: T, tokens that the answers are padded to.

  Returns:
    The experience; its rewards are 1 and 0.

  Raises:
    ValueError: the example lacks an answer, or one is longer.
  """
  check_pair(example)
  answers = [example.answer_ids, example.rejected_ids]
  return _known(model, example, answers, [1.0, 0.0], width)


def _known(model, example, answers, rewards, width) -> Experience:
  """An experience whose answers are known and not sampled."""
  longest = max(map(len, answers))
  if longest > width:
    raise ValueError(
        f"The answer of {example.id!r} has {longest} tokens and max_tokens="
        f"{width}: raise max_tokens."
    )
  group = group_lib.Group.create(
      example.prompt_ids, answers, config=model.config
  )
  tails = np.zeros((len(answers), width), np.int32)
  for row, answer in zip(tails, answers, strict=True):
    row[: len(answer)] = answer
  return Experience(
      example.id, dataclasses.replace(group, tails=jnp.asarray(tails)),
      np.zeros(tails.shape, np.float32), np.asarray(rewards, np.float32),
      np.ones(len(answers), bool),
  )


def check_pair(example: task_lib.Example) -> None:
  """Raises ValueError for an example without a pair of different answers."""
  lacks = [
      name for name in ("answer_ids", "rejected_ids")
      if getattr(example, name) is None
  ]
  if lacks:
    raise ValueError(
        f"Example {example.id!r} has no {' and no '.join(lacks)}: a phase of "
        "preference pairs needs both in every row, which are 'chosen' and "
        "'rejected' in a file."
    )
  if np.array_equal(example.answer_ids, example.rejected_ids):
    raise ValueError(
        f"The chosen and the rejected answer of {example.id!r} are the same: "
        "take the row out."
    )


def check_answer(example: task_lib.Example) -> None:
  """Raises ValueError for an example without `answer_ids`."""
  if example.answer_ids is None:
    raise ValueError(
        f"Example {example.id!r} has no answer_ids to learn from: a supervised "
        "phase needs them in every row. Reinforcement does not."
    )


def width(batch: Sequence[Experience]) -> int:
  """T for a batch: the longest answer, rounded up to a bucket."""
  longest = max(int(np.max(one.group.tail_lengths)) for one in batch)
  room = batch[0].group.tails.shape[1]
  return min(room, max(1, group_lib.bucket(longest)))


def trim(one: Experience, tokens: int) -> Experience:
  """Cuts the tails to `tokens`, which must be enough for every answer."""
  tails = one.group.tails[:, :tokens]
  return dataclasses.replace(
      one, group=dataclasses.replace(one.group, tails=tails),
      log_probs=one.log_probs[:, :tokens],
  )


def take(one: Experience, rows: np.ndarray, arrays: Any = ()):
  """Selects answers of an experience.

  Args:
    one: the experience.
    rows: i[G'], indices of the answers, in the wanted order.
    arrays: a pytree with leading axis G, of which the same rows are taken.

  Returns:
    The experience and the arrays with these answers only.
  """
  group = dataclasses.replace(
      one.group, tails=one.group.tails[rows],
      tail_lengths=one.group.tail_lengths[rows],
  )
  taken = dataclasses.replace(
      one, group=group, log_probs=one.log_probs[rows],
      rewards=one.rewards[rows], finished=one.finished[rows],
      counts=None if one.counts is None else one.counts[rows],
      parts={name: x[rows] for name, x in one.parts.items()},
  )
  return taken, jax.tree.map(lambda x: x[rows], arrays)
