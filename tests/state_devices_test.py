# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A state that lies on several devices is replayed where it was captured."""

import dataclasses

import pytest

import branch_replay as br
from branch_replay.devices import sharding
from tests import tiny


@pytest.mark.exhaustive
def test_a_windowed_state_of_three_devices_gives_the_dense_gradient(x64):
  """A device's share of a chunk is shorter than that of a window."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES["window and full"], window=9
  )
  decoder, params = tiny.model(tiny.in_float64(config))
  group = tiny.group(prompt=22, tails=(5, 1, 3))
  weights = tiny.weights(group)
  schedule = br.Schedule(
      chunk_size=8, activations="recompute",
      layout=sharding.sharded(params, 3),
  )
  state = br.capture(decoder, params, group, schedule=schedule)
  _, found = br.value_and_grad(decoder, tiny.loss, schedule=schedule)(
      params, group, weights, state=state
  )
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  assert tiny.worst(found, wanted) <= 1e-11
  other = br.Schedule(
      chunk_size=16, activations="recompute", layout=schedule.layout
  )
  with pytest.raises(ValueError, match="does not keep what precedes"):
    br.value_and_grad(decoder, tiny.loss, schedule=other)(
        params, group, weights, state=state
    )
