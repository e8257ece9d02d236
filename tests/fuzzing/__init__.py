# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Random small problems, made from seeds, against a dense reference.

  problems   draws a problem: model, data, and how it is run;
  parameters fills a model's parameters by numpy, by their names;
  reference  a decoder of its own, dense, differentiated as it stands;
  wanted     the gradient that a problem should have, by the reference;
  found      the gradient that `branch_replay` gives;
  __main__   the command: `python -m tests.fuzzing --seeds=0:1000`.
"""
