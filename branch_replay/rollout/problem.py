# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a rollout is a function of."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax

from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.rollout import law as law_lib


@dataclasses.dataclass(frozen=True)
class RoundSettings:
  """The static half of a round: what a compilation depends on.

  Attributes:
    model: the decoder.
    law: of the tokens.
    draft_length: k, tokens that are drafted for every row; 0 for none.
  """

  model: decoder.Decoder
  law: law_lib.Law
  draft_length: int = 0


class RolloutInputs(NamedTuple):
  """The other half; no round changes it.

  Attributes:
    params: of the model.
    state: the captured prefix: the prompt without its last token.
    boundary: i32[], the last token of the prompt.
    key: of the noise.
    stop_ids: i32[any], ids that end a row.
    limit: i32[], the most tokens of a row.
    layers: of `params`, as `segment.decode` takes them, or None.
  """

  params: dict
  state: state_lib.PrefixState
  boundary: jax.Array
  key: jax.Array
  stop_ids: jax.Array
  limit: jax.Array
  layers: Any = None
