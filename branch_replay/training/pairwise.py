# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The phase that learns from given pairs of answers: a better and a worse one.

Nothing is sampled and no reward is asked for. The two answers to a prompt are a
group of two branches, so its prefix is run once for both.
"""

from collections.abc import Callable
import dataclasses
import itertools
from typing import Any

import jax

from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import experience as experience_lib
from branch_replay.training import learner as learner_lib
from branch_replay.training import phases
from branch_replay.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Pairwise:
  """A phase that trains on pairs of answers that the examples come with.

  The reference policy is the parameters at the beginning of the phase.

  Attributes:
    name: name of the phase, for the log.
    task: the task; every example needs `answer_ids` and `rejected_ids`.
    learner: turns a batch into an update; its algorithm is
      `algorithms.Preference`, of DPO or IPO.
    steps: number of updates.
    prompts: pairs per update.
    max_tokens: T, the most tokens of an answer, its stop id included.
    seed: seed of the order of the examples.
    learning_rate: the learning rate as a function of the number of updates
      done, or None. It is only logged here; the optimizer has its own.

  Raises:
    ValueError: another algorithm, one branch at a time, which would divide
      pairs, or rows without a pair or longer than `max_tokens` or the model's
      positions allow.
  """

  name: str
  task: task_lib.Task
  learner: learner_lib.Learner
  steps: int = 100
  prompts: int = 8
  max_tokens: int = 512
  seed: int = 0
  learning_rate: Callable[[int], Any] | None = None
  speculator = None  # nothing is sampled

  def __post_init__(self):
    if self.prompts < 1:
      raise ValueError(f"prompts must be at least 1, not {self.prompts}.")
    if not isinstance(self.learner.algorithm, algorithms.Preference):
      raise ValueError(
          f"Phase {self.name!r} learns from pairs, by algorithms.Preference, "
          f"not by {type(self.learner.algorithm).__name__}."
      )
    if self.learner.schedule.branches_at_once == 1:
      raise ValueError("branches_at_once=1 would divide pairs: take 2 or None.")
    positions = self.learner.model.config.max_positions
    for row in phases.first_rows(self.task, "train"):
      experience_lib.check_pair(row)
      longest = max(row.answer_ids.size, row.rejected_ids.size)
      if self.max_tokens < longest:
        raise ValueError(
            f"max_tokens={self.max_tokens} of phase {self.name!r}: {row.id!r} "
            f"has an answer of {longest} tokens."
        )
      if row.prompt_ids.size + longest > positions:
        raise ValueError(
            f"{row.id!r}: a prompt of {row.prompt_ids.size} tokens and an "
            f"answer of {longest} exceed the model's max_positions={positions}."
        )

  def step(
      self, train_state: step_lib.TrainState, reference, position: int, key
  ) -> phases.StepOutcome:
    """Makes one update from `prompts` pairs.

    Args:
      train_state: the train state before the step; it is donated.
      reference: parameters of the reference policy.
      position: position of the next example.
      key: a PRNG key for this step.

    Returns:
      The train state after the step, and what to log.
    """
    examples = self.task.examples("train", seed=self.seed, start=position)
    with phases.Clock() as clock:
      batch = [
          experience_lib.given_pair(
              self.learner.model, example, width=self.max_tokens
          )
          for example in itertools.islice(examples, self.prompts)
      ]
      tokens = experience_lib.width(batch)
      batch = [experience_lib.trim(one, tokens) for one in batch]
      version = int(train_state.step)
      known = self.learner.know(
          train_state.params, batch, version=version, reference=reference
      )
      update = self.learner.update(
          train_state, batch, known, version=version, key=key
      )
      jax.block_until_ready(update.train_state)
    return phases.StepOutcome(
        update.train_state, examples.position,
        {
            "loss": float(update.loss), "grad_norm": float(update.grad_norm),
            **phases.rate(self.learning_rate, version),
            "skipped_updates": float(update.train_state.skipped > 0),
            "time/learn": clock.seconds, **phases.as_floats(update.report),
            "tokens_learnt": phases.tokens_of(batch),
        },
        tuple(one.id for one in batch),
    )
