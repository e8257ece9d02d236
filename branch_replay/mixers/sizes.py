# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What mixers are told about the prefix, all of it counted on one device."""

from typing import NamedTuple

import jax


class Sizes(NamedTuple):
  """Of a state.

  Attributes:
    here: positions it has room for.
    room: positions it may be given room for later, at least `here`.
    devices: that share it.
  """

  here: int
  room: int
  devices: int = 1


class Chunk(NamedTuple):
  """A stretch of the prefix that is appended to it or popped.

  Attributes:
    start: i32, its first position.
    tokens: i32, its real positions; the rest is padding.
  """

  start: jax.Array
  tokens: jax.Array
