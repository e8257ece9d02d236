# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Training runs: phases one after the other, evaluation, log and checkpoints.

Every random number is a function of the seed and the step, and a checkpoint
holds all that a step depends on. So a run that was stopped, by a signal or by
force, resumes from its latest checkpoint and ends with the same parameters, bit
for bit, as one that was never stopped. The checkpoint also describes the run;
another run cannot resume from it.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any
import warnings

import jax

from branch_replay.models import decoder
from branch_replay.tasks import task as task_lib
from branch_replay.training import actor_critic
from branch_replay.training import alarms
from branch_replay.training import algorithms
from branch_replay.training import checkpoints as checkpoints_lib
from branch_replay.training import completions as completions_lib
from branch_replay.training import experience
from branch_replay.training import identity
from branch_replay.training import metrics
from branch_replay.training import pairwise
from branch_replay.training import phases as phases_lib
from branch_replay.training import signals
from branch_replay.training import step as step_lib
from branch_replay.training import terminal
from branch_replay.training import writers as writers_lib

WRITERS = (writers_lib.TensorBoard, terminal.Terminal)


@dataclasses.dataclass(frozen=True)
class HeldOutEvaluation:
  """How often, and on which held-out prompts, a run is evaluated.

  Attributes:
    task: prompts, and the reward of an answer.
    rollouts: how answers are sampled.
    split: name of the split.
    prompts: number of prompts, the first ones of the split.
    every: steps between two evaluations. The parameters before the first step
      and those after each phase are evaluated in any case.
  """

  task: task_lib.Task
  rollouts: experience.Rollouts
  split: str = "validation"
  prompts: int = 32
  every: int = 20

  def __post_init__(self):
    task_lib.check_scored(self.task)
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
    phases: the phases in their order; all train the same parameters.
    evaluation: how the run is evaluated; None for not at all, as of a task
      without a reward.
    seed: seed of everything random in the run.
    checkpoint_every: steps between two checkpoints. The last step of the run is
      saved in any case.
    most_skipped: number of consecutive updates skipped because the loss or the
      gradient is not finite at which the run saves its parameters and stops
      with an error.
    warn_after: consecutive steps in which something is wrong after which the
      run warns, see `alarms`; 0 for no warnings.
    decode: function from ids to text, for sampled answers that are written;
      None writes the ids.
    completions_every: steps between two that write sampled answers. The first
      step of each phase does in any case, unless this is 0, for never.
    completion_prompts: most prompts a step whose answers are written.
    writers: functions that open the writers of numbers and answers, in addition
      to metrics.jsonl and completions.jsonl. To add one, name the default ones
      too: `(*loop.WRITERS, writers.weights_and_biases(project="mine"))`.
  """

  model: decoder.Decoder
  phases: Sequence[phases_lib.Phase | pairwise.Pairwise]
  evaluation: HeldOutEvaluation | None = None
  seed: int = 0
  checkpoint_every: int = 50
  most_skipped: int = 5
  warn_after: int = 10
  decode: completions_lib.Decode | None = None
  completions_every: int = 10
  completion_prompts: int = 2
  writers: Sequence[writers_lib.Open] = WRITERS

  def __post_init__(self):
    if not self.phases or any(phase.steps < 1 for phase in self.phases):
      raise ValueError("A run needs phases of at least one step each.")
    if self.evaluation is not None:
      phases_lib.check_room(
          self.model.config, self.evaluation.task, self.evaluation.split,
          self.evaluation.rollouts,
      )
    for field, least in (
        ("checkpoint_every", 1), ("most_skipped", 1), ("warn_after", 0),
        ("completions_every", 0), ("completion_prompts", 1),
    ):
      if getattr(self, field) < least:
        raise ValueError(
            f"{field} must be at least {least}, not {getattr(self, field)}."
        )

  @property
  def steps(self) -> int:
    """Steps of all phases together."""
    return sum(phase.steps for phase in self.phases)

  def place(self, step: int) -> tuple[int, int]:
    """Finds the phase in which a run goes on after `step` steps.

    Args:
      step: steps done, of all phases.

    Returns:
      The number of the phase, counted from 0, and the steps done in it. For a
      run that is complete they are those of the end of its last phase.
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
  """Trains to the end, from where an earlier run in the same folder stopped.

  A run that resumes must be the same run as the one that was saved, see
  `identity`. It may change: the devices, `hold`, drafting, how often it
  evaluates, saves or warns, what it writes and shows, the number of steps of
  the phase it is in, and the phases after the saved ones.

  Args:
    run: what is trained.
    params: parameters before the first step, on one device. They are read if
      there is no checkpoint yet, and not changed.
    workdir: folder of metrics.jsonl, completions.jsonl, TensorBoard's files and
      checkpoints.
    may_differ: further parts of the run that may have changed, named by their
      paths as the error message names them, e.g. "phases[0].learner.optimizer".

  Returns:
    The trained parameters without a value head; None if a signal stopped the
    run, after saving its state.

  Raises:
    ValueError: the checkpoint is of another run (every difference is named); a
      line of metrics.jsonl or completions.jsonl is damaged; parameters are not
      finite; or `run.most_skipped` updates in a row were skipped.
  """
  workdir = pathlib.Path(workdir)
  about = identity.of_run(run)
  with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(
        checkpoints_lib.Checkpoints(workdir / "checkpoints")
    )
    stop = stack.enter_context(signals.Stop(checkpoints.latest))
    for one in run.phases:
      if one.speculator is not None:
        where = workdir / "drafter" / one.name
        stack.enter_context(one.speculator.at(where, params))
    train_state, reference, progress = _begin(
        run, params, checkpoints, about, may_differ
    )
    streaks = alarms.Streaks()
    # A run that starts writes the row of step 0 again.
    log = stack.enter_context(metrics.Log(
        workdir, start=progress.step or -1, steps=run.steps,
        writers=run.writers,
    ))
    if not progress.step and run.evaluation is not None:
      reward = _evaluate(run, train_state, run.phases[0])
      log.write(0, "before", {"eval/reward": reward})
    while progress.step < run.steps and not stop.requested:
      number, place = run.place(progress.step)
      phase = run.phases[number]
      if place == 0 and progress.step:
        train_state, reference = _enter(
            run, number, train_state.params, checkpoints
        )
      with phases_lib.Clock() as clock:
        outcome = phase.step(
            train_state, reference, progress.position if place else 0,
            jax.random.fold_in(jax.random.key(run.seed), progress.step),
        )
      train_state = outcome.train_state
      done = progress.step + 1
      progress = checkpoints_lib.Progress(done, outcome.position, run.seed)
      scalars = outcome.scalars | _throughput(outcome.scalars, clock.seconds)
      skipped = int(train_state.skipped)
      _write_completions(
          run, log, done, outcome, due=place == 0 or skipped >= run.most_skipped
      )
      if skipped >= run.most_skipped:
        log.write(done, phase.name, scalars)
        _save_drafters(run)
        checkpoints.save(train_state, progress, about)
        raise ValueError(_not_finite(run, phase, done, skipped, outcome))
      streaks, found = alarms.observe(
          streaks, scalars, after=run.warn_after, compares=_compares(phase),
          compute_dtype=run.model.config.compute_dtype,
      )
      for text in found:
        warnings.warn(f"Step {done}, {phase.name!r}: {text}", stacklevel=2)
      if run.evaluation is not None and (
          done % run.evaluation.every == 0 or place + 1 == phase.steps
      ):
        with phases_lib.Clock() as clock:
          scalars["eval/reward"] = _evaluate(run, train_state, phase)
        scalars["time/evaluate"] = clock.seconds
      saves = done % run.checkpoint_every == 0 or done == run.steps
      if saves:
        scalars |= _save_drafters(run)
      log.write(done, phase.name, scalars)
      if saves:
        checkpoints.save(train_state, progress, about)
    if stop.requested and progress.step < run.steps:
      _save_drafters(run)
      checkpoints.save(train_state, progress, about)
      checkpoints.wait()
      print(
          f"Stopped after step {progress.step} of {run.steps}; the same "
          "command goes on from there."
      )
      return None
    return actor_critic.without_head(train_state.params)


