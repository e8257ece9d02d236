# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A run: phases one after the other, with evaluation, log and checkpoints.

Every random number is a function of the seed and the step, and a checkpoint
holds all that a step depends on. A run that was stopped, by a signal or by
force, goes on from its latest checkpoint and ends with the same parameters, bit
for bit, as one that was not. The checkpoint says what the run was; one that has
become another run is refused.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import signal
import threading
from typing import Any
import warnings

import jax
import tqdm

from branch_replay.models import decoder
from branch_replay.tasks import task as task_lib
from branch_replay.training import actor_critic
from branch_replay.training import alarms
from branch_replay.training import algorithms
from branch_replay.training import checkpoints as checkpoints_lib
from branch_replay.training import experience
from branch_replay.training import identity
from branch_replay.training import metrics
from branch_replay.training import phases as phases_lib
from branch_replay.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class HeldOutEvaluation:
  """Held-out prompts, asked now and then.

  Attributes:
    task: prompts and rewards.
    rollouts: how they are answered.
    split: of the task.
    prompts: how many of the split's first ones.
    every: steps from one evaluation to the next; the last step of a phase is
      always evaluated, and the parameters before the first step are too.
  """

  task: task_lib.Task
  rollouts: experience.Rollouts
  split: str
  prompts: int
  every: int

  def __post_init__(self):
    there = len(self.task.split(self.split))
    if not 1 <= self.prompts <= there or self.every < 1:
      raise ValueError(
          f"prompts={self.prompts} of {there} in {self.split!r}, every="
          f"{self.every}: at least 1 of each, and no more than there are."
      )
    if self.rollouts.truncated == "leave_out":
      raise ValueError(
          "truncated='leave_out' is for learning: held-out answers that are "
          "cut off must count. Evaluate with 'score' or 'zero'."
      )


@dataclasses.dataclass(frozen=True)
class TrainingRun:
  """What is trained, how, and for how long.

  Attributes:
    model: the decoder.
    phases: in their order; all train the same parameters.
    evaluation: of held-out prompts.
    seed: of everything that is drawn.
    checkpoint_every: steps from one checkpoint to the next; the last step of
      the run is always saved.
    most_skipped: updates that may be skipped in a row because loss or gradient
      is not finite; after as many the run saves its last good parameters and
      stops with an error.
    warn_after: steps in a row without anything to learn from, or without an
      answer that stopped, after which the run warns; 0 for never.
  """

  model: decoder.Decoder
  phases: Sequence[phases_lib.Phase]
  evaluation: HeldOutEvaluation
  seed: int
  checkpoint_every: int
  most_skipped: int = 5
  warn_after: int = 10

  def __post_init__(self):
    if not self.phases or any(phase.steps < 1 for phase in self.phases):
      raise ValueError("A run needs phases of at least one step each.")
    phases_lib.check_room(
        self.model.config, self.evaluation.task, self.evaluation.split,
        self.evaluation.rollouts,
    )
    for field, least in (
        ("checkpoint_every", 1), ("most_skipped", 1), ("warn_after", 0),
    ):
      if getattr(self, field) < least:
        raise ValueError(
            f"{field} must be at least {least}, not {getattr(self, field)}."
        )

  @property
  def steps(self) -> int:
    """Of all phases."""
    return sum(phase.steps for phase in self.phases)

  def place(self, step: int) -> tuple[int, int]:
    """The number of the phase after `step` steps, and the steps done in it.

    Of a run that is complete, its last phase.
    """
    for number, phase in enumerate(self.phases):
      if step < phase.steps:
        return number, step
      step -= phase.steps
    return len(self.phases) - 1, self.phases[-1].steps


