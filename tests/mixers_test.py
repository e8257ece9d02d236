# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of several kinds in one model: the whole way, there and back."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay.devices import sharding
from branch_replay.engine import compiled
from branch_replay.engine import decoding
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.models import adapters
from branch_replay.models import latent_layers
from branch_replay.ops.attention import reference
from tests import memory_test
from tests import mixer_suite
from tests import sharding_test
from tests import tiny

TOLERANCE = mixer_suite.TOLERANCE
gradient = mixer_suite.gradient
# Three delta layers to one of full attention.
QWEN3_NEXT = dataclasses.replace(
    tiny.ARCHITECTURES["hybrid"], num_layers=4,
    layer_pattern=("delta", "delta", "delta", "full"),
)


def config_of(name):
  return tiny.ARCHITECTURES.get(name, QWEN3_NEXT)


def problem(name, *lengths):
  return mixer_suite.problem(config_of(name), *lengths)


def shapes_of(config):
  """Shapes of the parameters."""
  return jax.eval_shape(
      lambda: br.Decoder(config).init(
          jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
      )
  )["params"]


@pytest.mark.exhaustive(but="mistral")
@pytest.mark.parametrize("name, activations, chunk_size", (
    ("hybrid", "keep", 4), ("hybrid", "recompute_layers", 7),
    ("mistral", "recompute", 2),
    ("three to one", "recompute", 3),
))
def test_every_policy_gives_the_dense_gradient(
    x64, name, activations, chunk_size
):
  mixer_suite.exact_is_full(config_of(name), br.Schedule(
      activations=activations, chunk_size=chunk_size, branches_at_once=2
  ))


@pytest.mark.exhaustive
def test_autodiff_and_the_host_loop_give_the_dense_gradient(x64):
  decoder, params, group, weights = problem("hybrid")
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(chunk_size=4)
  state = br.capture(decoder, params, group, schedule=schedule, keep=True)
  by_autodiff = jax.grad(lambda params: tiny.loss(
      br.log_probs(decoder, params, group, schedule=schedule, state=state),
      weights,
  ))(params)
  assert tiny.worst(by_autodiff, wanted) <= TOLERANCE
  by_host = br.value_and_grad(
      decoder, tiny.loss, schedule=schedule, hosted=br.Hosted()
  )(params, group, weights)[1]
  assert tiny.worst(by_host, wanted) <= TOLERANCE


