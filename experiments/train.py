# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a model: supervised warm-up where it needs one, then reinforcement.

Writes metrics.jsonl (one object a step), TensorBoard's event files, checkpoints
and, at the end, the model in Hugging Face's format. The same command goes on
where an earlier one was stopped.

  python -m experiments.train --config=configs/train.py
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import get_args

import jax
import ml_collections

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay import tasks
from branch_replay.devices import sharding
from branch_replay.models import adapters
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout.drafters import files as drafter_files
from branch_replay.tasks import task as task_lib
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import loop
from branch_replay.training import metrics
from branch_replay.training import optimizers
from branch_replay.training import phases as phases_lib
from branch_replay.training import step as step_lib
from branch_replay.training.drafting import speculator as speculator_lib
from branch_replay.weights import load as load_lib
from branch_replay.weights import pretrained as pretrained_lib
from configs import train as train_config
from experiments import cli
from experiments.reporting import record
from experiments.reporting import training

_POLICY_LOSSES = {
    name: getattr(objectives, name)
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "reinforce")
}
# Fields that may change when a run goes on: what it learns does not depend on
# them. The library checks what may become of the phases and of their steps.
_HARMLESS = (
    "devices", "data_dir", "export", "checkpoint_every", "most_skipped",
    "warn_after", "evaluation.every", "phases",
)
_HARMLESS_OF_PHASE = ("steps", "hold")
# Whose fields are checked where they are used.
_FREE = ("model", "task", "settings", "schedule")
_ALGORITHMS = (*_POLICY_LOSSES, "ppo", "dpo", "ipo")


@dataclasses.dataclass(frozen=True)
class Problem:
  """A run that is ready to start.

  Attributes:
    pretrained: what the model was made from; its tokenizer and stop ids.
  """

  run: loop.TrainingRun
  params: dict  # before its first step
  pretrained: pretrained_lib.Pretrained


def build(config: ml_collections.ConfigDict) -> Problem:
  """Everything a config says, checked, before any training is done.

  Raises:
    ValueError: a config that cannot be run.
  """
  check_fields(config)
  adapter = adapter_of(config)
  pretrained, text = model_of(config)
  if adapter is not None:
    model, params = adapters.add(
        pretrained.model, pretrained.params, adapter,
        jax.random.key(config.seed),
    )
    pretrained = dataclasses.replace(pretrained, model=model, params=params)
  layout = br.Schedule().layout
  if config.devices > 1:
    layout = sharding.sharded(pretrained.params, config.devices)
  schedule = br.Schedule(layout=layout, **config.schedule)
  run = loop.TrainingRun(
      pretrained.model,
      tuple(
          phase_of(config, name, pretrained.model, text, schedule)
          for name in config.phases
      ),
      evaluation_of(config, text),
      config.seed,
      config.checkpoint_every,
      config.most_skipped,
      config.warn_after,
      decode=text.decode,
  )
  return Problem(run, pretrained.params, pretrained)


