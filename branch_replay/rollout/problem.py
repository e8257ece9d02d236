# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The inputs of a rollout: static settings of its rounds, and arrays."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax

from branch_replay.engine import state as state_lib
from branch_replay.models import decoder
from branch_replay.rollout import law as law_lib


@dataclasses.dataclass(frozen=True)
class RoundSettings:
  """The static settings of a round; each combination is compiled once.

  Attributes:
    model: the decoder.
    law: temperature and truncation.
    draft_length: k, tokens drafted for every row in a round; 0 for none.
  """

  model: decoder.Decoder
  law: law_lib.Law
  draft_length: int = 0


class RolloutInputs(NamedTuple):
  """The arrays of a rollout, which no round changes.

  Attributes:
    params: parameters of the model.
    state: captured state of the prompt without its last token.
    boundary: i32[], the last token of the prompt.
    key: PRNG key of the noise.
    stop_ids: i32[any], ids that end a row.
    limit: i32[], the most tokens of a row.
    layers: layers of `params` one by one, as `decoding.decode` takes them, or
      None.
  """

  params: dict
  state: state_lib.PrefixState
  boundary: jax.Array
  key: jax.Array
  stop_ids: jax.Array
  limit: jax.Array
  layers: Any = None
