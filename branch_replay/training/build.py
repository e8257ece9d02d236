# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""From settings to a run that is ready to start."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any
from typing import get_args

import jax

from branch_replay import config as config_lib
from branch_replay import tasks
from branch_replay.devices import layout as layout_lib
from branch_replay.devices import sharding
from branch_replay.engine.schedule import Schedule
from branch_replay.models import adapters
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout.drafters import files as drafter_files
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import by_name
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
from branch_replay.training import optimizers
from branch_replay.training import pairwise
from branch_replay.training import phases as phases_lib
from branch_replay.training import settings as settings_lib
from branch_replay.training import step as step_lib
from branch_replay.training import writers
from branch_replay.training.drafting import speculator as speculator_lib
from branch_replay.weights import hf
from branch_replay.weights import load as load_lib
from branch_replay.weights.pretrained import Pretrained

# Prompts of an evaluation that does not say how many.
_MOST_EVALUATED = loop.HeldOutEvaluation.prompts


@dataclasses.dataclass(frozen=True)
class PreparedRun:
  """A run that is checked and ready to start.

  Attributes:
    run: model, phases and evaluation.
    start: the model and its parameters before the first step, with adapters if
      they are trained; its tokenizer and stop ids.
  """

  run: loop.TrainingRun
  start: Pretrained

  def train(
      self, workdir: pathlib.Path | str, *, may_differ: Sequence[str] = ()
  ) -> Any:
    """Trains to the end, from where an earlier run in `workdir` stopped.

    Returns:
      The trained parameters; None if a signal stopped the run. See `loop.train`
      for what is written, and for errors.
    """
    return loop.train(
        self.run, self.start.params, pathlib.Path(workdir),
        may_differ=may_differ,
    )

  def trained(self, params) -> Pretrained:
    """The model with trained parameters, on the host; adapters are merged."""
    params, model = jax.device_get(params), self.run.model
    if model.config.adapter is not None:
      model, params = adapters.merge(model, params)
    return dataclasses.replace(self.start, model=model, params=params)

  def export(self, directory: pathlib.Path, params) -> None:
    """Writes the trained model in Hugging Face's format.

    A learned drafter goes into a folder of its own, `drafter_<phase>`, which
    `drafters.files.load` reads.
    """
    hf.save_pretrained(directory, self.trained(params))
    for phase in self.run.phases:
      if phase.speculator is not None and phase.speculator.reads_states:
        drafter_files.save(
            directory / f"drafter_{phase.name}", phase.speculator.drafter
        )


def build(settings: settings_lib.RunSettings) -> PreparedRun:
  """A run as its settings describe it: loads the model, prepares the task.

  Raises:
    ValueError: settings that cannot be run, before any training is done.
  """
  adapter_of(settings)  # refused before a large file is read
  start, text = model_of(settings)

  def task_of(changes: Mapping[str, Any]) -> task_lib.Task:
    given = {**settings.task, **changes}
    name = given.pop("name")
    if name == "file" and not given.get("max_prompt_tokens"):
      given["max_prompt_tokens"] = start.config.max_positions - max(
          phase.max_tokens for phase in settings.phases.values()
      )
    return tasks.prepare(
        tasks.recipe(name, **given), text=text,
        data_dir=settings.data_dir or None,
    )

  return prepare(settings, start, task_of, decode=text.decode)


def prepare(
    settings: settings_lib.RunSettings, start: Pretrained,
    task_of: Callable[[Mapping[str, Any]], task_lib.Task], *,
    decode: Callable[[list[int]], str] | None = None,
) -> PreparedRun:
  """A run of a model that is loaded.

  Args:
    settings: the run; `pretrained`, `model`, `task` and `data_dir` are not
      read.
    start: the model to begin with.
    task_of: makes the task, given the settings in which a phase's differs.
    decode: turns ids into text, for the answers that are shown.

  Raises:
    ValueError: settings that cannot be run.
  """
  adapter = adapter_of(settings)
  if adapter is not None:
    model, params = adapters.add(
        start.model, start.params, adapter, jax.random.key(settings.seed)
    )
    start = dataclasses.replace(start, model=model, params=params)
  layout = layout_lib.Layout()
  if settings.devices > 1:
    layout = sharding.sharded(start.params, settings.devices)
  schedule = Schedule(layout=layout, **settings.schedule)
  run = loop.TrainingRun(
      start.model,
      tuple(
          phase_of(settings, name, start.model, task_of, schedule)
          for name in settings.phases
      ),
      evaluation_of(settings, task_of),
      seed=settings.seed,
      checkpoint_every=settings.checkpoint_every,
      most_skipped=settings.most_skipped,
      warn_after=settings.warn_after,
      decode=decode,
      completions_every=settings.completions_every,
      completion_prompts=settings.completion_prompts,
      writers=writers_of(settings),
  )
  return PreparedRun(run, start)


def adapter_of(settings) -> config_lib.Adapter | None:
  """The low-rank adapters that are trained, or None for all parameters."""
  rank, alpha = settings.adapter.rank, settings.adapter.alpha
  if alpha is not None and not rank:
    raise ValueError(
        f"adapter.alpha={alpha} without an adapter: set adapter.rank too, or "
        "neither."
    )
  return config_lib.Adapter(rank, alpha) if rank else None


