# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The two drivers give the same gradient; the host's stops cleanly."""

import dataclasses
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import host_memory
from branch_replay.devices import sharding
from branch_replay.engine import hosted_steps
from tests import tiny


@pytest.mark.exhaustive(but="exact-recompute_layers-1")
@pytest.mark.parametrize(
    "mode,activations,devices",
    [
        ("exact", "keep", 1), ("exact", "recompute_layers", 1),
        ("stop", "recompute", 1), ("exact", "keep", 8), ("stop", "keep", 8),
    ],
)
def test_the_hosted_driver_equals_the_compiled_one(
    x64, mode, activations, devices
):
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
  (mine, log_probs, _), gradient = br.value_and_grad(
      decoder, tiny.loss, hosted=br.Hosted(), **options
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

  push = hosted_steps.push
  monkeypatch.setattr(hosted_steps, "push", interrupted)
  function = br.value_and_grad(
      decoder, tiny.loss, schedule=br.Schedule(chunk_size=5),
      hosted=br.Hosted(progress=True),
  )
  with pytest.raises(KeyboardInterrupt):
    function(params, group, tiny.weights(group))
  assert len(steps) == 2
  chex.assert_trees_all_equal(before, (params, group))


STATIC = {"push": (0, 1, 2), "visit": (0, 1), "pop": (0, 1)}


def recorded(monkeypatch, name, calls):
  """Records a step's arguments and results."""
  step, static = getattr(hosted_steps, name), STATIC[name]

  def run(*args):
    described = [
        x if place in static else jax.tree.map(jax.typeof, x)
        for place, x in enumerate(args)
    ]
    result = step(*args)
    calls[name] = step, described, result
    return result

  monkeypatch.setattr(hosted_steps, name, run)


def kinds(tree):
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.exhaustive(but=("layers-exact", "exact"))
@pytest.mark.parametrize("name,mode,activations", [
    ("llama", "exact", "recompute"), ("latent", "stop", "recompute_layers"),
])
def test_a_state_in_host_memory_gives_the_same_gradient(
    x64, monkeypatch, name, mode, activations
):
  config = tiny.in_float64(tiny.ARCHITECTURES[name])
  decoder, params = tiny.model(config)
  group = tiny.group(tails=(5, 1, 3))
  options = dict(
      prefix_gradient=mode,
      schedule=br.Schedule(
          chunk_size=5, branches_at_once=2, activations=activations
      ),
  )

  def run(**more):
    return br.value_and_grad(
        decoder, tiny.loss, hosted=br.Hosted(**more), **options
    )(params, group, tiny.weights(group))

  wanted = run()
  calls = {}
  for step in ("push", "visit") + (("pop",) if mode == "exact" else ()):
    recorded(monkeypatch, step, calls)
  (value, outputs, _), grads = run(offload=True)
  assert tiny.worst(grads, wanted[1]) <= 1e-12
  np.testing.assert_allclose(value, wanted[0].loss, rtol=1e-13)
  np.testing.assert_allclose(outputs, wanted[0].outputs, atol=1e-13)
  assert kinds(calls["push"][2][0].mixer) == {"pinned_host"}
  if mode == "exact":
    grads, cotangent, *_ = calls["pop"][2]
    assert kinds(grads) == {"device"}
    assert kinds(cotangent) == {"pinned_host"}


def test_no_step_has_the_whole_state_on_the_device(monkeypatch):
  """Arrays of its shape are marked as in host memory, all of them."""
  decoder, params = tiny.model(tiny.BASE)
  group, calls = tiny.group(prompt=22), {}
  for name in ("push", "visit", "pop"):
    recorded(monkeypatch, name, calls)
  br.value_and_grad(
      decoder, tiny.loss, hosted=br.Hosted(offload=True),
      schedule=br.Schedule(chunk_size=7, activations="recompute"),
  )(params, group, tiny.weights(group))
  shape = calls["push"][2][0].mixer[0].shape
  assert shape[:2] == (2, 2) and shape[3] == 16
  whole = "[" + ",".join(map(str, shape)) + "]"
  for name, (step, args, _) in calls.items():
    text = str(jax.make_jaxpr(step, static_argnums=STATIC[name])(*args))
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


@pytest.mark.exhaustive(but="full")
@pytest.mark.parametrize("mode", ("full", "sampled"))
def test_other_modes_equal_the_compiled_loops(x64, mode):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(tails=(5, 1, 3))
  weights = tiny.weights(group)
  options = dict(
      prefix_gradient=mode, schedule=br.Schedule(chunk_size=5),
      sampling=br.Sampling(chunks=1.7),
  )
  for seed in range(3):
    key = jax.random.key(seed)
    wanted, found = (
        br.value_and_grad(decoder, tiny.loss, hosted=how, **options)(
            params, group, weights, key=key
        ) for how in (None, br.Hosted())
    )
    assert tiny.worst(found[1], wanted[1]) <= 1e-12
    # A compiled report has room for every chunk of the bucket.
    wanted_pass = wanted[0].prefix_pass
    if mode == "sampled":
      wanted_pass = jax.tree.map(lambda x_N: x_N[:3], wanted_pass)
    chex.assert_trees_all_close(
        found[0].prefix_pass, wanted_pass, rtol=1e-12
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode,offload", [("exact", True), ("stop", False)])
def test_a_load_balance_term_captures_the_prefix_once(
    x64, monkeypatch, mode, offload
):
  """Experts are counted on the state that is then used."""
  config = dataclasses.replace(tiny.ARCHITECTURES["experts"], num_layers=1)
  decoder, params = tiny.model(tiny.in_float64(config))
  group, calls = tiny.group(tails=(5, 1, 3)), []
  push = hosted_steps.push
  monkeypatch.setattr(
      hosted_steps, "push", lambda *args: calls.append(args) or push(*args)
  )
  options = dict(
      prefix_gradient=mode, balance=0.3, schedule=br.Schedule(chunk_size=5),
  )
  (wanted, reference), (found, grads) = (
      br.value_and_grad(decoder, tiny.loss, hosted=how, **options)(
          params, group, tiny.weights(group)
      ) for how in (None, br.Hosted(offload=offload))
  )
  assert len(calls) == 3  # chunks of 4 of a prefix of 11, in a bucket of 16
  assert tiny.worst(grads, reference) <= 1e-12
  np.testing.assert_allclose(found.load, wanted.load, rtol=1e-12)


@pytest.mark.exhaustive
def test_what_the_hosted_driver_does_not_run():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  weights = tiny.weights(group)

  def run(data, model=decoder, state=None, schedule=None, **how):
    return br.value_and_grad(
        model, tiny.loss, hosted=br.Hosted(**how),
        schedule=schedule or br.Schedule(),
    )(params, data, weights, state=state)

  with pytest.raises(ValueError, match="one group, not stacked groups"):
    weights = jnp.stack([weights] * 2)
    run(br.stack([group] * 2))
  weights = tiny.weights(group)
  with pytest.raises(ValueError, match="leave state= out"):
    run(group, state=br.capture(decoder, params, group))
  layout = sharding.sharded(params, 8)
  with pytest.raises(ValueError, match="for one device, not 8"):
    run(group, schedule=br.Schedule(layout=layout), offload=True)
  decoder, params = tiny.model(tiny.ARCHITECTURES["window and full"])
  with pytest.raises(ValueError, match="'sliding', 'full'.* does not grow"):
    run(group, decoder, offload=True)
