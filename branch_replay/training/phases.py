# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The two kinds of phase of a training run: supervised and reinforcement.

A phase has a method `step`, which takes the train state and makes one step:
one update, or one batch of rollouts and the updates from it.
"""

from collections.abc import Callable
import dataclasses
import itertools
import time
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from branch_replay.devices.layout import Layout
from branch_replay.engine.schedule import Schedule
from branch_replay.rl import advantages
from branch_replay.rl import metrics
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import experience as experience_lib
from branch_replay.training import learner as learner_lib
from branch_replay.training import step as step_lib
from branch_replay.training.drafting import speculator as speculator_lib

_LOOKED_AT = 256  # rows that are measured before training
# Folded into keys, so that different uses draw different numbers.
_SAMPLING, _CHUNKS, _EVALUATION = 2**31, 2**31 + 1, 2**31 + 2


class StepOutcome(NamedTuple):
  """What one step of a phase returns.

  Attributes:
    train_state: the train state after the step.
    position: position of the next example in the phase's stream of examples.
    scalars: numbers to log, by name.
    examples: ids of the examples the step learnt from.
    sampled: all that was sampled, without states.
  """

  train_state: step_lib.TrainState
  position: int
  scalars: dict[str, float]
  examples: tuple[str, ...] = ()
  sampled: tuple[experience_lib.Experience, ...] = ()


@dataclasses.dataclass(frozen=True)
class Supervised:
  """A phase that trains on the answers that the examples come with.

  Attributes:
    name: name of the phase, for the log.
    task: the task; every example needs `answer_ids`.
    learner: turns a batch into an update; its algorithm is
      `algorithms.MaximumLikelihood`.
    steps: number of updates.
    prompts: examples per update.
    max_tokens: T, tokens that answers are padded to; at least the longest
      answer.
    seed: seed of the order of the examples.
    learning_rate: the learning rate as a function of the number of updates
      done, or None. It is only logged here; the optimizer has its own.
  """

  name: str
  task: task_lib.Task
  learner: learner_lib.Learner
  steps: int = 100
  prompts: int = 8
  max_tokens: int = 128
  seed: int = 0
  learning_rate: Callable[[int], Any] | None = None
  speculator = None  # nothing is sampled

  def __post_init__(self):
    if self.prompts < 1:
      raise ValueError(f"prompts must be at least 1, not {self.prompts}.")
    looked_at = first_rows(self.task, "train")
    for row in looked_at:
      experience_lib.check_answer(row)
    longest = max(len(row.answer_ids) for row in looked_at)
    if self.max_tokens < longest:
      raise ValueError(
          f"max_tokens={self.max_tokens} of phase {self.name!r}: there are "
          f"answers of {longest} tokens."
      )

  def step(self, train_state, reference, position: int, key) -> StepOutcome:
    """Makes one update; see `Reinforce.step`."""
    del reference
    examples = self.task.examples("train", seed=self.seed, start=position)
    with Clock() as clock:
      batch = [
          experience_lib.given(
              self.learner.model, example, width=self.max_tokens
          )
          for example in itertools.islice(examples, self.prompts)
      ]
      version = int(train_state.step)
      known = [algorithms.Known()] * len(batch)
      update = self.learner.update(
          train_state, batch, known, version=version, key=key
      )
      jax.block_until_ready(update.train_state)
    return StepOutcome(
        update.train_state, examples.position,
        {
            "loss": float(update.loss), "grad_norm": float(update.grad_norm),
            **rate(self.learning_rate, version),
            "skipped_updates": float(update.train_state.skipped > 0),
            "time/learn": clock.seconds, **as_floats(update.report),
            "tokens_learnt": tokens_of(batch),
        },
        tuple(one.id for one in batch),
    )


@dataclasses.dataclass(frozen=True)
class Reinforce:
  """A phase that samples answers, scores them, and learns from the scores.

  One step samples a batch of prompts and passes over it `epochs` times, with
  `updates` updates in each pass.

  Attributes:
    name: name of the phase, for the log.
    task: prompts, and the reward of an answer.
    learner: turns a batch into an update.
    rollouts: how answers are sampled.
    steps: number of steps, each of one batch.
    prompts: prompts in a batch.
    epochs: passes over a batch.
    updates: updates in each pass; divides `prompts`.
    capture_every: updates that one capture of a prompt's state serves. With 1
      each update captures the states under its own parameters, which is exact.
      More replays states of older parameters, which is an approximation.
    most_prompts: at most this many prompts are sampled until `prompts` of them
      have answers that differ in reward, as DAPO does. None takes the first
      `prompts`.
    seed: seed of the order of the examples.
    learning_rate: the learning rate as a function of the number of updates
      done, or None. It is only logged here; the optimizer has its own.
    speculator: drafts tokens for the rollouts, which makes them faster or
      slower and changes no token; None for no drafts.

  Raises:
    ValueError: settings that contradict each other, see `check_together`.
  """

  name: str
  task: task_lib.Task
  learner: learner_lib.Learner
  rollouts: experience_lib.Rollouts
  steps: int = 100
  prompts: int = 8
  epochs: int = 1
  updates: int = 1
  capture_every: int = 1
  most_prompts: int | None = None
  seed: int = 0
  learning_rate: Callable[[int], Any] | None = None
  speculator: speculator_lib.Speculator | None = None

  def __post_init__(self):
    for field in ("prompts", "epochs", "updates", "capture_every"):
      if getattr(self, field) < 1:
        raise ValueError(
            f"{field} must be at least 1, not {getattr(self, field)}."
        )
    if self.prompts % self.updates:
      raise ValueError(
          f"prompts={self.prompts} do not divide into updates={self.updates}."
      )
    if self.most_prompts is not None and self.most_prompts < self.prompts:
      raise ValueError(
          f"most_prompts={self.most_prompts} is less than prompts="
          f"{self.prompts}."
      )
    check_together(self)

  def step(self, train_state, reference, position: int, key) -> StepOutcome:
    """Samples a batch and makes epochs · updates updates from it.

    Args:
      train_state: the train state before the step; it is donated.
      reference: parameters of the reference policy, or None.
      position: position of the next example.
      key: a PRNG key for this step.

    Returns:
      The train state after the step, and what to log.
    """
    version = int(train_state.step)
    params = on_one_device(train_state.params, self.learner)
    with Clock() as sampling:
      batch, drawn, position = self._sample(
          params, position, jax.random.fold_in(key, _SAMPLING), version
      )
    drafting = {}
    if self.speculator is not None:
      with Clock() as studying:
        drafting = self.speculator.study(params, batch, version=version)
      drafting["time/draft"] = studying.seconds
    with Clock() as learning:
      batch = [experience_lib.learnt(one) for one in batch]
      tokens = experience_lib.width(batch)
      batch = [experience_lib.trim(one, tokens) for one in batch]
      known = self.learner.know(
          train_state.params, batch, version=version, reference=reference
      )
      size, updates, skipped = self.prompts // self.updates, [], []
      for number in range(self.epochs * self.updates):
        fresh = number % self.capture_every == 0
        if number and fresh:
          batch = [experience_lib.bare(one) for one in batch]
          if self.capture_every > 1:
            for place in self._replayed(number, size):
              batch[place] = self._captured(train_state, batch[place])
        part = number % self.updates
        here = slice(part * size, (part + 1) * size)
        update = self.learner.update(
            train_state, batch[here], known[here],
            version=int(train_state.step),  # unchanged by a skipped update
            key=jax.random.fold_in(jax.random.fold_in(key, _CHUNKS), number),
            stale=not fresh,
        )
        train_state = update.train_state
        skipped.append(train_state.skipped > 0)  # before it is donated
        if self.capture_every == 1:  # each state is used once
          batch[here] = [experience_lib.bare(one) for one in batch[here]]
        updates.append(update)
      jax.block_until_ready(train_state)
    return StepOutcome(
        train_state, position,
        {
            **self._seen(drawn),
            **drafting,
            **as_floats(updates[-1].report),
            "loss": float(updates[0].loss),
            "grad_norm": float(np.mean([u.grad_norm for u in updates])),
            **mismatch(updates[0].report),
            **rate(self.learning_rate, version),
            "skipped_updates": float(np.sum(jax.device_get(skipped))),
            "time/rollout": sampling.seconds, "time/learn": learning.seconds,
            "tokens_learnt": self.epochs * tokens_of(batch),
        },
        tuple(one.id for one in batch),
        tuple(drawn),
    )

  def _sample(self, params, position, key, version):
    """Samples a batch.

    Returns:
      The experiences to learn from, all experiences that were sampled, without
      their states, and the position of the next example.
    """
    examples = self.task.examples("train", seed=self.seed, start=position)
    schedule = dataclasses.replace(self.learner.schedule, layout=Layout())
    batch, drawn = [], []
    for number, example in enumerate(examples):
      one = experience_lib.collect(
          self.learner.model, params, self.task, example, self.rollouts,
          key=jax.random.fold_in(key, number), version=version,
          schedule=schedule, speculator=self.speculator,
      )
      drawn.append(experience_lib.bare(one))
      left = (self.most_prompts or self.prompts) - len(drawn)
      alive = not advantages.is_dead(one.rewards, one.counted)
      if alive or self.prompts - len(batch) > left:
        batch.append(one)
      if len(batch) == self.prompts:
        return batch, drawn, examples.position

  def _replayed(self, number: int, size: int) -> list[int]:
    """Places in the batch that are read until the next capture."""
    left = self.epochs * self.updates - number
    parts = {
        (number + later) % self.updates
        for later in range(min(self.capture_every, left))
    }
    return [part * size + at for part in sorted(parts) for at in range(size)]

  def _captured(self, train_state, one):
    return experience_lib.recapture(
        self.learner.model, train_state.params, one, self.rollouts,
        version=int(train_state.step), schedule=self.learner.schedule,
    )

  def _seen(self, drawn) -> dict[str, float]:
    """Scalars of everything that was sampled, learnt from or not."""
    rewards = np.stack([one.rewards for one in drawn])
    counted = np.stack([one.counted for one in drawn])
    lengths = np.stack([one.group.tail_lengths for one in drawn])
    log_probs = np.stack([one.log_probs for one in drawn])
    of_rewards = as_floats(metrics.rewards(rewards, counted))
    return {
        "reward/mean": of_rewards["reward_mean"],
        "reward/spread": of_rewards["reward_spread"],
        **reward_parts(drawn),
        # Groups of which no answer counts are included.
        "dead_groups": float(np.mean(advantages.is_dead(rewards, counted))),
        **as_floats(metrics.answers(
            lengths, np.stack([one.finished for one in drawn])
        )),
        # Mean −log p of sampled tokens estimates their entropy.
        "entropy": float(-log_probs.sum() / max(1, lengths.sum())),
        "prompts_drawn": float(len(drawn)),
        "tokens_sampled": float(lengths.sum()),
    }


Phase = Supervised | Reinforce


class Clock:
  """Context manager that measures wall time, in `seconds`."""

  def __enter__(self):
    self._start = time.monotonic()
    return self

  def __exit__(self, *_):
    self.seconds = time.monotonic() - self._start


def mismatch(report: dict) -> dict[str, float]:
  """Selects the entries of a report that compare sampler and trainer.

  They mean something only before the first update of a step.
  """
  return as_floats({
      name: value for name, value in report.items()
      if name.startswith("mismatch")
  })


def rate(learning_rate, version: int) -> dict[str, float]:
  """The learning rate of an update, to be logged, if it is known."""
  if learning_rate is None:
    return {}
  return {"learning_rate": float(learning_rate(version))}


def reward_parts(drawn) -> dict[str, float]:
  """The mean of each number that rewards were made of, as reward/<name>."""
  counted = np.stack([one.counted for one in drawn])
  found = {}
  for name in drawn[0].parts:
    values = np.stack([one.parts[name] for one in drawn])
    found[f"reward/{name}"] = metrics.mean(values, counted)
  return as_floats(found)


def tokens_of(batch) -> float:
  """Tokens of all answers of a batch."""
  return float(sum(np.sum(one.group.tail_lengths) for one in batch))


def as_floats(scalars: dict) -> dict[str, float]:
  return {name: float(value) for name, value in scalars.items()}


def on_one_device(params, learner: learner_lib.Learner):
  """Returns the parameters on one device, where sampling runs."""
  if learner.schedule.layout.devices == 1:
    return params
  return jax.device_put(params, jax.devices()[0])


def evaluation_key(seed: int) -> jax.Array:
  """The key of an evaluation's noise; prompt i has `fold_in` of it with i."""
  return jax.random.fold_in(jax.random.key(seed), _EVALUATION)


