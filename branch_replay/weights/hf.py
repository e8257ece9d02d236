# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face directories: safetensors and configuration."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import functools
import json
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.weights import hf_config
from branch_replay.weights import hf_files
from branch_replay.weights import hf_tensors
from branch_replay.weights import hf_text
from branch_replay.weights import hub
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import stacking
from branch_replay.weights import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  import transformers


def load_hf(
    directory: str | os.PathLike,
    *,
    revision: str | None = None,
    param_dtype: str | None = None,
    compute_dtype: str = "float32",
    with_tokenizer: bool = True,
) -> pretrained_lib.Pretrained:
  """Loads a Llama, Mistral, Qwen, Gemma 3 or DeepSeek model.

  `hf_config.FAMILIES` lists the families, docs/models.md published models of
  them. Families that store the scales of norms minus 1 (Gemma 3, Qwen3.5,
  Qwen3-Next) have parameters that are the scales minus 1 too: see
  `ModelConfig.norms_from_one`.

  Reads config.json and model.safetensors, or the shards that
  model.safetensors.index.json names; also generation_config.json if present,
  and the tokenizer files through `transformers`.

  Of a model that reads images too (`hf_text.IMAGES`) the text part is loaded.
  Its image part is left out, as are heads that predict later tokens, and
  logged in one line.

  Args:
    directory: a directory as `transformers` writes it, or the name of a model
      on the hub, "org/name", see `hub.folder`.
    revision: branch, tag or commit of a model on the hub.
    param_dtype: dtype of the parameters; None for that of the files.
    compute_dtype: dtype of activations and matrix products.
    with_tokenizer: False leaves the tokenizer out, for a directory whose
      tokenizer `transformers` cannot load.

  Returns:
    Model, parameters, tokenizer and special ids. Parameters are put on the
    default device: use `jax.default_device` of a CPU to place them yourself.

  Raises:
    ValueError: a file is missing or damaged; the configuration asks for
      something `Decoder` does not compute; tensors are missing, unexpected,
      misshapen, not floats, or there twice; a tied model's file has a head that
      differs from the embedding; or the tokenizer cannot be loaded.
  """
  directory = hub.folder(directory, revision=revision)
  whole = hf_files.read_json(directory, "config.json")
  mapping = hf_text.text_part(whole)
  with contextlib.ExitStack() as stack:
    handles = hf_files.open_tensors(directory, whole, stack)
    dtype = hf_files.dtype_of(handles) if param_dtype is None else param_dtype
    config = hf_config.config_from_hf(
        mapping,
        param_dtype=dtype,
        compute_dtype=compute_dtype,
    )
    stored = hf_tensors.tensors(config, mapping)
    shapes = _shapes(config)
    _check_tensors(
        config, hf_tensors.file_shapes(stored, shapes), handles, directory
    )
    read = hf_tensors.reader(
        stored, shapes, lambda name: handles[name].read()
    )
    params = stacking.stack(config, stacking.HF_NAMES, read)
  return pretrained_lib.Pretrained(
      decoder.Decoder(config), params,
      tokenizer_lib.load(directory) if with_tokenizer else None,
      **_ids(directory, whole | mapping),
  )


def stored_dtype(directory: str | os.PathLike) -> str:
  """The dtype of a directory's weights; the widest if there are several.

  Raises:
    ValueError: weights are missing, damaged or not floats.
  """
  directory = hub.folder(directory)
  whole = hf_files.read_json(directory, "config.json")
  with contextlib.ExitStack() as stack:
    return hf_files.dtype_of(hf_files.open_tensors(directory, whole, stack))


def _shapes(config) -> dict[str, tuple[int, ...]]:
  slots = stacking.slots(config, stacking.HF_NAMES)
  return {name: slot.shape for name, slot in slots.items()}


def _check_tensors(config, wanted, handles, directory):
  found = {name: tensor.shape for name, tensor in handles.items()}
  head = stacking.HF_NAMES["head/table"]
  extra_head = config.tied_embeddings and found.pop(head, None) is not None
  stacking.check(wanted, found, str(directory))
  embedding = stacking.HF_NAMES["embed/table"]
  if extra_head and not np.array_equal(
      handles[head].read(), handles[embedding].read()
  ):
    raise ValueError(
        f"{directory}: config.json ties the head to the embedding, but {head} "
        f"differs from {embedding}. Set tie_word_embeddings to false to use "
        "the head, or delete it to use the embedding."
    )


