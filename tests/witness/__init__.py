# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that a redesign must not move: gradients, memory, operations.

  library   all that is used of `branch_replay`, under its public names: where
            a name changes, this file alone follows;
  cases     two hundred gradients: models, data, modes, devices;
  steps     a dozen compiled steps;
  __main__  `python -m tests.witness` compares with tests/goldens/witness.npz,
            `python -m tests.witness --write` makes it.
"""
