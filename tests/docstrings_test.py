# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings run."""

import doctest
import importlib
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
