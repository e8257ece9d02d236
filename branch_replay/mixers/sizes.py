# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a prefix state and positions of a chunk, as one device counts them.

The engine passes these to the mixers.
"""

from typing import NamedTuple

import jax


class Sizes(NamedTuple):
  """Capacity of a prefix state on one device.

  Attributes:
    here: positions that the state has room for on this device.
    room: positions that it may be resized to later, at least `here`.
    devices: how many devices share the state.
  """

  here: int
  room: int
  devices: int = 1


class Chunk(NamedTuple):
  """Where a chunk of the prefix stands on one device.

  Attributes:
    start: i32, the place of its first position in this device's arrays.
    tokens: i32, how many of its positions here are real; the rest is padding.
  """

  start: jax.Array
  tokens: jax.Array