@pytest.mark.exhaustive(but="deepseek")
@pytest.mark.parametrize("name", ("gemma3", "deepseek", "qwen3.5"))
def test_eight_devices_give_the_dense_gradient(x64, name):
  # Tails of 12 straddle the devices; 2 heads leave six of them without one.
  decoder, params, group, weights = problem(name, 38, (12, 1, 3))
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(
      chunk_size=16, activations="recompute",
      layout=sharding.sharded(params, 8),
  )
  found = gradient(decoder, params, group, weights, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_no_collective_carries_a_prefix_of_latents(monkeypatch):
  """Nor of a window or a recurrence, which have no axis for it."""
  config = dataclasses.replace(
      memory_test.CONFIG, num_layers=3,
      layer_pattern=("delta", "sliding", "latent"), window=100,
      delta=br.GatedDelta(8, 8, 8, 4), latent=br.LatentAttention(12, 8, 4, 10),
  )
  monkeypatch.setattr(memory_test, "CONFIG", config)
  text = sharding_test.compiled_on_eight("exact")
  found = sharding_test.collectives(text)
  assert any(kind == "all-to-all" for kind, _ in found)  # heads of delta layers
  assert not sharding_test.carries_the_prefix(text)


@pytest.mark.parametrize("name", ("llama", "hybrid", "experts"))
def test_perturbing_one_branch_leaves_its_siblings_bit_equal(x64, name):
  mixer_suite.siblings_are_independent(config_of(name))


def test_padding_changes_nothing(x64):
  """A last chunk of padding alone, and one of a token and padding."""
  decoder, params, group, weights = problem("hybrid")
  padded = dataclasses.replace(
      group,
      prompt=jnp.pad(group.prompt, (0, 13), constant_values=7),
      tails=jnp.pad(group.tails, ((0, 0), (0, 5)), constant_values=3),
  )
  wide = jnp.pad(weights, ((0, 0), (0, 5)), constant_values=2.0)
  schedule = br.Schedule(chunk_size=5, activations="recompute")
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  found = gradient(decoder, params, padded, wide, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.exhaustive(but="hybrid")
@pytest.mark.parametrize("name", ("latent", "hybrid", "expert groups"))
def test_bfloat16_fits_together_and_gives_float32_gradients(name):
  """Traced alone: carries of loops keep their dtypes, there and back."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES[name], compute_dtype="bfloat16"
  )
  decoder, params = br.Decoder(config), shapes_of(config)
  group = tiny.group(20, (5, 3))
  schedule = br.Schedule(
      chunk_size=8, activations="recompute", accumulator_dtype="bfloat16"
  )
  grads = jax.eval_shape(
      lambda params: gradient(
          decoder, params, group, tiny.weights(group), schedule=schedule
      ), params,
  )
  assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
  state = jax.eval_shape(
      lambda params: br.capture(decoder, params, group), params
  )
  caches = jax.eval_shape(
      lambda mixer: state_lib.caches(config, mixer, 2, 4), state.mixer
  )

  def block(params, x_GTM, state, caches, slots_GT):
    _, caches, inputs = decoding.decode(
        config, params, x_GTM, state, caches, slots_GT
    )
    return caches, decoding.settle(
        config, params, caches, inputs, slots_GT[:, -1]
    )

  for tokens in (1, 3):
    assert jax.eval_shape(
        block, params["layers"],
        jax.ShapeDtypeStruct((2, tokens, 32), jnp.bfloat16), state, caches,
        jax.ShapeDtypeStruct((2, tokens), jnp.int32),
    ) == (caches, caches)


@pytest.mark.exhaustive
def test_adapters_may_be_in_layers_of_one_kind_alone(x64):
  decoder, params, group, weights = problem("hybrid")
  adapter = config_lib.Adapter(2, 4.0, ("query",))
  model, params = adapters.add(decoder, params, adapter, jax.random.key(0))
  part = jax.tree.map(lambda x: x + 0.1, adapters.select(params, "adapters"))
  params = adapters.replace(params, part)
  found = gradient(model, params, group, weights, trainable="adapters")
  assert set(found["layers"]["periods"]) == {"1"}  # the full layers
  dense = tiny.dense_gradient(model, params, group, weights)
  wanted = adapters.select(dense, "adapters")
  assert tiny.worst(found, wanted) <= TOLERANCE


def test_stop_holds_the_state_of_recurrent_layers_constant(x64):
  """Its gradient is the slope of the loss on a state that stays as it is."""
  decoder, params, group, weights = problem("hybrid")
  state = br.capture(decoder, params, group)
  found = gradient(decoder, params, group, weights, prefix_gradient="stop")
  direction = jax.tree.map(
      lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape)),
      params,
  )

  @jax.jit
  def loss(step):
    moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
    return tiny.loss(br.log_probs(
        decoder, moved, group, state=state, allow_stale=True,
        prefix_gradient="stop",
    ), weights)

  slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
  dot = sum(
      jnp.vdot(g, d) for g, d in zip(
          jax.tree.leaves(found), jax.tree.leaves(direction), strict=True
      )
  )
  np.testing.assert_allclose(dot, slope, rtol=1e-6)
  exact = tiny.dense_gradient(decoder, params, group, weights)
  assert tiny.worst(found, exact) > 0.1


def mean_over_draws(name, group, weights, schedule, chunks):
  """The expectation of the sampled gradient over all draws of chunks."""
  decoder, params, *_ = problem(name)
  task = spec_lib.of_group(
      decoder, group, br.LogProbs(), "sampled", schedule,
      br.Sampling(chunks=1.5),
  )
  state = br.capture(decoder, params, group, schedule=schedule)

  @jax.jit
  def run(uniform_N):
    accumulator = state_lib.accumulator(decoder.config, state.capacity)
    grads, accumulator, *_ = compiled.visit_branches(
        task, params, spec_lib.zero_grads(params), accumulator, state, group,
        steps.Pull(spec_lib.cotangent_of(tiny.loss), (weights,)),
    )
    grads, _, report = compiled.pop_chunks(
        task, params, grads, accumulator, state, task.chunks(state.capacity),
        uniform_N=uniform_N,
    )
    return grads, report

  mean, total, first = None, 0.0, None
  spare = (0.0,) * (state.capacity // task.chunks(state.capacity).size - chunks)
  for mask in itertools.product((0.0, 1.0), repeat=chunks):
    grads, report = run(jnp.array((*mask, *spare)))  # 0 always runs, 1 never
    first = report if first is None else first  # in which all chunks run
    q = np.asarray(report.probability)[:chunks]
    weight = np.where(np.array(mask) == 0, q, 1 - q).prod()
    total += weight
    grads = jax.tree.map(lambda g, weight=weight: weight * g, grads)
    mean = grads if mean is None else jax.tree.map(jnp.add, mean, grads)
  np.testing.assert_allclose(total, 1, rtol=1e-12)
  return mean, first


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ("mistral",))
def test_the_sampled_gradient_is_unbiased(x64, name):
  """Over the 2³ draws of three chunks, longer and shorter than the window."""
  decoder, params, group, weights = problem(name)
  schedule = br.Schedule(chunk_size=4, activations="recompute")
  mean, first = mean_over_draws(name, group, weights, schedule, chunks=3)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  assert tiny.worst(mean, wanted) <= TOLERANCE
  # Two layers with windows see no further back than the second chunk.
  assert np.asarray(first.size)[1:3].min() > 0


def test_sampling_through_recurrent_layers_is_refused():
  decoder = br.Decoder(tiny.ARCHITECTURES["hybrid"])
  with pytest.raises(ValueError, match="recurrent layers"):
    spec_lib.of_group(
        decoder, tiny.group(), br.LogProbs(), "sampled", br.Schedule()
    )


def test_queries_in_the_latent_attend_as_heads_with_keys_of_their_own(x64):
  config = tiny.in_float64(tiny.ARCHITECTURES["latent"])
  latent, heads = config.latent, config.num_heads
  random = np.random.default_rng(0)
  tokens = 7
  query_NA = jnp.asarray(random.normal(size=(tokens, latent.query_rank)))
  latent_NX = jnp.asarray(random.normal(size=(tokens, latent.slot)))
  x_GTM = jnp.zeros((1, tokens, config.width))
  at_GT = jnp.arange(tokens)[None]
  _, params = tiny.model(config)
  of_layer = jax.tree.map(lambda x: x[0], params["layers"])
  rotate = latent_layers.LatentRotate(config)
  q, slots, _ = rotate.apply(
      {"params": of_layer["rotate"]}, query_NA, latent_NX, at_GT
  )
  found = latent_layers.LatentJoin(config).apply(
      {"params": of_layer["join"]}, x_GTM, reference.causal(q, slots, slots)
  )
  # Keys and values of every head, as the formula is usually written.
  c_TC, r_TD = jnp.split(slots[0, 0], [latent.rank], axis=-1)
  normed_NA = query_NA * of_layer["rotate"]["query_norm"]["scale"][None] / (
      jnp.sqrt(jnp.mean(query_NA**2, axis=-1, keepdims=True) + config.norm_eps)
  )
  wide = normed_NA @ of_layer["rotate"]["query_up"]["kernel"]
  nope, _ = jnp.split(
      wide.reshape(tokens, heads, -1), [latent.nope_dim], axis=-1
  )
  turned = q[0, 0, :, :, latent.rank :] / (latent.slot / latent.query_dim)**0.5
  keys = jnp.einsum("tc,hdc->htd", c_TC, of_layer["rotate"]["key_up"])
  values = jnp.einsum("tc,hce->hte", c_TC, of_layer["join"]["value_up"])
  scores = jnp.einsum("thd,hsd->hts", nope, keys) + turned @ r_TD.T
  scores = jnp.where(
      jnp.tril(jnp.ones((tokens, tokens), bool))[None],
      scores / latent.query_dim**0.5, -jnp.inf,
  )
  out = jnp.einsum("hts,hse->the", jax.nn.softmax(scores), values)
  wanted = out.reshape(tokens, -1) @ of_layer["join"]["output"]["kernel"]
  np.testing.assert_allclose(found[0], wanted, rtol=1e-10, atol=1e-12)