def evaluate(
    model, params, task, rollouts, *, split: str, prompts: int, seed: int,
    schedule: Schedule = Schedule(),
) -> float:
  """Mean reward of sampled answers to the first prompts of a split.

  Args:
    model: the decoder.
    params: its parameters, on one device.
    task: prompts, and the reward of an answer.
    rollouts: how answers are sampled.
    split: name of the split.
    prompts: number of prompts.
    seed: seed of the sampling noise, which is the same in every evaluation.
    schedule: chunk size and policies of the captures; its layout is ignored.

  Returns:
    The mean over prompts and answers.
  """
  key = evaluation_key(seed)
  rewards = []
  for number in range(prompts):
    one = experience_lib.collect(
        model, params, task, task.split(split)[number], rollouts,
        key=jax.random.fold_in(key, number), version=0,
        schedule=dataclasses.replace(schedule, layout=Layout()),
    )
    rewards.append(one.rewards.mean())
  return float(np.mean(rewards))


def first_rows(task: task_lib.Task, split: str) -> list[task_lib.Example]:
  """The rows of a split that are looked at before training."""
  rows = task.split(split)
  return [rows[at] for at in range(min(_LOOKED_AT, len(rows)))]


def check_room(config, task, split: str, rollouts) -> None:
  """Raises ValueError if a prompt and its answer exceed the model's positions.

  Only the first 256 prompts of the split are looked at.
  """
  prompt = max(row.prompt_ids.size for row in first_rows(task, split))
  if prompt + rollouts.max_tokens > config.max_positions:
    raise ValueError(
        f"A prompt of {prompt} tokens and answers of max_tokens="
        f"{rollouts.max_tokens} exceed the model's max_positions="
        f"{config.max_positions}."
    )


