# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay itself, from the public functions down to one layer.

  gradients    the public functions: replay, log_probs, value_and_grad
  dense        dense_log_probs, the slow reference that runs sequences whole
  prefix       capture, extend, and what a state must be to be replayed
  schedule     sizes and policies, which never change the result
  spec         the static settings of a computation, and what it returns
  compiled     the driver under jit, which loops over a group
  hosted       the driver in Python, which runs a program step by step
  hosted_steps   its steps, a compiled program each
  draws        its draws of which runs "sampled" pulls back
  program      in what order a tree or a group is run
  runs         the unit of work: rows of tokens at the same positions
  steps        push, visit and pop of one run
  segment      runs a segment of tokens through all layers, and pulls it back
  decoding     runs new tokens of every branch, for sampling

  state        what a prefix leaves behind
  readout      what is computed from hidden states: log-probs, …
  band         which pairs of positions "banded" sends cotangents between
  estimators   laws by which "sampled" chooses the runs it pulls back

  balance      the load-balance term of mixtures of experts
  fingerprint  what a state belongs to: parameters to the last bit, config

It is called engine, not replay, because `branch_replay.replay` is a function.
"""