def train(
    run: TrainingRun, params, workdir: pathlib.Path, *,
    may_differ: Sequence[str] = (),
) -> Any:
  """Runs to the end, from where an earlier run in the same folder stopped.

  A run that is gone on with must be what it was when it was saved, see
  `identity`. What may change: devices, `hold`, drafting, how often there is an
  evaluation, a checkpoint or a warning, the steps of the phase that it is in,
  and phases that are added at the end.

  Args:
    run: see `TrainingRun`.
    params: before the first step, on one device; read if there is no checkpoint
      yet, and left as they are.
    workdir: of metrics.jsonl, TensorBoard's files and checkpoints.
    may_differ: further parts of a run that may be others than they were, by
      their paths as an error names them, as in "phases[0].learner.optimizer".

  Returns:
    The trained parameters, without a value head; None if the run was stopped
    by a signal, after it has saved where it is.

  Raises:
    ValueError: checkpoints of another run, all of whose differences are named;
      a damaged line of metrics.jsonl; parameters that are not finite, or as
      many updates in a row that would have made them so as `run` allows.
  """
  workdir = pathlib.Path(workdir)
  about = identity.of_run(run)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
        checkpoints_lib.Checkpoints(workdir / "checkpoints")
    )
    stop = stack.enter_context(_Signals())
    for one in run.phases:
      if one.speculator is not None:
        where = workdir / "drafter" / one.name
        stack.enter_context(one.speculator.at(where, params))
    train_state, reference, progress = _begin(
        run, params, checkpoints, about, may_differ
    )
    streaks = alarms.Streaks()
    # Of a run that begins, the row of step 0 is written again.
    log = stack.enter_context(
        metrics.Log(workdir, start=progress.step or -1)
    )
    bar = stack.enter_context(
        tqdm.tqdm(total=run.steps, initial=progress.step, unit="step")
    )
    if not progress.step:
      reward = _evaluate(run, train_state, run.phases[0])
      log.write(0, "before", {"eval/reward": reward})
    while progress.step < run.steps and not stop.requested:
      number, place = run.place(progress.step)
      phase = run.phases[number]
      bar.set_description(phase.name)
      if place == 0 and progress.step:
        train_state, reference = _enter(
            run, number, train_state.params, checkpoints
        )
      outcome = phase.step(
          train_state, reference, progress.position if place else 0,
          jax.random.fold_in(jax.random.key(run.seed), progress.step),
      )
      train_state = outcome.train_state
      done = progress.step + 1
      progress = checkpoints_lib.Progress(done, outcome.position, run.seed)
      scalars = dict(outcome.scalars)
      skipped = int(train_state.skipped)
      if skipped >= run.most_skipped:
        log.write(done, phase.name, scalars)
        _save_drafters(run)
        checkpoints.save(train_state, progress, about)
        raise ValueError(_not_finite(run, phase, done, skipped, outcome))
      streaks, found = alarms.observe(
          streaks, scalars, after=run.warn_after, compares=_compares(phase)
      )
      for text in found:
        warnings.warn(f"Step {done}, {phase.name!r}: {text}", stacklevel=2)
      if done % run.evaluation.every == 0 or place + 1 == phase.steps:
        with phases_lib.Clock() as clock:
          scalars["eval/reward"] = _evaluate(run, train_state, phase)
        scalars["time/evaluate"] = clock.seconds
      saves = done % run.checkpoint_every == 0 or done == run.steps
      if saves:
        scalars |= _save_drafters(run)
      log.write(done, phase.name, scalars)
      bar.set_postfix(_shown(scalars), refresh=False)
      bar.update()
      if saves:
        checkpoints.save(train_state, progress, about)
    if stop.requested and progress.step < run.steps:
      _save_drafters(run)
      checkpoints.save(train_state, progress, about)
      print(
          f"Stopped after step {progress.step} of {run.steps}; the same "
          "command goes on from there."
      )
      return None
    return actor_critic.without_head(train_state.params)


def _begin(run, params, checkpoints, about, may_differ):
  """Train state, reference and progress, new or as they were saved."""
  checkpoints.recover()
  while (progress := checkpoints.progress()) is not None:
    if progress.seed != run.seed or progress.step > run.steps:
      raise ValueError(
          f"The checkpoint is of seed {progress.seed} and step {progress.step};"
          f" this run has seed {run.seed} and {run.steps} steps. Take another "
          "workdir."
      )
    identity.check(checkpoints.run(), about, progress.step, may_differ)
    try:
      return *_restored(run, params, checkpoints, progress), progress
    except checkpoints_lib.Damaged as error:
      checkpoints.set_aside(progress.step, str(error))
  checkpoints_lib.check_finite(params, "params, before the first step,")
  params = jax.tree.map(lambda x: x.copy(), params)  # a step donates them
  train_state, reference = _enter(run, 0, params, checkpoints)
  return train_state, reference, checkpoints_lib.Progress(0, 0, run.seed)


