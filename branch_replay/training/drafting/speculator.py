# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafting beside the rollouts of a run: draft lengths, drafter, training.

In each step of the run, for every prompt,

  options  chooses the drafter and the draft lengths that `sample` takes,
  saw      notes what the rollout cost and gave,

and then `study` trains the drafter and reports.

A `Speculator` is the only object of a run that changes in place. No token,
reward or update depends on what it holds, so it need not be restored
completely: a run that resumes restores the drafter and its optimizer, and
collects lessons and measured speeds anew.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
import time
from typing import Literal
from typing import get_args
import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from branch_replay.engine.schedule import Schedule
from branch_replay.models import decoder
from branch_replay.rollout import loop
from branch_replay.rollout import result
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout.drafters import drafter as drafter_lib
from branch_replay.rollout.drafters import learned as learned_lib
from branch_replay.rollout.drafters import ngram
from branch_replay.rollout.drafters import vocabulary as vocabulary_lib
from branch_replay.training import checkpoints as checkpoints_lib
from branch_replay.training import experience as experience_lib
from branch_replay.training import json_lines
from branch_replay.training import step_folders
from branch_replay.training.drafting import buffer as buffer_lib
from branch_replay.training.drafting import lessons as lessons_lib
from branch_replay.training.drafting import trainer as trainer_lib
from branch_replay.training.drafting import watch as watch_lib

Kind = Literal["ngram", "learned"]
DECISIONS = "decisions.jsonl"
_ITEMS = ("default",)  # what orbax calls the content of a version


@dataclasses.dataclass(frozen=True)
class Studies:
  """How a learned drafter is trained.

  Attributes:
    optimizer: optax optimizer of the drafter's parameters.
    vocabulary: U, number of ids it drafts; the most frequent ids of the first
      step are chosen.
    updates: updates in each step of the run.
    until: steps of the run after which the drafter is frozen; None for never.
    rows: N, rows of packed answers in an update.
    width: T, tokens of a row.
    most_tokens: tokens of answers that are kept to learn from.
    fresh: probability of a lesson from the newest step, see `buffer.Buffer`.
  """

  optimizer: optax.GradientTransformation
  vocabulary: int
  updates: int = 8
  until: int | None = None
  rows: int = 4
  width: int = 128
  most_tokens: int = 65_536
  fresh: float = 0.5

  def __post_init__(self):
    if self.until is not None and self.until < 1:
      raise ValueError(f"until={self.until} steps leave it untrained.")
    if self.updates < 1 or self.vocabulary < 1:
      raise ValueError(
          f"updates={self.updates} and vocabulary={self.vocabulary} must be at "
          "least 1."
      )