def check_together(phase: Reinforce):
  """Raises ValueError for settings of a phase that contradict each other.

  Examples: a group-relative advantage with one branch per prompt, or an answer
  sampled at another temperature than the loss scores it at.
  """
  task_lib.check_scored(phase.task)
  algorithm, rollouts = phase.learner.algorithm, phase.rollouts
  branches = rollouts.branches
  grouped = isinstance(algorithm, algorithms.PolicyGradient)
  if grouped and branches < 2:
    raise ValueError(
        f"branches={branches}: advantage={algorithm.advantage!r} compares the "
        "answers of a group and is 0 for a group of one. Take at least 2, or "
        "PPO, whose value head is the baseline."
    )
  if isinstance(algorithm, algorithms.Preference) and branches % 2:
    raise ValueError(f"branches={branches}: pairs need an even number.")
  law = rollouts.law
  if not law.temperature or law.top_k is not None or law.top_p not in (None, 1):
    raise ValueError(
        f"{law}: training needs a temperature above 0 and no truncation, or "
        "the ratio to the sampling policy is not 1 where nothing has changed."
    )
  temperature = getattr(algorithm, "temperature", law.temperature)
  if temperature != law.temperature:
    raise ValueError(
        f"Answers are sampled at temperature {law.temperature} and scored at "
        f"{temperature}: both must be the same."
    )
  if phase.learner.schedule.layout.devices > 1 and rollouts.hold != "nothing":
    raise ValueError(
        f"hold={rollouts.hold!r}: sampling runs on one device and its states "
        "stay there; on several devices take hold='nothing'."
    )
  if phase.speculator is not None and phase.speculator.reads_states and (
      rollouts.hold == "nothing"
  ):
    raise ValueError(
        "A learned drafter reads the states that sampling left: it needs "
        "hold='state' or 'activations'."
    )
  if phase.capture_every > 1 and (
      rollouts.hold == "nothing" or phase.learner.prefix_gradient == "full"
  ):
    raise ValueError(
        f"capture_every={phase.capture_every} replays held states: it needs "
        "hold='state' or 'activations', and a prefix_gradient that is not "
        "'full'."
    )
  at_once = phase.learner.schedule.branches_at_once
  pairs = isinstance(algorithm, algorithms.Preference)
  if pairs and at_once is not None and at_once < branches and at_once % 2:
    raise ValueError(f"branches_at_once={at_once} would divide pairs.")
  check_room(phase.learner.model.config, phase.task, "train", rollouts)
