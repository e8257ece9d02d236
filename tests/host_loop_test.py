# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The two drivers give the same gradient; the host's stops cleanly."""

import chex
import jax
import numpy as np
import pytest

import branch_replay as br
from branch_replay import host_loop
from branch_replay import sharding
from tests import tiny


@pytest.mark.parametrize(
    "mode,activations,devices",
    [
        ("exact", "keep", 1), ("exact", "recompute_layers", 1),
        ("stop", "recompute", 1), ("exact", "keep", 8), ("stop", "keep", 8),
    ],
)
def test_host_loop_equals_the_scan(x64, mode, activations, devices):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(tails=(5, 1, 3))
  weights = tiny.weights(group)
  options = dict(
      prefix_gradient=mode,
      schedule=br.Schedule(
          chunk_size=5, branches_at_once=2, activations=activations
      ),
  )
  (value, outputs, _), wanted = br.value_and_grad(
      decoder, tiny.loss, **options
  )(params, group, weights)
  if devices > 1:
    layout = sharding.sharded(params, devices)
    params = layout.place(params)
    options["schedule"] = br.Schedule(
        chunk_size=8, branches_at_once=2, activations=activations,
        layout=layout,
    )
  (mine, log_probs, _), gradient = host_loop.value_and_grad(
      decoder, tiny.loss, progress=False, **options
  )(params, group, weights)
  assert tiny.worst(gradient, wanted) <= 1e-11
  np.testing.assert_allclose(mine, value, rtol=1e-12)
  np.testing.assert_allclose(log_probs, outputs, atol=1e-12)


def test_an_interrupt_between_chunks_changes_nothing(monkeypatch):
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  before = jax.tree.map(np.asarray, (params, group))
  steps = []

  def interrupted(*args):
    steps.append(args)
    if len(steps) == 2:
      raise KeyboardInterrupt
    return push(*args)

  push = host_loop._push
  monkeypatch.setattr(host_loop, "_push", interrupted)
  function = host_loop.value_and_grad(
      decoder, tiny.loss, schedule=br.Schedule(chunk_size=5), progress=False
  )
  with pytest.raises(KeyboardInterrupt):
    function(params, group, tiny.weights(group))
  assert len(steps) == 2
  chex.assert_trees_all_equal(before, (params, group))


def test_what_the_host_loop_does_not_run():
  decoder, _ = tiny.model(tiny.BASE)
  with pytest.raises(ValueError, match="'exact' and 'stop'"):
    host_loop.value_and_grad(decoder, tiny.loss, prefix_gradient="full")
