# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face hub, by their names."""

import os
import pathlib
import re

import huggingface_hub
from huggingface_hub import errors

from branch_replay import checks

_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def folder(
    name: str | os.PathLike, *, revision: str | None = None
) -> pathlib.Path:
  """The directory of a model: a path as it is, or the cached copy of the hub's.

  Files that the cache lacks are downloaded. Without a network, or with
  HF_HUB_OFFLINE=1, the cache is read alone.

  Args:
    name: a directory, or "org/name" if no file or directory has that path.
    revision: branch, tag or commit on the hub; None for its main branch.

  Raises:
    ValueError: there is no such directory, and it cannot be had from the hub;
      or a revision of a directory.
  """
  path = checks.path(name, "directory")
  if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)):
    if revision is not None:
      raise ValueError(
          f"revision={revision!r} is for models of the hub, and {str(name)!r} "
          "is a path."
      )
    return path
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        str(name), revision=revision, allow_patterns=list(_FILES)
    ))
  except (OSError, ValueError, errors.HfHubHTTPError) as error:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise ValueError(
        f"{str(name)!r} is no directory here, and as a model of the Hugging "
        f"Face hub it cannot be had: {said} Write a path as './{name}'; a "
        "private model needs `hf auth login`; without a network it must be in "
        "the cache."
    ) from error
