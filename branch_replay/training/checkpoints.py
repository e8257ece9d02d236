# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, written by orbax: train state and progress.

A checkpoint is written under a temporary name and renamed when it is complete,
so a process that is killed while it saves leaves the previous checkpoint as the
latest. A train state saved on any number of devices can be restored on any
other. Parameters that are not finite are never saved.
"""

import pathlib
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from branch_replay.training import step as step_lib
from branch_replay.training import step_folders

_ITEMS = ("progress", "train_state")
_RUN = "run"


class Progress(NamedTuple):
  """How far a run is.

  Attributes:
    step: steps done, of all phases.
    position: position of the next example of the current phase.
    seed: the run's seed; a resumed run must have the same.
  """

  step: int
  position: int
  seed: int


class Damaged(Exception):
  """Raised for a checkpoint that looks complete and cannot be read."""


class Checkpoints:
  """The latest train states of a run, and its reference policies.

  Args:
    directory: where they are; it is made if missing.
    max_to_keep: number of latest train states that are kept.
  """

  def __init__(self, directory: pathlib.Path, *, max_to_keep: int = 2):
    self._directory = pathlib.Path(directory).resolve()
    self._steps = self._directory / "steps"
    self._manager = ocp.CheckpointManager(
        self._steps,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, create=True
        ),
    )
    self._saved = None

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, *_) -> None:
    self.wait()
    self._manager.close()

  def wait(self) -> None:
    """Waits until what is being saved is complete."""
    self._manager.wait_until_finished()

  def latest(self) -> int | None:
    """Steps done in the latest complete checkpoint, or None."""
    return next(iter(step_folders.complete(self._steps, _ITEMS)), None)

  def recover(self) -> None:
    """Moves folders that are not complete checkpoints aside, with a warning.

    Only the process that trains may call this, before it resumes. To any other
    process a checkpoint that is still being written looks incomplete.
    """
    for step in step_folders.numbered(self._steps):
      why = step_folders.lacks(self._steps / str(step), _ITEMS)
      if why:
        step_folders.set_aside(self._steps, step, why)
    self._manager.reload()

  def set_aside(self, step: int, why: str) -> None:
    """Moves the checkpoint of one step aside, with a warning."""
    step_folders.set_aside(self._steps, step, why)
    self._manager.reload()

  def save(
      self, train_state: step_lib.TrainState, progress: Progress,
      run: dict | None = None,
  ) -> None:
    """Saves a checkpoint in the background, unless this step was saved before.

    Args:
      train_state: the train state.
      progress: how far the run is.
      run: description of the run, see `identity`; None to save none.

    Raises:
      ValueError: parameters that are not finite, or orbax wrote nothing.
    """
    if progress.step in (self._saved, self.latest()):
      return
    check_finite(train_state, f"step {progress.step}")
    items = dict(
        train_state=ocp.args.StandardSave(train_state),
        progress=ocp.args.JsonSave(progress._asdict()),
    )
    if run is not None:
      items[_RUN] = ocp.args.JsonSave(run)
    if not self._manager.save(progress.step, args=ocp.args.Composite(**items)):
      raise ValueError(
          f"Nothing was saved of step {progress.step}: {self._steps} has "
          f"folders of the steps {step_folders.numbered(self._steps)}. Move "
          "those of this step and later ones away."
      )
    self._saved = progress.step

  def progress(self) -> Progress | None:
    """The progress of the latest checkpoint; no arrays are read."""
    step = self.latest()
    if step is None:
      return None
    found = self._manager.restore(
        step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())
    )
    return Progress(**found["progress"])

  def run(self) -> dict | None:
    """The run description in the latest checkpoint; None if there is none."""
    step = self.latest()
    if step is None or not (self._steps / str(step) / _RUN).exists():
      return None
    found = self._manager.restore(
        step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()})
    )
    return found[_RUN]

  def restore(self, like) -> step_lib.TrainState:
    """Reads the latest train state.

    Args:
      like: a train state of `jax.ShapeDtypeStruct`, with the shardings the
        arrays are to have.

    Raises:
      ValueError: there is no checkpoint, or its arrays have other names, shapes
        or dtypes.
      Damaged: its arrays cannot be read.
    """
    step = self.latest()
    if step is None:
      raise ValueError(f"No checkpoint in {self._directory}.")
    self._check_arrays(step, like)
    try:
      found = self._manager.restore(
          step,
          args=ocp.args.Composite(train_state=ocp.args.StandardRestore(like)),
      )
    except Exception as error:  # of any kind, depending on the damage
      raise Damaged(f"its arrays cannot be read ({error})") from error
    return found["train_state"]

  def _check_arrays(self, step: int, like) -> None:
    """Compares shapes and dtypes; orbax would cast dtypes without a word."""
    try:
      found = ocp.StandardCheckpointHandler().metadata(
          self._steps / str(step) / "train_state"
      )
      there = _arrays(found.tree)
    except Exception as error:  # of any kind, depending on the damage
      raise Damaged(f"its arrays cannot be read ({error})") from error
    here = _arrays(like)
    differ = [
        f"{name}: {there.get(name, 'missing')} there, "
        f"{here.get(name, 'missing')} here"
        for name in dict.fromkeys([*there, *here])
        if there.get(name) != here.get(name)
    ]
    if differ:
      raise ValueError(
          f"The checkpoint of step {step} in {self._directory} has "
          f"{len(differ)} other arrays than this run: "
          f"{'; '.join(differ[:4])}. Take another workdir."
      )

  def save_reference(self, phase: int, params) -> None:
    """Saves the reference policy of a phase, and waits until it is written.

    Args:
      phase: number of the phase. Every phase has its own file, because a run
        may resume in an earlier one.
      params: parameters of the reference policy.

    Raises:
      ValueError: parameters that are not finite.
    """
    check_finite(params, f"the reference of phase {phase}")
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(self._reference(phase), params, force=True)

  def restore_reference(self, phase: int, like) -> Any:
    """Reads the reference policy of a phase, placed like the given shapes."""
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._reference(phase), like)

  def _reference(self, phase: int) -> pathlib.Path:
    return self._directory / "references" / str(phase)


def check_finite(tree, where: str) -> None:
  """Raises ValueError, naming the arrays, if some are not finite.

  In the optimizer's state only NaN is refused, because some optimizers start
  with infinities.

  Args:
    tree: a train state, or parameters.
    where: what the message calls the tree.
  """
  bad = [name for name, fine in zip(
      _arrays(tree), jax.device_get(_finite(tree)), strict=True
  ) if not fine]
  if bad:
    raise ValueError(
        f"{where} has NaN or infinity in {len(bad)} arrays, "
        f"{', '.join(bad[:4])}{' and others' if len(bad) > 4 else ''}: they "
        "are not saved."
    )


@jax.jit
def _finite(tree):
  """One bool for every array, computed in one pass over all of them."""
  def fine(path, x):
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      return jnp.bool_(True)
    of_optimizer = _name(path).startswith("optimizer.")
    return jnp.all(~jnp.isnan(x) if of_optimizer else jnp.isfinite(x))

  return jax.tree.leaves(jax.tree_util.tree_map_with_path(fine, tree))


def _arrays(tree) -> dict[str, str]:
  """Dtype and shape of every array, by its path."""
  leaves = jax.tree_util.tree_flatten_with_path(
      tree, is_leaf=lambda x: hasattr(x, "dtype")
  )[0]
  return {
      _name(path): f"{np.dtype(x.dtype).name}{list(np.shape(x))}"
      for path, x in leaves
  }


def _name(path) -> str:
  """A path as in "params.embed", for fields, keys and indices alike."""
  return ".".join(
      str(next(
          getattr(key, field) for field in ("name", "key", "idx")
          if hasattr(key, field)
      ))
      for key in path
  )


def shapes(train_state, where=None):
  """Shapes, dtypes and shardings of a tree, to restore it by.

  Args:
    train_state: a tree of arrays or of shapes.
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
