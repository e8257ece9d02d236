# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Saves a learned drafter as drafter.safetensors and drafter.json."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from branch_replay.models import decoder
from branch_replay.rollout.drafters import learned

_WEIGHTS, _ABOUT = "drafter.safetensors", "drafter.json"


def save(directory: str | os.PathLike, drafter: learned.Learned) -> None:
  """Writes a drafter to a directory; tensor names are parameter paths.

  Args:
    directory: the directory; it is made if missing.
    drafter: the drafter, whose vocabulary is saved too.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  leaves = jax.tree.leaves_with_path(drafter.params)
  tensors = {_name(path): np.ascontiguousarray(x) for path, x in leaves}
  safetensors_numpy.save_file(
      tensors | {"vocabulary": np.asarray(drafter.vocabulary)},
      directory / _WEIGHTS,
  )
  about = json.dumps({"kind": "learned"}, indent=1) + "\n"
  (directory / _ABOUT).write_text(about)


def load(
    directory: str | os.PathLike, model: decoder.Decoder, params
) -> learned.Learned:
  """Reads a drafter for a model.

  Args:
    directory: a directory that `save` wrote.
    model: the decoder it drafts for.
    params: the decoder's parameters, or their shapes.

  Returns:
    The drafter.

  Raises:
    ValueError: files are missing or damaged, or the drafter was made for a
      model of another geometry.
  """
  directory = pathlib.Path(directory)
  try:
    about = json.loads((directory / _ABOUT).read_text())
    tensors = safetensors_numpy.load_file(directory / _WEIGHTS)
  except (OSError, ValueError, safetensors.SafetensorError) as error:
    raise ValueError(f"No drafter in {directory}: {error}") from error
  if about.get("kind") != "learned" or "vocabulary" not in tensors:
    raise ValueError(f"{directory / _ABOUT} does not name a learned drafter.")
  vocabulary = tensors.pop("vocabulary")
  shapes = jax.eval_shape(
      lambda params: learned.Learned.create(
          model, params, vocabulary, jax.random.key(0)
      ).params,
      params,
  )
  wanted = {
      _name(path): x.shape for path, x in jax.tree.leaves_with_path(shapes)
  }
  found = {name: x.shape for name, x in tensors.items()}
  if found != wanted:
    name = min(
        name for name in wanted.keys() | found.keys()
        if wanted.get(name) != found.get(name)
    )
    raise ValueError(
        f"{directory} drafts for a model of another geometry: {name} has shape "
        f"{found.get(name)}, this model needs {wanted.get(name)}."
    )
  loaded = jax.tree.map_with_path(
      lambda path, _: jnp.asarray(tensors[_name(path)]), shapes
  )
  return learned.Learned(loaded, jnp.asarray(vocabulary, jnp.int32))


def _name(path) -> str:
  return ".".join(key.key for key in path)

