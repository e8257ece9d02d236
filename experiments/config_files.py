# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the files of configs/, and lists their fields with their meanings."""

import ast
import difflib
import importlib.util
import pathlib
import re
import textwrap

from experiments.reporting import record

_WIDTH = 80


def load(name: str, root: pathlib.Path, experiment: str):
  """A config file, and the config of one of its variants.

  Args:
    name: a path, or PATH:VARIANT, from here or from `root`.
    root: folder that holds configs/.
    experiment: the experiment that reads it. A file whose docstring has the
      command of another one is refused.

  Returns:
    The module, and the ConfigDict.

  Raises:
    ValueError: no such file or variant, or one of another experiment.
  """
  file, _, variant = name.partition(":")
  path = next((x for x in (pathlib.Path(file), root / file) if x.is_file()),
              None)
  if path is None:
    files = [f"configs/{x.name}" for x in (root / "configs").glob("*.py")]
    near = difflib.get_close_matches(file, files, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"there is no config {file}.{hint}")
  spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, "get_config"):
    raise ValueError(f"{file} has no get_config: it is no config.")
  commands = re.findall(r"-m experiments\.(\w+)", module.__doc__ or "")
  if commands and experiment not in commands:
    raise ValueError(
        f"{file} is a config of another experiment: python -m experiments."
        f"{commands[0]} --config={name}"
    )
  return module, module.get_config(*([variant] if variant else []))


def listing(name: str, module, config) -> str:
  """All fields of a config, with their values and meanings.

  Meanings are what the module's function `meanings` says, and the comments
  beside the fields in the file.
  """
  said = _comments(pathlib.Path(module.__file__).read_text())
  if hasattr(module, "meanings"):
    said |= module.meanings(config)
  lines = [f"Fields of {name}, --config.<field>=<value>:", ""]
  for path, value in record.flat(config.to_dict()).items():
    lines += textwrap.wrap(
        f"{path}={value!r}", _WIDTH, initial_indent="  ",
        subsequent_indent="    ",
    )
    meaning = said.get(path) or said.get(path.split(".")[-1], "")
    lines += textwrap.wrap(
        meaning, _WIDTH, initial_indent="      ", subsequent_indent="      "
    )
  return "\n".join(lines)


def _comments(source: str) -> dict[str, str]:
  """Comments beside the keys of dicts, or alone on the line above, by key."""
  lines, found = source.splitlines(), {}
  for node in ast.walk(ast.parse(source)):
    if not isinstance(node, ast.Dict):
      continue
    for key in node.keys:
      if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        continue
      beside = lines[key.lineno - 1].partition("  # ")[2]
      above = lines[key.lineno - 2].strip()
      above = above[2:] if above.startswith("# ") else ""
      found.setdefault(key.value, beside or above)
  return found
