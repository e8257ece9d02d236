# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay itself, from the public functions down to one layer.

  gradients    the public functions: replay, log_probs, value_and_grad
  prefix       capture, extend, and what a state must be to be replayed
  schedule     sizes and policies, which never change the result
  spec         the static half of a computation, and what is returned
  compiled     the driver under jit: the loops of a group
  hosted       the driver in Python: the steps of a program
  program      in what order a tree or a group is run
  runs         the unit of work: rows of tokens at the same positions
  steps        push, visit and pop of one run
  segment      a segment of tokens through all layers, there and back
  state        what a prefix leaves behind
  readout      what is read of hidden states
  estimators   which runs "sampled" pulls back
  balance      the load-balance term of mixtures of experts
  fingerprint  what a state belongs to: parameters to the last bit, config

It is called engine, not replay, because `branch_replay.replay` is a function.
"""
