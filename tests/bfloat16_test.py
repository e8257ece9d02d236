# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What bfloat16 models compute has the digits it should; bfloat16_checks.py."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import bfloat16_checks
from tests import bfloat16_numbers

ROOT = pathlib.Path(__file__).resolve().parent.parent
assert bfloat16_checks.MODULES


@pytest.fixture(scope="session")
def found(request):
  """Errors and limits of what is tested, by an XLA that rounds as it is told.

  One process for all of them: its flags are read once.
  """
  names = [
      item.callspec.params["name"] for item in request.session.items
      if item.nodeid.startswith("tests/bfloat16_test.py::")
  ]
  flags = os.environ.get("XLA_FLAGS", "")
  process = subprocess.run(
      [sys.executable, "-m", "tests.bfloat16_checks", *names], cwd=ROOT,
      check=True, stdout=subprocess.PIPE, text=True,
      env=os.environ | {
          "XLA_FLAGS": f"{flags} --xla_allow_excess_precision=false"
      },
  )
  return json.loads(process.stdout)


@pytest.mark.exhaustive(but=("softmax", "norm"))
@pytest.mark.parametrize("name", bfloat16_numbers.CHECKS)
def test_digits(name, found):
  outcome = found[name]
  assert not isinstance(outcome, str), outcome
  error, limit = outcome
  assert error <= limit, f"{name}: {error:.3g} is more than {limit:.3g}"
