# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Errors of what is computed from bfloat16, against float64 by numpy.

`python -m tests.bfloat16_checks` prints one JSON object: name → [error, limit],
or the traceback of a check that fails. bfloat16_test.py runs it in a process
whose XLA may not keep more digits than a program says. By default it may, and
on CPU does: what is narrowed by mistake keeps its digits, and no test notices.

References start from the inputs as they are rounded. So the limits leave room
for the roundings that are meant, of what is returned in bfloat16 and of
operands of matrix products, and for no other.
"""

import json
import sys
import traceback

from tests import bfloat16_layers
from tests import bfloat16_mixers
from tests import bfloat16_numbers as bf

MODULES = bfloat16_layers, bfloat16_mixers  # which fill the list of checks


def main(names):
  """Runs the checks of these names, or all."""
  found = {}
  for name in names or bf.CHECKS:
    try:
      found[name] = [float(x) for x in bf.CHECKS[name]()]
    except Exception:
      found[name] = traceback.format_exc()
  print(json.dumps(found))


if __name__ == "__main__":
  main(sys.argv[1:])
