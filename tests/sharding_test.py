# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Eight devices equal one, and no collective moves the prefix."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from tests import memory_test
from tests import tiny

TOLERANCE = 1e-11


def schedules(params, devices=8, **options):
  """The same schedule on one device and on several."""
  layout = sharding.sharded(params, devices)
  return br.Schedule(**options), br.Schedule(layout=layout, **options)


def gradient(decoder, params, group, schedule, mode, **options):
  evaluation, grads = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient=mode, schedule=schedule, **options
  )(params, group, tiny.weights(group), key=jax.random.key(0))
  return evaluation, grads


@pytest.mark.exhaustive(but="exact")
@pytest.mark.parametrize("mode", ["full", "exact", "sampled", "stop"])
def test_eight_devices_equal_one(x64, mode):
  # 37 prefix positions; tails of 12 straddle the devices, one is a token long,
  # so that most devices hold only padding of it.
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=38, tails=(12, 1, 3, 7, 0))
  one, eight = schedules(
      params, chunk_size=8, branches_at_once=2, activations="recompute"
  )
  options = dict(sampling=br.Sampling(chunks=1.5))
  alone, wanted = gradient(decoder, params, group, one, mode, **options)
  together, grads = gradient(decoder, params, group, eight, mode, **options)
  assert tiny.worst(grads, wanted) <= TOLERANCE
  np.testing.assert_allclose(together.loss, alone.loss, rtol=1e-12)
  np.testing.assert_allclose(together.outputs, alone.outputs, atol=1e-12)
  if mode == "exact":
    dense = tiny.dense_gradient(decoder, params, group, tiny.weights(group))
    assert tiny.worst(grads, dense) <= TOLERANCE
  if mode == "sampled":
    np.testing.assert_array_equal(
        together.prefix_pass.drawn, alone.prefix_pass.drawn
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [3, 8])
@pytest.mark.parametrize("activations", ["keep", "recompute_layers"])
def test_any_lengths_groups_and_device_counts(x64, devices, activations):
  decoder, params = tiny.model(
      tiny.in_float64(tiny.ARCHITECTURES["qwen3"])
  )
  groups = br.stack([
      tiny.group(prompt, tails, seed=prompt)
      for prompt, tails in (
          (38, (1, 5, 9, 2, 3)), (5, (7, 1, 1, 4, 2)), (1, (2, 3, 1, 1, 6))
      )
  ])
  one, several = schedules(
      params, devices, chunk_size=24, activations=activations
  )
  _, wanted = gradient(decoder, params, groups, one, "exact")
  _, grads = gradient(decoder, params, groups, several, "exact")
  assert tiny.worst(grads, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_autodiff_and_a_captured_state_on_eight_devices(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=38, tails=(5, 3))
  weights = tiny.weights(group)
  one, eight = schedules(params, chunk_size=16)
  state = br.capture(decoder, params, group, schedule=eight)

  def loss(params, schedule, state=None):
    return tiny.loss(
        br.log_probs(decoder, params, group, schedule=schedule, state=state),
        weights,
    )

  wanted = jax.grad(loss)(params, one)
  assert tiny.worst(jax.grad(loss)(params, eight), wanted) <= TOLERANCE
  assert tiny.worst(jax.grad(loss)(params, eight, state), wanted) <= TOLERANCE
  with pytest.raises(ValueError, match="lies on 8 devices"):
    loss(params, one, state)
  with pytest.raises(ValueError, match="cannot be sampled from"):
    br.sample(
        decoder, params, group.prompt[:38], key=jax.random.key(0), branches=2,
        max_tokens=2, state=state,
    )


@pytest.mark.exhaustive
def test_placed_parameters_and_their_gradients_stay_sharded():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group(prompt=38)
  _, eight = schedules(params, chunk_size=16)
  placed = eight.layout.place(params)
  _, grads = gradient(decoder, placed, group, eight, "exact")
  kernel = grads["layers"]["expand"]["gate"]["kernel"]
  assert kernel.addressable_shards[0].data.size == kernel.size // 8
  again = gradient(decoder, placed, group, eight, "exact")[1]
  chex.assert_trees_all_equal(grads, again)  # two runs, bit for bit


def collectives(text: str) -> list[tuple[str, list[int]]]:
  """(operation, sizes of all axes in it) of the compiled collectives."""
  names = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
  found = []
  for line in text.splitlines():
    match = re.search(rf"= .*?\b({names})(?:-start)?\(", line)
    if match:
      operands = line.split(", metadata")[0]
      shapes = re.findall(r"\w+\[([\d,]+)\]", operands)
      found.append((
          match[1], [int(n) for shape in shapes for n in shape.split(",")]
      ))
  return found


def compiled_on_eight(mode: str) -> str:
  decoder = br.Decoder(memory_test.CONFIG)
  params = jax.eval_shape(
      lambda: decoder.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  schedule = br.Schedule(
      chunk_size=512, branches_at_once=1, activations="recompute",
      layout=sharding.sharded(params, 8),
  )
  function = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient=mode, schedule=schedule
  )
  group = memory_test.shapes(PREFIX, 7)
  weights = jax.ShapeDtypeStruct(group.tails.shape, jnp.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  lowered = jax.jit(function).lower(params, group, weights, key=key)
  return lowered.compile().as_text()


PREFIX = 12_288  # no size or multiple of a size of anything else


def carries_the_prefix(text: str) -> list:
  here = PREFIX // 8
  return [
      one for one in collectives(text)
      if any(n >= here and n % here == 0 for n in one[1])
  ]


@pytest.mark.exhaustive(but="exact")
@pytest.mark.parametrize("mode", ["exact", "sampled", "stop"])
def test_no_collective_carries_the_prefix(mode):
  text = compiled_on_eight(mode)
  assert len(collectives(text)) > 5
  assert not carries_the_prefix(text)
  # Nor is there a buffer of it for every branch.
  sizes = [set(shape.split(",")) for shape in re.findall(r"\[([\d,]+)\]", text)]
  assert any(str(PREFIX // 8) in one for one in sizes)
  assert not any({"7", str(PREFIX // 8)} <= one for one in sizes)


def test_a_layout_that_gathers_the_prefix_is_caught(monkeypatch):
  # Negative control: the same check fails when keys travel.
  forward = sharding.attention.forward

  def gathered(q, k, v, prefix, *args, **options):
    whole = tuple(
        jax.lax.all_gather(x, sharding._AXIS, axis=2, tiled=True)
        for x in prefix.state
    )
    return forward(q, k, v, prefix._replace(state=whole), *args, **options)

  monkeypatch.setattr(sharding.attention, "forward", gathered)
  jax.clear_caches()
  assert carries_the_prefix(compiled_on_eight("stop"))
  jax.clear_caches()


def test_too_many_devices_and_too_small_chunks():
  _, params = tiny.model(tiny.BASE)
  with pytest.raises(ValueError, match="9 devices asked for, 8 there"):
    sharding.sharded(params, 9)
  decoder, _ = tiny.model(tiny.BASE)
  _, eight = schedules(params, chunk_size=4)
  with pytest.raises(ValueError, match="chunk_size must be at least 8"):
    br.capture(decoder, params, tiny.group(), schedule=eight)
