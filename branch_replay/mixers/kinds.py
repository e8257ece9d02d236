# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Token mixers: what each kind of layer leaves behind and continues from.

A mixer is a module of functions of one stack of layers (`pattern`), which the
engine maps over the stacks of a model without knowing what is in them:

  MIXED, STAGE       how many of a layer's projections it takes, and the name
                     of its own parameters;
  empty, accumulator a state of no positions, and zeros for its cotangent;
  seen               the part of a state that a segment continues from;
  push, extend       append what a chunk, or more of a prompt, left behind;
  save, restore      what popping a chunk needs of the state before it, and
                     that state from the one after it;
  skip               the cotangent where a chunk is not popped;
  fit                the state with room for another number of positions;
  forward, backward  one layer of a segment, there and back;
  cache, decode      one layer of a block of new tokens of every branch;
  settle             the cache after those of the block that a branch took.
"""

from branch_replay import config as config_lib
from branch_replay.mixers import attention
from branch_replay.mixers import delta
from branch_replay.mixers import latent
from branch_replay.mixers import window


def mixer(kind: str | config_lib.LayerKind):
  """The mixer of a kind of layer; raises ValueError for an unknown one."""
  if isinstance(kind, config_lib.LayerKind):
    return kind.mixer
  match kind:
    case "full":
      return attention
    case "sliding":
      return window
    case "latent":
      return latent
    case "delta":
      return delta
    case _:
      raise ValueError(f"Unknown kind of layer {kind!r}.")