def check_fields(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a field that is missing, or that nobody reads."""
  known = train_config.get_config().to_dict()
  kinds = {known[name]["kind"]: known[name] for name in known["phases"]}
  known = {x: y for x, y in known.items() if x not in known["phases"]}
  mine = config.to_dict()
  # A phase that is described but not run is no mistake.
  rest = {
      name: value for name, value in mine.items()
      if not (isinstance(value, dict) and "kind" in value)
  }
  if not config.phases:
    raise ValueError("phases=() names nothing to do.")
  for name in config.phases:
    if name not in mine:
      raise task_lib.unknown("phase", name, list(mine))
    if mine[name]["kind"] not in kinds:
      raise task_lib.unknown(f"{name}.kind", mine[name]["kind"], kinds)
    _same_fields(mine[name], kinds[mine[name]["kind"]], f"{name}.")
  _same_fields(rest, known, "")
  for part, kind in (("model", br.ModelConfig), ("schedule", br.Schedule)):
    fields = {field.name for field in dataclasses.fields(kind)} - {"layout"}
    for name in mine[part]:
      if name not in fields:
        raise task_lib.unknown(f"field of {part}", name, fields)


def _same_fields(mine: dict, known: dict, where: str) -> None:
  for name in mine:
    if name not in known:
      part = where.rstrip(".") or "the config"
      raise task_lib.unknown(f"field of {part}", name, known)
  for name, value in known.items():
    if name not in mine:
      raise ValueError(f"The config lacks {where}{name}.")
    if isinstance(value, dict) and name not in _FREE:
      _same_fields(mine[name], value, f"{where}{name}.")


def adapter_of(config) -> config_lib.Adapter | None:
  """The low-rank adapters that are trained, or None for all parameters."""
  rank, alpha = config.adapter.rank, config.adapter.alpha
  if alpha is not None and not rank:
    raise ValueError(
        f"adapter.alpha={alpha} without an adapter: set adapter.rank too, or "
        "neither."
    )
  return config_lib.Adapter(rank, alpha) if rank else None


def model_of(config):
  """The model, pretrained or of the config's geometry, and its text."""
  step_lib.check_param_dtype(config.param_dtype)
  if config.pretrained:
    pretrained = weights_of(config)
    return pretrained, tasks.Chat(pretrained)
  dtypes = {
      name: config[name] for name in ("param_dtype", "compute_dtype")
  }
  if "file" in dtypes.values():
    said = ", ".join(f"{name}={value!r}" for name, value in dtypes.items())
    raise ValueError(
        f"{said}: without `pretrained` there is no file. Name a dtype, as in "
        "'float32'."
    )
  text = tasks.Characters()
  model, params = load_lib.random(br.ModelConfig(
      **{"vocab_size": text.vocab_size, **dtypes, **config.model}
  ), config.seed)
  return pretrained_lib.Pretrained(
      model, params, stop_ids=text.stop_ids, bos_id=text.bos_id
  ), text


def weights_of(config) -> pretrained_lib.Pretrained:
  """The model that a config's `pretrained` names.

  Parameters that are to be trained have the dtype that the config asks for
  from the beginning, so that none is rounded to the file's; those below
  adapters have the file's.
  """
  as_stored = config.adapter.rank or config.param_dtype == "file"
  return load_lib.load(
      config.pretrained, compute_dtype=config.compute_dtype,
      param_dtype=None if as_stored else config.param_dtype,
  )


def task_of(config, text, changes: dict) -> tasks.Task:
  """The task with some settings changed; rows are made if they are missing."""
  settings = config.task.to_dict() | dict(changes)
  name = settings.pop("name")
  return tasks.prepare(
      tasks.recipe(name, **settings), text=text,
      data_dir=config.data_dir or None,
  )


def evaluation_of(config, text) -> loop.HeldOutEvaluation:
  """The evaluation on held-out prompts."""
  of = config.evaluation
  return loop.HeldOutEvaluation(
      task_of(config, text, {}),
      experience.Rollouts(
          of.branches, of.max_tokens, br.Law(of.temperature), hold="nothing"
      ),
      of.split, of.prompts, of.every,
  )


def phase_of(config, name: str, model, text, schedule) -> phases_lib.Phase:
  """One phase by its name in the config."""
  of = config[name]
  task = task_of(config, text, of.task.to_dict())
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

  def learner(algorithm):
    return learner_lib.Learner(
        model, algorithm, optimizer, config.prefix_gradient,
        br.Sampling(**config.sampled), schedule,
        "adapters" if config.adapter.rank else "all",
        param_dtype=config.param_dtype,
    )

  if of.kind == "supervised":
    return phases_lib.Supervised(
        name, task, learner(algorithms.MaximumLikelihood()), of.steps,
        of.prompts, of.max_tokens, config.seed, rate,
    )
  rollouts = experience.Rollouts(
      of.branches, of.max_tokens, br.Law(of.temperature), of.hold, of.truncated,
  )
  return phases_lib.Reinforce(
      name, task, learner(algorithm_of(of)), rollouts, of.steps, of.prompts,
      of.epochs, of.updates, of.capture_every, of.most_prompts or None,
      config.seed, rate, speculator_of(of, model, config.seed, schedule),
  )


def speculator_of(of, model, seed: int, schedule):
  """The drafter of a reinforcement phase's rollouts, or None."""
  kinds = ("none", *get_args(speculator_lib.Kind))
  if of.speculation.drafter not in kinds:
    raise task_lib.unknown("speculation.drafter", of.speculation.drafter, kinds)
  if of.speculation.drafter == "none":
    return None
  studies = None
  if of.speculation.drafter == "learned":
    settings = of.speculation.studies.to_dict()
    rate = settings.pop("learning_rate")
    settings["until"] = settings["until"] or None
    studies = speculator_lib.Studies(
        optimizers.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0,
                         clip_norm=1.0),
        **settings,
    )
  return speculator_lib.Speculator(
      model, of.speculation.drafter, studies=studies, seed=seed,
      tuner=tuner_lib.Tuner(
          of.speculation.draft_lengths, epsilon=of.speculation.epsilon,
          seed=seed,
      ),
      temperature=of.temperature, schedule=schedule,
  )


