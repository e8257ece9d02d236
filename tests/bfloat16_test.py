# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What bfloat16 models compute has the digits it should; bfloat16_checks.py."""

import functools
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


@functools.cache
def found():
  """Errors and limits, from a process with an XLA that rounds as it is told."""
  flags = os.environ.get("XLA_FLAGS", "")
  process = subprocess.run(
      [sys.executable, "-m", "tests.bfloat16_checks"], cwd=ROOT, check=True,
      stdout=subprocess.PIPE, text=True,
      env=os.environ | {
          "XLA_FLAGS": f"{flags} --xla_allow_excess_precision=false"
      },
  )
  return json.loads(process.stdout)


@pytest.mark.parametrize("name", bfloat16_numbers.CHECKS)
def test_digits(name):
  outcome = found()[name]
  assert not isinstance(outcome, str), outcome
  error, limit = outcome
  assert error <= limit, f"{name}: {error:.3g} is more than {limit:.3g}"
