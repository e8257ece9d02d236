# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: train state, data position, key; written by orbax.

A checkpoint is written under another name and renamed when it is complete, so
one that is killed while it saves leaves the one before as the latest. What was
saved on any number of devices is restored on any other.
"""

import pathlib
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from branch_replay.training import step as step_lib


class Progress(NamedTuple):
  """Where a run is.

  Attributes:
    step: steps done, of all phases.
    position: of the next example of the phase that runs now.
    seed: of the run, whose key is a function of it; a resumed run has the same.
  """

  step: int
  position: int
  seed: int


class Checkpoints:
  """The latest train states of a run, and its reference policy.

  Args:
    directory: made if needed; relative paths are resolved here, because orbax
      accepts them and fails later.
    keep: how many of the latest remain.
  """

  def __init__(self, directory: pathlib.Path, *, keep: int = 2):
    self._directory = pathlib.Path(directory).resolve()
    self._manager = ocp.CheckpointManager(
        self._directory / "steps",
        options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self._manager.wait_until_finished()
    self._manager.close()

  def latest(self) -> int | None:
    """Steps done in the latest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(self, train_state: step_lib.TrainState, progress: Progress) -> None:
    """Saves in the background; a step that is there already is left alone."""
    if progress.step == self.latest():
      return
    self._manager.save(
        progress.step,
        args=ocp.args.Composite(
            train_state=ocp.args.StandardSave(train_state),
            progress=ocp.args.JsonSave(progress._asdict()),
        ),
    )

  def progress(self) -> Progress | None:
    """Of the latest checkpoint, without its arrays."""
    step = self.latest()
    if step is None:
      return None
    found = self._manager.restore(
        step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())
    )
    return Progress(**found["progress"])

  def restore(self, like) -> step_lib.TrainState:
    """The latest train state.

    Args:
      like: a train state of `jax.ShapeDtypeStruct`, with the shardings it is
        to have here.

    Raises:
      ValueError: there is none, or it is of another shape.
    """
    step = self.latest()
    if step is None:
      raise ValueError(f"No checkpoint in {self._directory}.")
    found = self._manager.restore(
        step,
        args=ocp.args.Composite(train_state=ocp.args.StandardRestore(like)),
    )
    return found["train_state"]

  def save_reference(self, phase: int, params) -> None:
    """Saves what a phase stays close to, and waits for it.

    Args:
      phase: its number: a run that is resumed in an earlier phase needs that
        one's.
      params: of the reference policy.
    """
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(self._reference(phase), params, force=True)

  def restore_reference(self, phase: int, like) -> Any:
    """What `save_reference` saved, placed like the given shapes."""
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._reference(phase), like)

  def _reference(self, phase: int) -> pathlib.Path:
    return self._directory / "references" / str(phase)


def shapes(train_state, where=None):
  """A tree of shapes to restore by.

  Args:
    train_state: arrays or shapes.
    where: a tree of shardings, or None for the first device.
  """
  if where is None:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = jax.tree.map(lambda _: one, train_state)
  return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
          np.shape(x), x.dtype, sharding=sharding
      ),
      train_state, where,
  )