def _ids(directory, mapping) -> dict[str, Any]:
  """Stop ids and bos id, from generation_config.json or else config.json."""
  generation = {}
  if (directory / "generation_config.json").is_file():
    generation = hf_files.read_json(directory, "generation_config.json")

  def named(key):
    value = generation.get(key)
    return mapping.get(key) if value is None else value

  stop_ids = named("eos_token_id")
  if stop_ids is None:
    stop_ids = ()
  elif isinstance(stop_ids, int):
    stop_ids = (stop_ids,)
  return {"stop_ids": tuple(stop_ids), "bos_id": named("bos_token_id")}


def save_pretrained(
    directory: str | os.PathLike, pretrained: pretrained_lib.Pretrained
):
  """Writes a model with its tokenizer and stop ids; see `save_hf`."""
  save_hf(
      directory, pretrained.config, pretrained.params,
      tokenizer=pretrained.tokenizer, stop_ids=pretrained.stop_ids,
      bos_id=pretrained.bos_id,
  )


def save_hf(
    directory: str | os.PathLike,
    config: config_lib.ModelConfig,
    params: Mapping[str, Any],
    *,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
    stop_ids: tuple[int, ...] = (),
    bos_id: int | None = None,
):
  """Writes a directory that `load_hf` and transformers can read.

  `load_hf` returns bit-equal parameters. All files are written under temporary
  names and renamed at the end, so a save that fails leaves an earlier export as
  it was. Files this call does not write, such as the tokenizer of an earlier
  export, are left alone. The host holds one copy of the parameters meanwhile.

  Args:
    directory: the directory; it is made if missing.
    config: configuration of the model.
    params: parameters of `Decoder`; each tensor keeps its dtype.
    tokenizer: tokenizer of `transformers`, written with its chat template; see
      `tokenizer.save` for its special tokens.
    stop_ids: ids that end a response, for generation_config.json. The token
      that ends a turn in the chat template is added.
    bos_id: id that begins a sequence.

  Raises:
    ValueError: no published family has the config; the parameters do not fit
      it; an id is outside the vocabulary; or the directory holds a sharded
      export, which readers would mix with this one.
  """
  directory = checks.path(directory, "directory")
  checks.instance(config, "config", config_lib.ModelConfig)
  checks.params_tree(params)
  if (directory / hf_files.INDEX).exists():
    raise ValueError(
        f"{directory / hf_files.INDEX} belongs to a sharded export: save "
        "elsewhere, or delete that export first."
    )
  end_of_turn, stop_ids = pretrained_lib.turn_ends(tokenizer, stop_ids)
  pretrained_lib.check_ids(config, stop_ids, bos_id)
  mapping = hf_config.config_to_hf(config)
  tensors = hf_tensors.to_file(
      hf_tensors.tensors(config, mapping),
      stacking.unstack(config, stacking.HF_NAMES, params),
  )
  stored = functools.reduce(
      jnp.promote_types, sorted({t.dtype for t in tensors.values()}, key=str)
  )
  mapping["torch_dtype"] = str(stored)
  ids = _id_fields(stop_ids, bos_id)
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=directory, prefix=".export-") as name:
    staged = pathlib.Path(name)
    safetensors_numpy.save_file(
        tensors, staged / hf_files.WEIGHTS, metadata={"format": "pt"}
    )
    _write_json(staged / "config.json", mapping | ids)
    # Not in config.json, where it would freeze a row of the embedding.
    pad = {}
    if tokenizer is not None:
      pad_id = tokenizer_lib.save(
          staged, tokenizer, end_of_turn=end_of_turn, stop_ids=stop_ids,
          vocab_size=config.vocab_size,
      )
      pad = {} if pad_id is None else {"pad_token_id": pad_id}
    if ids | pad:
      _write_json(staged / "generation_config.json", ids | pad)
    # safetensors makes its file readable by the owner alone.
    (staged / hf_files.WEIGHTS).chmod((staged / "config.json").stat().st_mode)
    written = {str(path.relative_to(staged)) for path in _files(staged)}
    for path in sorted(_files(staged)):
      place = directory / path.relative_to(staged)
      place.parent.mkdir(exist_ok=True)
      os.replace(path, place)
  if tokenizer is not None:
    for path in tokenizer_lib.stale(directory, written):
      path.unlink()


def _files(folder):
  return [path for path in folder.rglob("*") if path.is_file()]


def _id_fields(stop_ids, bos_id):
  fields = {}
  if bos_id is not None:
    fields["bos_token_id"] = bos_id
  if stop_ids:
    fields["eos_token_id"] = (
        stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    )
  return fields


def _write_json(path, mapping):
  path.write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")