def algorithm_of(of) -> algorithms.Algorithm:
  """The algorithm of a reinforcement phase."""
  name, settings = of.algorithm.name, of.algorithm.settings.to_dict()
  try:
    if name in _POLICY_LOSSES:
      return algorithms.PolicyGradient(
          _POLICY_LOSSES[name](**settings), of.algorithm.advantage,
          of.temperature,
      )
    if name == "ppo":
      fields = {x.name for x in dataclasses.fields(algorithms.ProximalPolicy)}
      mine = {key: settings.pop(key) for key in fields & set(settings)}
      return algorithms.ProximalPolicy(
          objectives.ppo(**settings), temperature=of.temperature, **mine
      )
    if name in ("dpo", "ipo"):
      loss = {"dpo": preference.Dpo, "ipo": preference.Ipo}[name]
      return algorithms.Preference(loss(**settings))
  except TypeError as error:
    raise ValueError(f"algorithm.settings of {name!r}: {error}") from error
  raise task_lib.unknown("algorithm", name, _ALGORITHMS)


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, *,
    may_differ: Sequence[str] = (),
) -> list[dict]:
  """Trains, or goes on training, and returns the rows of metrics.jsonl.

  `may_differ` is of `loop.train`.

  Raises:
    ValueError: a config that cannot be run, before anything is trained, or a
      workdir of another config.
  """
  workdir = pathlib.Path(workdir).resolve()
  mine = json.loads(json.dumps(config.to_dict()))
  file = workdir / "config.json"
  if file.exists():
    check_same(json.loads(file.read_text()), mine, workdir)
  problem = build(config)
  if not file.exists():
    record.write_json(file, mine)
  params = loop.train(
      problem.run, problem.params, workdir, may_differ=may_differ
  )
  record.write_json(file, mine)
  rows = metrics.read(workdir)
  if params is None:
    return rows
  if config.export:
    export(problem, params, workdir / "model")
  record.finish(workdir, summary(config, rows), table=training.learned)
  return rows


def check_same(saved: dict, mine: dict, workdir: pathlib.Path) -> None:
  """ValueError, all fields named, for the workdir of another config."""
  free = [*_HARMLESS, *(
      f"{name}.{field}" for name in {*saved["phases"], *mine["phases"]}
      for field in _HARMLESS_OF_PHASE
  )]
  differ = record.differences(saved, mine, free=free)
  if differ:
    raise ValueError(
        f"{workdir} holds a run of another config: {'; '.join(differ)}. Take "
        "another --workdir, or the values of there."
    )


def summary(config, rows: list[dict]) -> dict:
  """Summarises the rows of metrics.jsonl.

  Returns:
    `curve`, every evaluation with the seconds spent until then, compilation
    included and starting up not; `phases`, the last evaluation of each.
  """
  curve, seconds = [], 0.0
  for row in rows:
    seconds += sum(x for name, x in row.items() if name.startswith("time/"))
    if "eval/reward" in row:
      curve.append({
          "step": row["step"], "name": row["phase"],
          "reward": row["eval/reward"], "seconds": round(seconds, 1),
      })
  last = {at["name"]: at for at in curve}
  return record.begin(
      config, curve=curve,
      phases=[last[name] for name in ("before", *config.phases)],
      mismatch_max=max(row.get("mismatch_max", 0.0) for row in rows),
  )


def export(problem: Problem, params, directory: pathlib.Path) -> None:
  """Writes the model in Hugging Face's format, and drafters that were trained.

  Adapters are merged; `drafters.files.load` reads a drafter.
  """
  config = problem.run.model.config
  params = jax.device_get(params)
  if config.adapter is not None:
    model, params = adapters.merge(problem.run.model, params)
    config = model.config
  source = problem.pretrained
  br.save_hf(
      directory, config, params, tokenizer=source.tokenizer,
      stop_ids=source.stop_ids, bos_id=source.bos_id,
  )
  for phase in problem.run.phases:
    if phase.speculator is not None and phase.speculator.reads_states:
      drafter_files.save(
          directory / f"drafter_{phase.name}", phase.speculator.drafter
      )


if __name__ == "__main__":
  cli.main(run, "configs/train.py")