def _restored(run, params, checkpoints, progress):
  """Train state and reference of the latest checkpoint."""
  # A checkpoint belongs to the phase of the step before it.
  number, _ = run.place(progress.step - 1)
  phase = run.phases[number]
  for earlier in run.phases[: number + 1]:
    params = _with_head(earlier, params)
  like = jax.eval_shape(
      lambda params: step_lib.create(
          params, phase.learner.optimizer, trainable=phase.learner.trainable,
          param_dtype=phase.learner.param_dtype,
      ),
      params,
  )
  where = step_lib.shardings(
      params, phase.learner.optimizer, trainable=phase.learner.trainable,
      layout=phase.learner.schedule.layout,
  )
  train_state = checkpoints.restore(checkpoints_lib.shapes(like, where))
  reference = None
  if _needs_reference(phase) and run.place(progress.step)[0] == number:
    of_params = None if where is None else where.params
    reference = checkpoints.restore_reference(
        number, checkpoints_lib.shapes(like.params, of_params)
    )
  return train_state, reference


def _enter(run, number: int, params, checkpoints):
  """A new optimizer, and the reference policy where the phase needs one."""
  phase = run.phases[number]
  learner, reference = phase.learner, None
  train_state = learner.create(_with_head(phase, params))
  if _needs_reference(phase):  # placed as the parameters are
    reference = jax.tree.map(lambda x: x.copy(), train_state.params)
    checkpoints.save_reference(number, reference)
  return train_state, reference


def _with_head(phase, params):
  """The parameters with the value head that the phase reads, if it does."""
  learner = phase.learner
  if isinstance(learner.algorithm, algorithms.ProximalPolicy):
    return actor_critic.add_head(params, learner.model.config)
  return params


def _needs_reference(phase) -> bool:
  return phase.learner.algorithm.needs_reference


def _compares(phase) -> bool:
  """Whether nothing is learnt from answers that are all as good."""
  return isinstance(
      phase.learner.algorithm,
      (algorithms.PolicyGradient, algorithms.Preference),
  )


def _not_finite(run, phase, done: int, skipped: int, outcome) -> str:
  """What the run that stops says of the batch it stops at."""
  said = {
      name: outcome.scalars[name] for name in ("loss", "grad_norm")
      if name in outcome.scalars
  }
  ids = outcome.examples
  shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" * (len(ids) > 8))
  return (
      f"{skipped} updates in a row were skipped, as many as most_skipped="
      f"{run.most_skipped} allows, because loss or gradient is not finite: "
      f"stopped at step {done}, phase {phase.name!r}, {said}, examples {shown}."
      " The parameters before them are saved. Lower the learning rate, clip "
      "the gradient, or look at these examples and their rewards."
  )


def _evaluate(run: TrainingRun, train_state, phase) -> float:
  of = run.evaluation
  return phases_lib.evaluate(
      run.model, phases_lib.on_one_device(train_state.params, phase.learner),
      of.task, of.rollouts, split=of.split, prompts=of.prompts, seed=run.seed,
      schedule=phase.learner.schedule,
  )


def _save_drafters(run: TrainingRun) -> dict[str, float]:
  """Saves what is trained beside the run, and says how long that blocked it."""
  drafters = [
      phase.speculator for phase in run.phases if phase.speculator is not None
  ]
  if not drafters:
    return {}
  return {"time/draft_save": sum(one.save() for one in drafters)}


def _shown(scalars) -> dict[str, str]:
  names = ("loss", "answer_loss", "reward/mean", "eval/reward")
  return {
      name: f"{scalars[name]:.3f}" for name in names if name in scalars
  }


class _Signals:
  """Turns the first interrupt or termination into a request to stop."""

  def __init__(self):
    self.requested = False
    self._before = {}

  def __enter__(self) -> "_Signals":
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGINT, signal.SIGTERM):
        self._before[number] = signal.signal(number, self._request)
    return self

  def __exit__(self, *_) -> None:
    self._restore()

  def _request(self, *_) -> None:
    self.requested = True
    self._restore()  # the second one takes effect at once

  def _restore(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}
