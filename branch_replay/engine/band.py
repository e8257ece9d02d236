# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The band: which pairs of positions "banded" sends cotangents between.

"banded" runs the backward pass of "exact", but cuts attention inside the prefix
short: a query at position i of the prefix exchanges cotangents with the key at
position j only if

  i − j < W  or  j < S,

the last W positions or the first S, the sinks. The forward pass is whole, and
so are the probabilities and δ of every row. Tails, and the token that every
tail starts with, exchange cotangents with all of the prefix.

Whether a query is banded is a property of the text and not of the schedule: in
a group those at positions 0 … P − 1 are, P being the positions of the prefix;
in a tree the tokens of every segment that has children, but its last.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay import checks


@dataclasses.dataclass(frozen=True)
class Band:
  """Width of the band of prefix_gradient="banded".

  Attributes:
    window: W, how many positions a query reaches, its own included. At least
      the length of the prefix makes "banded" equal to "exact".
    sinks: S, how many of the first positions all queries reach too.
  """

  window: int = 256
  sinks: int = 64

  def __post_init__(self):
    checks.integer(self.window, "Band.window", 0)
    checks.integer(self.sinks, "Band.sinks", 0)

  def lowest(self, positions, inner) -> jax.Array:
    """The lowest position, apart from the sinks, that each query reaches.

    Args:
      positions: i32, where each query stands.
      inner: bool, whether it is banded; else it reaches position 0.
    """
    return jnp.where(
        inner, jnp.maximum(positions - self.window + 1, 0), 0
    )
