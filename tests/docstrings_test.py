# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run; public names say what they are."""

import doctest
import importlib
import inspect
import pkgutil

import branch_replay as br

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(br.__path__, "branch_replay.")
]


def test_examples_in_docstrings():
  tried = 0
  for module in MODULES:
    result = doctest.testmod(module)
    assert not result.failed, module.__name__
    tried += result.attempted
  assert tried >= 8


def _says(value) -> bool:
  """Whether it has a docstring, and not one that Python made up."""
  text = (value.__doc__ or "").strip()
  return bool(text) and not text.startswith(f"{value.__name__}(")


def test_every_public_function_says_what_it_does():
  silent = [
      f"{module.__name__}.{name}"
      for module in MODULES
      for name, value in vars(module).items()
      if (inspect.isfunction(value) or inspect.isclass(value))
      and value.__module__ == module.__name__
      and not name.startswith("_") and not _says(value)
  ]
  assert not silent
