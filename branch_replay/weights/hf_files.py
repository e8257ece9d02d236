# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens the tensors of a Hugging Face directory: one file, or shards."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import pathlib
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from branch_replay.weights import hf_experts
from branch_replay.weights import hf_text
from branch_replay.weights import stacking

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


def read_json(directory: pathlib.Path, name: str) -> dict[str, Any]:
  """A parsed file; raises ValueError if it is missing or no JSON."""
  path = directory / name
  if not path.is_file():
    raise ValueError(
        f"{path} does not exist: pass a directory with config.json and "
        f"{WEIGHTS} or {INDEX}."
    )
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error


class Tensor(NamedTuple):
  """A tensor of an open file, by its name there, or an expert's part of it."""

  file: Any
  name: str
  part: hf_experts.Matrix | None = None

  @property
  def dtype(self) -> str:
    return self.file.get_slice(self.name).get_dtype()

  @property
  def shape(self) -> tuple[int, ...]:
    if self.part is not None:
      return self.part.shape
    return tuple(self.file.get_slice(self.name).get_shape())

  def read(self) -> np.ndarray:
    if self.part is not None:
      return self.part.read(self.file.get_slice(self.name))
    return self.file.get_tensor(self.name)

  def split(self, name: str, width: int) -> dict[str, Tensor]:
    """Itself by its name in the decoder, or the matrices of each expert."""
    parts = hf_experts.matrices(name, self.shape, width)
    return {x: self._replace(part=part) for x, part in parts.items()} or {
        name: self
    }


def open_tensors(
    directory: pathlib.Path, whole: dict[str, Any], stack: contextlib.ExitStack
) -> dict[str, Tensor]:
  """The decoder's tensors by their names, of one file or all shards.

  Args:
    directory: that of the files.
    whole: the parsed config.json.
    stack: files stay open as long as it does.

  Raises:
    ValueError: a file is missing or damaged, or a tensor lost or there twice.
  """
  own_name = hf_text.namer(whole)
  width = hf_text.text_part(whole).get("hidden_size")
  if (directory / WEIGHTS).is_file() and (directory / INDEX).is_file():
    raise ValueError(
        f"{directory} holds {WEIGHTS} and {INDEX}, two sets of weights: "
        "delete the one that is not meant."
    )
  if (directory / WEIGHTS).is_file():
    files, promised = [WEIGHTS], {}
  else:
    promised = read_json(directory, INDEX).get("weight_map")
    if not isinstance(promised, dict):
      raise ValueError(f"{directory / INDEX} has no weight_map.")
    files = sorted(set(promised.values()))
  handles, left_out = {}, []
  for file in files:
    try:
      handle = stack.enter_context(
          safetensors.safe_open(directory / file, framework="numpy")
      )
    except (OSError, safetensors.SafetensorError) as error:
      raise ValueError(
          f"{directory / file} is missing or damaged ({error}): copy it again."
      ) from error
    for stored in handle.keys():
      name = own_name(stored)
      if name is None:
        left_out.append(stored)
        continue
      tensors = Tensor(handle, stored).split(name, width)
      if tensors.keys() & handles.keys():
        raise ValueError(f"{stored} is in two shards of {directory}.")
      handles |= tensors
  if left_out:
    logging.getLogger(__name__).warning(
        "%s: %d tensors are not of the decoder of text and are left out: %s.",
        directory, len(left_out), stacking.listed(left_out, limit=3),
    )
  there = {tensor.name for tensor in handles.values()}
  if lost := {
      name for name in promised if own_name(name) is not None
  } - there:
    raise ValueError(
        f"{directory / INDEX} promises {stacking.listed(lost)}, which no "
        "shard holds: copy the shards again."
    )
  return handles


def dtype_of(handles: dict[str, Tensor]) -> str:
  """The widest dtype of tensors; raises ValueError if one is no float."""
  dtypes = set()
  for tensor in handles.values():
    if tensor.dtype not in _DTYPES:
      raise ValueError(
          f"{tensor.name} is stored as {tensor.dtype}: only "
          f"{', '.join(_DTYPES)} are supported, so a quantised checkpoint must "
          "be dequantised first."
      )
    dtypes.add(jnp.dtype(_DTYPES[tensor.dtype]))
  return str(functools.reduce(jnp.promote_types, sorted(dtypes, key=str)))
