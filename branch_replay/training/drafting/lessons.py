# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Lessons: answers a drafter learns from, and how they are packed into rows."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from branch_replay.data import group as group_lib
from branch_replay.engine import gradients
from branch_replay.engine import prefix
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import Schedule
from branch_replay.models import decoder
from branch_replay.rollout.drafters import learned
from branch_replay.rollout.drafters import learned_loss


class Lesson(NamedTuple):
  """Answers to one prompt with the model's hidden states, on the host.

  Attributes:
    step: step of the run in which they were sampled.
    tokens: i32[G, T].
    lengths: i32[G].
    hidden: [G, T, M]; [g, t] is the hidden state token [g, t] was drawn from.
    prompt: captured state of the prompt, reduced to the layer the drafter
      reads.
  """

  step: int
  tokens: np.ndarray
  lengths: np.ndarray
  hidden: np.ndarray
  prompt: state_lib.PrefixState

  @property
  def count(self) -> int:
    """Tokens of all answers together."""
    return int(self.lengths.sum())


def of_answers(
    model: decoder.Decoder,
    params,
    group: group_lib.Group,
    state: state_lib.PrefixState,
    *,
    step: int,
    version: int | None = None,
    schedule: Schedule = Schedule(),
) -> Lesson:
  """Makes the lesson of a group by replaying its tails; its prompt is not run.

  Args:
    model: the decoder.
    params: the parameters that sampled the answers, on one device.
    group: prompt and answers.
    state: captured state of the prompt, left by sampling.
    step: step of the run.
    version: u32 that stands for `params`, if the state is not marked with a
      fingerprint.
    schedule: sizes and policies of the replay.

  Returns:
    The lesson.

  Raises:
    ValueError: the state is of another prompt or of other parameters.
  """
  prefix.check_samplable(state, model, params, group, version)
  hidden_GTM = _hidden(model, schedule, params, group, state, version)
  return Lesson(
      step, *jax.device_get((
          group.tails, group.tail_lengths, hidden_GTM,
          learned.last_layer(state),
      ))
  )


# Outside of `jit` every call would compile its scans anew.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _hidden(model, schedule, params, group, state, version):
  return gradients.replay(
      model, params, group, state=state, version=version,
      readout=readout_lib.Hidden(), prefix_gradient="stop", schedule=schedule,
  )


def pack(lesson: Lesson, rows: int, width: int) -> learned_loss.PackedAnswers:
  """Packs the longest answers of a lesson into rows, as many as fit.

  Each answer goes to the fullest row that has room for it. Answers of one token
  teach nothing and are left out. Answers longer than a row lose their end.

  Args:
    lesson: a lesson of any shape.
    rows: N, number of rows.
    width: T, tokens of a row.
  """
  packed = learned_loss.PackedAnswers(
      np.zeros((rows, width, lesson.hidden.shape[-1]), lesson.hidden.dtype),
      *np.zeros((2, rows, width), np.int32),
  )
  used = np.zeros(rows, int)
  for number, answer in enumerate(np.argsort(-lesson.lengths, kind="stable")):
    tokens = min(int(lesson.lengths[answer]), width)
    fits = np.flatnonzero(used + tokens <= width)
    if tokens < 2 or not fits.size:
      continue
    row = fits[np.argmax(used[fits])]
    at = row, slice(used[row], used[row] + tokens)
    packed.hidden_NTM[at] = lesson.hidden[answer, :tokens]
    packed.tokens_NT[at] = lesson.tokens[answer, :tokens]
    packed.segments_NT[at] = number + 1
    used[row] += tokens
  return packed


def prompt_ids(lesson: Lesson) -> np.ndarray:
  """i32: ids of a lesson's captured prompt, without padding."""
  return lesson.prompt.tokens[: int(lesson.prompt.length)]


def on_device(lesson: Lesson) -> state_lib.PrefixState:
  """Moves the captured prompt of a lesson to the default device."""
  return jax.tree.map(
      jax.numpy.asarray, dataclasses.replace(
          lesson.prompt, kept=None, attended={}
      )
  )
