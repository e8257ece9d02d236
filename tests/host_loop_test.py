# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The two drivers give the same gradient; the host's stops cleanly."""

import types

import chex
import jax
import numpy as np
import pytest

import branch_replay as br
from branch_replay import host_loop
from branch_replay import host_memory
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


def recorded(monkeypatch, name, calls):
  """Records a step's arguments and results."""
  step = getattr(host_loop, name)

  def run(*args):
    described = [
        x if callable(x) else jax.tree.map(jax.typeof, x) for x in args[1:]
    ]
    result = step(*args)
    calls[name] = step, (args[0], *described), result
    return result

  monkeypatch.setattr(host_loop, name, run)


def kinds(tree):
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("name,mode,activations", [
    ("one layer", "exact", "recompute"),
    ("latent", "stop", "recompute_layers"),
])
def test_a_state_in_host_memory_gives_the_same_gradient(
    x64, monkeypatch, name, mode, activations
):
  config = tiny.in_float64(tiny.ARCHITECTURES[name])
  decoder, params = tiny.model(config)
  group = tiny.group(tails=(5, 1, 3))
  options = dict(
      prefix_gradient=mode, progress=False,
      schedule=br.Schedule(
          chunk_size=5, branches_at_once=2, activations=activations
      ),
  )

  def run(**more):
    return host_loop.value_and_grad(decoder, tiny.loss, **options, **more)(
        params, group, tiny.weights(group)
    )

  wanted = run()
  calls = {}
  for step in ("_push", "_visit") + (("_pop",) if mode == "exact" else ()):
    recorded(monkeypatch, step, calls)
  (value, outputs, _), grads = run(offload=True)
  assert tiny.worst(grads, wanted[1]) <= 1e-12
  np.testing.assert_allclose(value, wanted[0].loss, rtol=1e-13)
  np.testing.assert_allclose(outputs, wanted[0].outputs, atol=1e-13)
  assert kinds(calls["_push"][2][0].mixer) == {"pinned_host"}
  if mode == "exact":
    grads, cotangent = calls["_pop"][2]
    assert kinds(grads) == {"device"}
    assert kinds(cotangent) == {"pinned_host"}


def test_no_step_has_the_whole_state_on_the_device(monkeypatch):
  """Arrays of its shape are marked as in host memory, all of them."""
  decoder, params = tiny.model(tiny.BASE)
  group, calls = tiny.group(prompt=22), {}
  for name in ("_push", "_visit", "_pop"):
    recorded(monkeypatch, name, calls)
  host_loop.value_and_grad(
      decoder, tiny.loss, progress=False, offload=True,
      schedule=br.Schedule(chunk_size=7, activations="recompute"),
  )(params, group, tiny.weights(group))
  shape = calls["_push"][2][0].mixer[0].shape
  assert shape[:2] == (2, 2) and shape[3] == 16
  whole = "[" + ",".join(map(str, shape)) + "]"
  for name, (step, (task, *args), _) in calls.items():
    static = (0, 1) if name == "_visit" else (0,)
    text = str(jax.make_jaxpr(step, static_argnums=static)(task, *args))
    assert "f32<host>" + whole in text, name
    assert "f32" + whole not in text, name


def test_a_device_without_host_memory_is_refused(monkeypatch):
  class Device:
    device_kind = "toaster"

    def addressable_memories(self):
      return [types.SimpleNamespace(kind="device")]

  monkeypatch.setattr(host_memory.jax, "devices", lambda: [Device()])
  with pytest.raises(ValueError, match="a toaster has only device"):
    host_memory.zeros(jax.ShapeDtypeStruct((2,), "float32"))


def test_what_the_host_loop_does_not_run():
  decoder, params = tiny.model(tiny.BASE)
  with pytest.raises(ValueError, match="'exact' and 'stop'"):
    host_loop.value_and_grad(decoder, tiny.loss, prefix_gradient="full")
  layout = sharding.sharded(params, 8)
  with pytest.raises(ValueError, match="for one device, not 8"):
    host_loop.value_and_grad(
        decoder, tiny.loss, schedule=br.Schedule(layout=layout), offload=True
    )
  hybrid = br.Decoder(tiny.ARCHITECTURES["window and full"])
  with pytest.raises(ValueError, match="'sliding', 'full'.* does not grow"):
    host_loop.value_and_grad(hybrid, tiny.loss, offload=True)