def _begin(run, params, checkpoints, about, may_differ):
  """Train state, reference and progress: new ones, or those of a checkpoint."""
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
  # A checkpoint belongs to the phase of the last step done.
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


def restored(run: TrainingRun, params, workdir: pathlib.Path) -> Any:
  """The parameters of a run's latest checkpoint, without a value head.

  Args:
    run: the run.
    params: its parameters before the first step; only shapes are read.
    workdir: the run's folder.

  Raises:
    ValueError: there is no checkpoint, or it is of another run.
  """
  folder = pathlib.Path(workdir) / "checkpoints"
  with checkpoints_lib.Checkpoints(folder) as checkpoints:
    progress = checkpoints.progress()
    if progress is None:
      raise ValueError(f"{folder} has no checkpoint.")
    identity.check(checkpoints.run(), identity.of_run(run), progress.step)
    train_state, _ = _restored(run, params, checkpoints, progress)
    return actor_critic.without_head(train_state.params)


def _enter(run, number: int, params, checkpoints):
  """A new train state for a phase, and its reference policy if it needs one."""
  phase = run.phases[number]
  learner, reference = phase.learner, None
  train_state = learner.create(_with_head(phase, params))
  if _needs_reference(phase):  # placed as the parameters are
    reference = jax.tree.map(lambda x: x.copy(), train_state.params)
    checkpoints.save_reference(number, reference)
  return train_state, reference


def _with_head(phase, params):
  """The parameters, with a value head if the phase is PPO."""
  learner = phase.learner
  if isinstance(learner.algorithm, algorithms.ProximalPolicy):
    return actor_critic.add_head(params, learner.model.config)
  return params


def _needs_reference(phase) -> bool:
  return phase.learner.algorithm.needs_reference


def _compares(phase) -> bool:
  """Whether the algorithm learns only from differences within a group."""
  return isinstance(
      phase.learner.algorithm,
      (algorithms.PolicyGradient, algorithms.Preference),
  )


def _not_finite(run, phase, done: int, skipped: int, outcome) -> str:
  """The error message of a run whose updates are skipped again and again."""
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
  """Saves the learned drafters; returns the seconds it took, to be logged."""
  drafters = [
      phase.speculator for phase in run.phases if phase.speculator is not None
  ]
  if not drafters:
    return {}
  return {"time/draft_save": sum(one.save() for one in drafters)}


def _write_completions(
    run: TrainingRun, log: metrics.Log, step: int, outcome, *, due: bool
) -> None:
  """Writes sampled answers of a step, if there are any and it is time."""
  every = run.completions_every
  if not every or not outcome.sampled or not (due or step % every == 0):
    return
  phase = run.phases[run.place(step - 1)[0]]
  log.completions(step, completions_lib.rows(
      step, phase.name, outcome.sampled, decode=run.decode,
      algorithm=phase.learner.algorithm, prompts=run.completion_prompts,
  ))


def _throughput(scalars, seconds: float) -> dict[str, float]:
  """Tokens of answers a second, sampled ones and those learnt from."""
  names = ("tokens_sampled", "tokens_learnt")
  tokens = [scalars[name] for name in names if name in scalars]
  return {"tokens_per_second": sum(tokens) / seconds} if tokens else {}