class Speculator:
  """Drafts for the rollouts of a run; see the module.

  Args:
    model: the decoder that is trained.
    kind: "ngram" or "learned".
    tuner: chooses draft lengths by measured speed.
    watch: switches drafts off when they are no longer accepted.
    studies: how a learned drafter is trained; None with "ngram".
    temperature: temperature answers are sampled at.
    seed: seed of the drafter's first parameters and of the order of lessons.
    schedule: sizes and policies of the replays that make lessons.

  Raises:
    ValueError: an unknown kind, or a model that the drafter does not support.
  """

  def __init__(
      self,
      model: decoder.Decoder,
      kind: Kind,
      *,
      tuner: tuner_lib.Tuner = tuner_lib.Tuner(),
      watch: watch_lib.Watch = watch_lib.Watch(),
      studies: Studies | None = None,
      temperature: float = 1.0,
      seed: int = 0,
      schedule: Schedule = Schedule(),
  ):
    if kind not in get_args(Kind):
      raise ValueError(
          f"Unknown drafter {kind!r}: use one of {', '.join(get_args(Kind))}."
      )
    if (kind == "learned") != (studies is not None):
      raise ValueError("studies belong to a learned drafter, and only to it.")
    self._model, self._tuner, self._watch = model, tuner, watch
    self._studies, self._seed, self._schedule = studies, seed, schedule
    self._step, self._seen, self._log = 0, [], None
    self._fixed = ngram.NGram() if kind == "ngram" else None
    if studies is not None:
      learned_lib.check_fits(model.config)
      if studies.vocabulary > model.config.vocab_size:
        raise ValueError(
            f"vocabulary={studies.vocabulary} ids of "
            f"{model.config.vocab_size} that there are."
        )
      self._trainer = trainer_lib.Trainer(
          model, studies.optimizer, studies.rows, studies.width, temperature
      )
      self._buffer = buffer_lib.Buffer(studies.most_tokens, studies.fresh)
      self._trained = self._vocabulary = None
      self._checkpoints = None

  @property
  def reads_states(self) -> bool:
    """Whether `study` needs the captured state of each experience in its batch.
    """
    return self._studies is not None

  @property
  def drafter(self) -> drafter_lib.Drafter | None:
    """The drafter of now; None before a learned one is trained."""
    if self._studies is None:
      return self._fixed
    if self._trained is None:
      return None
    return learned_lib.Learned(self._trained.params, self._vocabulary)

  def options(self, branches: int) -> dict:
    """Keyword arguments of the next `sample`: drafter and draft_length."""
    drafter = self.drafter
    if drafter is None or self._watch.is_off(self._step):
      return {}
    self._tuner, lengths, decisions = tuner_lib.choose(
        self._tuner, loop.buckets(branches)
    )
    self._write(decisions)
    return {"drafter": drafter, "draft_length": lengths}

  def saw(self, rollout: result.Rollout) -> None:
    """Notes how long a rollout took and how many drafts it accepted."""
    if self.drafter is not None:
      self._tuner = tuner_lib.observe(self._tuner, rollout.work)
    self._seen.append([
        int(np.asarray(getattr(rollout, name)).sum())
        for name in ("lengths", "rounds", "drafted", "accepted")
    ])

  def study(
      self, params, batch: Sequence[experience_lib.Experience], *, version: int
  ) -> dict[str, float]:
    """Ends a step of the run: trains the drafter on its answers, and reports.

    Args:
      params: the parameters that sampled the batch, on one device.
      batch: experiences; a learned drafter needs their states.
      version: u32 that stands for `params`.

    Returns:
      Scalars to log: draft/accept_length, tokens of a row per forward pass;
      draft/accepted, the share of drafted tokens that were accepted;
      draft/length, tokens drafted per forward pass; draft/alarm, 1 if drafts
      have just been switched off; and for a learned drafter draft/version and
      draft/loss.

    Raises:
      ValueError: no rollout of this step was passed to `saw`.
    """
    if not self._seen:
      raise ValueError("study follows sampling: call saw first.")
    tokens, rounds, drafted, accepted = np.sum(self._seen, axis=0).tolist()
    self._watch, alarm = watch_lib.observe(
        self._watch, self._step, drafted, accepted
    )
    scalars = {
        "draft/accept_length": tokens / rounds,
        "draft/accepted": accepted / max(1, drafted),
        "draft/length": drafted / rounds,
        "draft/alarm": float(alarm),
    }
    if self._studies is not None:
      scalars |= self._learn(params, batch, version)
    self._step, self._seen = self._step + 1, []
    return scalars

  def _learn(self, params, batch, version) -> dict[str, float]:
    until = self._studies.until
    if until is not None and self._step >= until:
      return {"draft/version": float(self._trained.version)}
    tokens = experience_lib.width(batch)
    new = [
        lessons_lib.of_answers(
            self._model, params, experience_lib.trim(one, tokens).group,
            one.state, step=self._step, version=version,
            schedule=self._schedule,
        )
        for one in batch
    ]
    self._buffer = buffer_lib.add(self._buffer, new)
    if self._trained is None:
      self._begin(params, new)
    rng, losses = np.random.default_rng((self._seed, self._step)), []
    for _ in range(self._studies.updates):
      self._trained, loss = self._trainer.update(
          self._trained, self._vocabulary, params,
          buffer_lib.draw(self._buffer, rng),
      )
      losses.append(float(loss))
    return {
        "draft/version": float(self._trained.version),
        "draft/loss": float(np.mean(losses)),
    }

  def _begin(self, params, new: list[lessons_lib.Lesson]) -> None:
    seen = [lessons_lib.prompt_ids(one) for one in new]
    for one in new:
      seen += [
          row[:length]
          for row, length in zip(one.tokens, one.lengths, strict=True)
      ]
    ids_U = vocabulary_lib.most_frequent(
        np.concatenate(seen), self._studies.vocabulary,
        self._model.config.vocab_size,
    )
    drafter = learned_lib.Learned.create(
        self._model, params, ids_U, jax.random.key(self._seed)
    )
    self._trained = self._trainer.create(drafter)
    self._vocabulary = drafter.vocabulary

  @contextlib.contextmanager
  def at(self, directory: pathlib.Path, params):
    """Keeps log and drafter in a folder while the context is open.

    The newest saved drafter there is restored. One that cannot be read is moved
    aside with a warning, and the drafter starts anew: only speed depends on it.

    Args:
      directory: the folder; it is made if missing.
      params: parameters of the model, or their shapes.
    """
    directory = pathlib.Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
      json_lines.mend(directory / DECISIONS)
      # Line by line, because the process may be killed at any time.
      self._log = stack.enter_context(
          (directory / DECISIONS).open("a", buffering=1)
      )
      stack.callback(setattr, self, "_log", None)
      if self._studies is not None:
        versions = directory / "versions"
        for version in step_folders.numbered(versions):
          if why := step_folders.lacks(versions / str(version), _ITEMS):
            step_folders.set_aside(versions, version, why)
        self._checkpoints = stack.enter_context(ocp.CheckpointManager(
            versions,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True),
        ))
        for version in step_folders.numbered(versions):
          try:
            self._restore(version, params)
            break
          except Exception as error:  # of any kind, depending on the damage
            step_folders.set_aside(
                versions, version, f"it is no drafter of this run ({error})"
            )
            self._checkpoints.reload()
      yield self
      if self._studies is not None:
        self._checkpoints.wait_until_finished()

  def save(self) -> float:
    """Saves the drafter in the background; returns the seconds that it blocked.

    A drafter that is not finite is not saved, which causes a warning.

    Raises:
      ValueError: orbax wrote nothing.
    """
    began = time.monotonic()
    if self._studies is not None and self._trained is not None:
      version = int(self._trained.version)
      if version != self._checkpoints.latest_step() and self._is_finite():
        if not self._checkpoints.save(
            version, args=ocp.args.StandardSave(self._saved())
        ):
          raise ValueError(
              f"Nothing was saved of version {version} of the drafter: "
              f"{self._checkpoints.directory} has later ones. Move them away."
          )
    return time.monotonic() - began

  def _is_finite(self) -> bool:
    try:
      checkpoints_lib.check_finite(self._trained.params, "The drafter")
    except ValueError as error:
      warnings.warn(str(error), stacklevel=3)
      return False
    return True

  def _saved(self) -> dict:
    return {
        "trained": self._trained, "vocabulary": self._vocabulary,
        "step": np.int32(self._step),
    }

  def _restore(self, version: int, params) -> None:
    def like(params):
      drafter = learned_lib.Learned.create(
          self._model, params, range(self._studies.vocabulary),
          jax.random.key(0),
      )
      return {
          "trained": self._trainer.create(drafter),
          "vocabulary": drafter.vocabulary, "step": np.int32(0),
      }

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
        jax.eval_shape(like, params),
    )
    found = self._checkpoints.restore(
        version, args=ocp.args.StandardRestore(shapes)
    )
    self._trained, self._vocabulary = found["trained"], found["vocabulary"]
    self._step = int(found["step"])

  def _write(self, decisions: list[tuner_lib.Decision]) -> None:
    if self._log is not None:
      for one in decisions:
        self._log.write(json_lines.dumps(one._asdict()) + "\n")
