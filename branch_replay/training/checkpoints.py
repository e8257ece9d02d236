# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: train state, data position, key; written by orbax.

A checkpoint is written under another name and renamed when it is complete, so
one that is killed while it saves leaves the one before as the latest. What was
saved on any number of devices is restored on any other. Parameters that are not
finite are never saved.
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
  """Where a run is.

  Attributes:
    step: steps done, of all phases.
    position: of the next example of the phase that runs now.
    seed: of the run, whose key is a function of it; a resumed run has the same.
  """

  step: int
  position: int
  seed: int


class Damaged(Exception):
  """A checkpoint that seems complete and cannot be read."""


class Checkpoints:
  """The latest train states of a run, and its reference policy.

  Args:
    directory: made if needed; relative paths are resolved here, because orbax
      accepts them and fails later.
    keep: how many of the latest remain.
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
    self._manager.wait_until_finished()
    self._manager.close()

  def latest(self) -> int | None:
    """Steps done in the latest complete checkpoint, or None."""
    return next(iter(step_folders.complete(self._steps, _ITEMS)), None)

  def recover(self) -> None:
    """Moves what is no complete checkpoint aside, and warns of it.

    For the process that trains, before it goes on: one that is looked at from
    elsewhere may be about to be completed.
    """
    for step in step_folders.numbered(self._steps):
      why = step_folders.lacks(self._steps / str(step), _ITEMS)
      if why:
        step_folders.set_aside(self._steps, step, why)
    self._manager.reload()

  def set_aside(self, step: int, why: str) -> None:
    """Moves one checkpoint aside, and warns of it."""
    step_folders.set_aside(self._steps, step, why)
    self._manager.reload()

  def save(
      self, train_state: step_lib.TrainState, progress: Progress,
      run: dict | None = None,
  ) -> None:
    """Saves in the background; a step that is there already is left alone.

    Args:
      train_state: what is saved.
      progress: where the run is.
      run: what it is, as JSON, see `identity`; None to say nothing of it.

    Raises:
      ValueError: parameters that are not finite, or nothing was written.
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
    """Of the latest checkpoint, without its arrays."""
    step = self.latest()
    if step is None:
      return None
    found = self._manager.restore(
        step, args=ocp.args.Composite(progress=ocp.args.JsonRestore())
    )
    return Progress(**found["progress"])

  def run(self) -> dict | None:
    """What the latest checkpoint says the run is; None if it says nothing."""
    step = self.latest()
    if step is None or not (self._steps / str(step) / _RUN).exists():
      return None
    found = self._manager.restore(
        step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()})
    )
    return found[_RUN]

  def restore(self, like) -> step_lib.TrainState:
    """The latest train state.

    Args:
      like: a train state of `jax.ShapeDtypeStruct`, with the shardings it is
        to have here.

    Raises:
      ValueError: there is none, or it has other arrays.
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
    except Exception as error:  # of many kinds, by what is damaged
      raise Damaged(f"its arrays cannot be read ({error})") from error
    return found["train_state"]

  def _check_arrays(self, step: int, like) -> None:
    """Shapes and dtypes; orbax would cast to other dtypes without a word."""
    try:
      found = ocp.StandardCheckpointHandler().metadata(
          self._steps / str(step) / "train_state"
      )
      there = _arrays(found.tree)
    except Exception as error:  # of many kinds, by what is damaged
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
    """Saves what a phase stays close to, and waits for it.

    Args:
      phase: its number: a run that is resumed in an earlier phase needs that
        one's.
      params: of the reference policy.

    Raises:
      ValueError: parameters that are not finite.
    """
    check_finite(params, f"the reference of phase {phase}")
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(self._reference(phase), params, force=True)

  def restore_reference(self, phase: int, like) -> Any:
    """What `save_reference` saved, placed like the given shapes."""
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._reference(phase), like)

  def _reference(self, phase: int) -> pathlib.Path:
    return self._directory / "references" / str(phase)


def check_finite(tree, where: str) -> None:
  """Raises ValueError, with their names, for arrays that are not finite.

  Of an optimizer's state NaN alone is refused: some begin with infinity.

  Args:
    tree: a train state, or parameters.
    where: for the message.
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
  """For every array whether it is finite: all in one pass over them."""
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
  """As in "params.embed", for fields, keys and places alike."""
  return ".".join(
      str(next(
          getattr(key, field) for field in ("name", "key", "idx")
          if hasattr(key, field)
      ))
      for key in path
  )


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