def model_of(settings):
  """The model, pretrained or of the settings' geometry, and its text."""
  step_lib.check_param_dtype(settings.param_dtype)
  if settings.pretrained:
    if settings.model:
      raise ValueError(
          f"model={dict(settings.model)} describes a model and pretrained="
          f"{settings.pretrained!r} names one: take one of the two."
      )
    start = weights_of(settings)
    return start, tasks.Chat(start)
  if settings.param_dtype == "file":
    raise ValueError(
        "param_dtype='file': without `pretrained` there is no file. Name a "
        "dtype, as in 'float32'."
    )
  if not settings.model:
    raise ValueError(
        "There is no model: set `pretrained` to a name or path, or describe "
        "one in `model`."
    )
  compute = settings.compute_dtype
  text = tasks.Characters()
  model, params = load_lib.random(config_lib.ModelConfig(**{
      "vocab_size": text.vocab_size, "param_dtype": settings.param_dtype,
      "compute_dtype": "float32" if compute == "file" else compute,
      **settings.model,
  }), settings.seed)
  return Pretrained(
      model, params, stop_ids=text.stop_ids, bos_id=text.bos_id
  ), text


def weights_of(settings) -> Pretrained:
  """The model that `pretrained` names.

  Parameters that are to be trained have the dtype that is asked for from the
  beginning, so that none is rounded to the file's; those below adapters have
  the file's.
  """
  as_stored = settings.adapter.rank or settings.param_dtype == "file"
  return load_lib.load(
      settings.pretrained, compute_dtype=settings.compute_dtype,
      param_dtype=None if as_stored else settings.param_dtype,
  )


def writers_of(settings) -> tuple[writers.Open, ...]:
  """Those that show a run: the terminal, TensorBoard, Weights & Biases."""
  if not settings.wandb.project:
    return loop.WRITERS
  return (*loop.WRITERS, writers.weights_and_biases(
      project=settings.wandb.project, name=settings.wandb.name or None,
      config=dataclasses.asdict(settings),
  ))


def evaluation_of(settings, task_of) -> loop.HeldOutEvaluation | None:
  """The evaluation on held-out prompts; None for a task without a reward."""
  task = task_of({})
  if task.score is None:
    return None
  of = settings.evaluation
  last = list(settings.phases.values())[-1]
  return loop.HeldOutEvaluation(
      task,
      experience.Rollouts(
          of.branches, of.max_tokens or last.max_tokens,
          law_lib.Law(of.temperature), hold="nothing",
      ),
      split=of.split,
      prompts=of.prompts or min(_MOST_EVALUATED, len(task.split(of.split))),
      every=of.every,
  )


def phase_of(settings, name: str, model, task_of, schedule) -> phases_lib.Phase:
  """One phase by its name."""
  of = settings.phases[name]
  task = task_of(of.task)
  updates = of.steps
  if of.kind == "reinforce":
    updates *= of.epochs * of.updates
  rate = optimizers.learning_rates(
      of.optimizer.learning_rate, updates=updates, warmup=of.optimizer.warmup,
      decay=of.optimizer.decay,
  )
  optimizer = optimizers.adamw(
      rate, b1=of.optimizer.b1, b2=of.optimizer.b2,
      weight_decay=of.optimizer.weight_decay,
      clip_norm=of.optimizer.clip_norm or None,
  )

  def learner(algorithm: algorithms.Algorithm) -> learner_lib.Learner:
    return learner_lib.Learner(
        model, algorithm, optimizer, settings.prefix_gradient,
        sampling=settings.sampled, band=settings.band, schedule=schedule,
        trainable="adapters" if settings.adapter.rank else "all",
        param_dtype=settings.param_dtype,
    )

  common = {"steps": of.steps, "prompts": of.prompts, "seed": settings.seed,
            "learning_rate": rate}
  if of.kind == "supervised":
    return phases_lib.Supervised(
        name, task, learner(algorithms.MaximumLikelihood()),
        max_tokens=of.max_tokens, **common,
    )
  if of.kind == "pairwise":
    algorithm = by_name.make(
        of.algorithm.name, of.algorithm.settings, temperature=1.0,
        max_tokens=of.max_tokens,
    )
    return pairwise.Pairwise(
        name, task, learner(algorithm), max_tokens=of.max_tokens, **common
    )
  rollouts = experience.Rollouts(
      of.branches, of.max_tokens, law_lib.Law(of.temperature), of.hold,
      of.truncated,
  )
  algorithm = by_name.make(
      of.algorithm.name, of.algorithm.settings, temperature=of.temperature,
      max_tokens=of.max_tokens,
  )
  return phases_lib.Reinforce(
      name, task, learner(algorithm), rollouts, epochs=of.epochs,
      updates=of.updates, capture_every=of.capture_every,
      most_prompts=of.most_prompts or None,
      speculator=speculator_of(of, model, settings.seed, schedule), **common,
  )


def speculator_of(of, model, seed: int, schedule):
  """The drafter of a reinforcement phase's rollouts, or None."""
  drafter = of.speculation.drafter
  kinds = ("none", *get_args(speculator_lib.Kind))
  if drafter not in kinds:
    raise task_lib.unknown("speculation.drafter", drafter, kinds)
  if drafter == "none":
    return None
  studies = None
  if drafter == "learned":
    given = {
        field.name: getattr(of.speculation.studies, field.name)
        for field in dataclasses.fields(of.speculation.studies)
    }
    rate = given.pop("learning_rate")
    given["until"] = given["until"] or None
    studies = speculator_lib.Studies(
        optimizers.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0,
                         clip_norm=1.0),
        **given,
    )
  return speculator_lib.Speculator(
      model, drafter, studies=studies, seed=seed,
      tuner=tuner_lib.Tuner(
          of.speculation.draft_lengths, epsilon=of.speculation.epsilon,
          seed=seed,
      ),
      temperature=of.temperature, schedule=schedule,
  )
