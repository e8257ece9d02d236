# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay: run a shared prefix once, train on its divergent tails.

One capital letter per axis, carried in the names of arrays (`q_KGRTD`):

  G  branches of a group          L  layers
  T  tokens of a tail or segment  K  key-value heads
  P  positions of the prefix      R  query heads per key-value head
  C  positions of a chunk         N  any number of heads or rows
  V  vocabulary                   D  head_dim
  M  model width                  H  half of head_dim (RoPE)
  F  feed-forward width           B  positions in one attention tile
"""
