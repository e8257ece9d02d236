# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of several kinds in one model: the whole way, there and back."""

import dataclasses
import itertools

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay import adapters
from branch_replay import config as config_lib
from branch_replay import engine
from branch_replay import flops
from branch_replay import host_loop
from branch_replay import passes
from branch_replay import pattern
from branch_replay import plan
from branch_replay import prefix_replay
from branch_replay import schedule as schedule_lib
from branch_replay import segment
from branch_replay import sharding
from branch_replay import state as state_lib
from branch_replay.models import latent_layers
from branch_replay.ops import attention_reference as reference
from branch_replay.rollout import drafters
from branch_replay.rollout import law as law_lib
from tests import memory_test
from tests import sharding_test
from tests import tiny

TOLERANCE = 1e-11
# Three delta layers to one of full attention.
QWEN3_NEXT = dataclasses.replace(
    tiny.ARCHITECTURES["hybrid"], num_layers=4,
    layer_pattern=("delta", "delta", "delta", "full"),
)


def problem(name, prompt=12, tails=(5, 1, 3)):
  config = tiny.ARCHITECTURES.get(name, QWEN3_NEXT)
  decoder, params = tiny.model(tiny.in_float64(config))
  group = tiny.group(prompt, tails)
  weights = tiny.weights(group)
  return decoder, params, group, weights


def shapes_of(config):
  """Shapes of the parameters."""
  return jax.eval_shape(
      lambda: br.Decoder(config).init(
          jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
      )
  )["params"]


def gradient(decoder, params, group, weights, **options):
  return br.value_and_grad(decoder, tiny.loss, **options)(
      params, group, weights
  )[1]


@pytest.mark.parametrize("name, activations, chunk_size", (
    ("hybrid", "keep", 4), ("hybrid", "recompute_layers", 7),
    ("mistral", "recompute", 2),
    ("three to one", "recompute", 3),
))
def test_every_policy_gives_the_dense_gradient(
    x64, name, activations, chunk_size
):
  decoder, params, group, weights = arguments = problem(name)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(
      activations=activations, chunk_size=chunk_size, branches_at_once=2
  )
  assert tiny.worst(gradient(*arguments, schedule=schedule), wanted) <= (
      TOLERANCE
  )


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
  by_host = host_loop.value_and_grad(
      decoder, tiny.loss, schedule=schedule, progress=False
  )(params, group, weights)[1]
  assert tiny.worst(by_host, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", ("mistral", "latent", "hybrid"))
def test_eight_devices_give_the_dense_gradient(x64, name):
  # Tails of 12 straddle the devices; 3 heads leave five of them without one.
  decoder, params, group, weights = problem(name, 38, (12, 1, 3))
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(
      chunk_size=16, activations="recompute",
      layout=sharding.sharded(params, 8),
  )
  found = gradient(decoder, params, group, weights, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE


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


@pytest.mark.parametrize("name", ("window and full", "latent", "hybrid"))
def test_sampled_tokens_are_drawn_as_the_whole_model_would(x64, name):
  decoder, params, group, _ = problem(name)
  prompt = group.prompt[: int(group.prompt_length)]
  result = br.sample(
      decoder, params, prompt, key=jax.random.key(3), branches=3,
      max_tokens=9, law=br.Law(0.9), schedule=br.Schedule(chunk_size=5),
  )
  rows = jnp.concatenate(
      [jnp.tile(prompt, (3, 1)), result.tokens[:, :-1]], axis=1
  )
  logits_GTV = jax.jit(decoder.apply)({"params": params}, rows)
  log_probs_GTV = jax.nn.log_softmax(logits_GTV[:, len(prompt) - 1 :] / 0.9)
  noise_GTV = jnp.stack([
      jnp.stack([
          law_lib.noise(
              jax.random.key(3), row, len(prompt) + t, 64, jnp.float64
          )
          for t in range(9)
      ])
      for row in range(3)
  ])
  np.testing.assert_array_equal(
      result.tokens, jnp.argmax(log_probs_GTV + noise_GTV, axis=-1)
  )
  np.testing.assert_allclose(
      result.log_probs,
      jnp.take_along_axis(log_probs_GTV, result.tokens[..., None], -1)[..., 0],
      rtol=1e-12,
  )
  # The trainer reads the sampler's state.
  sampled = br.Group.create(prompt, result.tails(), config=decoder.config)
  replayed = br.log_probs(
      decoder, params, sampled, state=result.state, temperature=0.9,
      schedule=br.Schedule(chunk_size=5), prefix_gradient="stop",
  )[:, :9]
  np.testing.assert_allclose(replayed, result.log_probs, atol=1e-12)


@pytest.mark.parametrize("name", ("hybrid",))
def test_perturbing_one_branch_leaves_its_siblings_bit_equal(name):
  decoder, params = tiny.model(tiny.ARCHITECTURES[name])
  group = tiny.group(tails=(5, 6, 7))
  other = dataclasses.replace(
      group, tails=group.tails.at[1].set((group.tails[1] + 1) % 64)
  )
  before, after = (
      br.log_probs(decoder, params, x) for x in (group, other)
  )
  chex.assert_trees_all_equal(before[0], after[0])
  chex.assert_trees_all_equal(before[2], after[2])
  assert (before[1, :6] != after[1, :6]).all()


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


@pytest.mark.parametrize("name", ("window and full", "latent", "hybrid"))
def test_drafts_and_buckets_change_no_token(x64, name):
  decoder, params, group, _ = problem(name)
  prompt = group.prompt[: int(group.prompt_length)]

  def rollout(**options):
    return br.sample(
        decoder, params, prompt, key=jax.random.key(5), branches=4,
        max_tokens=12, stop_ids=(1, 2, 3, 4, 5, 6), **options,
    )

  plain = rollout(compact=False)
  assert len(set(plain.lengths.tolist())) > 1  # rows end at different places
  others = [rollout()]
  drafts = dict(drafter=drafters.NGram(), draft_length=2)
  if decoder.config.recurrent:
    with pytest.raises(ValueError, match="take back"):
      rollout(**drafts)
  else:
    others.append(rollout(**drafts))
  for other in others:
    np.testing.assert_array_equal(other.tokens, plain.tokens)
    np.testing.assert_array_equal(other.finish, plain.finish)
    np.testing.assert_allclose(other.log_probs, plain.log_probs, rtol=1e-10)


@pytest.mark.parametrize("name", ("latent", "hybrid"))
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
  assert jax.eval_shape(
      lambda *arguments: segment.decode(config, *arguments),
      params["layers"], jax.ShapeDtypeStruct((2, 1, 32), jnp.bfloat16), state,
      caches, jax.ShapeDtypeStruct((2, 1), jnp.int32),
  )[1] == caches


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
  task = prefix_replay.make_task(
      decoder, group, br.LogProbs(), "sampled", schedule,
      br.Sampling(chunks=1.5, recurrent=True),
  )
  state = br.capture(decoder, params, group, schedule=schedule)

  @jax.jit
  def run(uniform_N):
    accumulator = state_lib.accumulator(decoder.config, state.capacity)
    grads, accumulator, *_ = engine.visit_branches(
        task, params, engine.zero_grads(params), accumulator, state, group,
        passes.cotangent_of(tiny.loss), (weights,),
    )
    grads, _, report = passes.prefix_pass(
        task, params, grads, accumulator, state, uniform_N
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


@pytest.mark.parametrize("name", ("hybrid", "mistral"))
def test_the_sampled_gradient_is_unbiased(x64, name):
  """Over the 2³ draws of three chunks, longer and shorter than the window."""
  decoder, params, group, weights = problem(name)
  schedule = br.Schedule(chunk_size=4, activations="recompute")
  mean, first = mean_over_draws(name, group, weights, schedule, chunks=3)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  assert tiny.worst(mean, wanted) <= TOLERANCE
  # Two layers with windows see no further back than the second chunk.
  assert np.asarray(first.size)[1:3].min() > 0


def test_sampling_through_recurrent_layers_must_be_asked_for():
  decoder = br.Decoder(tiny.ARCHITECTURES["hybrid"])
  with pytest.raises(ValueError, match=r"Sampling\(recurrent=True\)"):
    prefix_replay.make_task(
        decoder, tiny.group(), br.LogProbs(), "sampled", br.Schedule()
    )


def test_states_of_windows_and_recurrences_do_not_grow_with_the_prefix():
  def size(config, prompt, **options):
    group = tiny.group(prompt, config=config)
    state = jax.eval_shape(
        lambda params: br.capture(br.Decoder(config), params, group, **options),
        shapes_of(config),
    )
    return sum(x.size for x in jax.tree.leaves(state.mixer))

  config = tiny.ARCHITECTURES["delta"]
  delta = config.delta
  matrix = delta.value_heads * delta.key_dim * delta.value_dim
  last = delta.key_heads * delta.channels * (delta.conv_width - 1)
  schedule = br.Schedule(chunk_size=16)
  # In two layers: after the prefix, and before each of its chunks.
  for prompt, chunks in ((17, 1), (33, 2), (129, 8)):
    found = size(config, prompt, schedule=schedule)
    assert found == 2 * (1 + chunks) * (matrix + last)
  assert size(config, 129, capacity=140) == 2 * (matrix + last)
  # A window of 7 before: after the prefix, and before and in each chunk.
  window = dataclasses.replace(tiny.ARCHITECTURES["mistral"], window=8)
  of_position = 2 * 2 * window.num_kv_heads * window.head_dim
  for prompt, chunks in ((17, 1), (33, 2), (129, 8)):
    found = size(window, prompt, schedule=schedule)
    assert found == of_position * 7 * (2 + chunks)
  # Chunks shorter than the window are kept whole.
  found = size(window, 129, schedule=br.Schedule(chunk_size=4))
  assert found == of_position * (2 * 7 + 128)
  cotangent = jax.eval_shape(lambda: state_lib.accumulator(window, 128))
  assert sum(x.size for x in jax.tree.leaves(cotangent)) == of_position * 7


def test_a_gradient_holds_what_chunks_keep_of_a_window(monkeypatch):
  """Of 256 positions of a chunk 32, and no cotangent of them."""
  config = dataclasses.replace(
      memory_test.CONFIG, layer_pattern=("sliding",), window=33
  )
  monkeypatch.setattr(memory_test, "CONFIG", config)
  short, long = (memory_test.temporaries(n, 4) for n in (4096, 8192))
  of_all = memory_test.state_bytes(8192) - memory_test.state_bytes(4096)
  assert 0.9 * of_all / 8 <= long - short <= 1.2 * of_all / 8


def test_plan_and_flops_count_what_there_is():
  config = dataclasses.replace(
      QWEN3_NEXT, layer_pattern=("delta", "delta", "latent", "full"),
      latent=br.LatentAttention(12, 8, 4, 10, query_rank=9),
  )
  prefix, chunk = 64, 16
  step = plan.Step(
      config, prefix, branches=2, tail=8, devices=1, chunk_size=chunk
  )
  found = plan.bytes_per_device(step)
  # A full layer, one of latents of 16 numbers, and two delta layers of 3 heads
  # of 8 × 4 and 2 inputs of 20 channels, after the prefix and before each of
  # its 4 chunks.
  full, latent = 4 * 2 * 2 * 16 * prefix, 4 * 16 * prefix
  delta = 4 * 2 * 3 * (8 * 4 + 2 * 20)
  assert found["state"] == full + latent + 5 * delta
  assert found["accumulator"] == full + 2 * latent + delta
  params = shapes_of(config)
  matrices = sum(
      x.size for path, x in traverse_util.flatten_dict(params["layers"]).items()
      if path[-1] in ("kernel", "filter", "key_up", "value_up")
  )
  assert flops.layer_parameters(config) == matrices
  # Delta layers do the same work whatever came before.
  grown = flops.forward(config, 10, 1000) - flops.forward(config, 10, 0)
  assert grown == 4 * (4 * 16 + 4 * 16) * 10 * 1000
  _, kept = jax.eval_shape(
      lambda params: engine.push_chunk(
          engine.Task(br.Decoder(config)), params,
          state_lib.empty(config, chunk), 0, keep="stages",
      ), params,
  )
  assert schedule_lib.layers_bytes(config) * chunk == sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)
  )


@pytest.mark.parametrize("name", ("window and full", "hybrid"))
def test_an_extended_state_is_replayed_but_not_popped(x64, name):
  decoder, params, group, _ = problem(name)
  length = int(group.prompt_length)
  schedule = br.Schedule(chunk_size=3)
  state = br.capture(
      decoder, params, group.prompt[:5], capacity=length, schedule=schedule
  )
  state = br.extend(
      decoder, params, state, group.prompt[4 : length - 1], schedule=schedule
  )
  np.testing.assert_allclose(
      br.log_probs(decoder, params, group, state=state, prefix_gradient="stop"),
      br.dense_log_probs(decoder, params, group), atol=1e-12,
  )
  with pytest.raises(ValueError, match="does not keep what precedes"):
    br.log_probs(decoder, params, group, state=state)


def test_a_state_of_other_chunks_is_refused():
  decoder, params = tiny.model(tiny.ARCHITECTURES["hybrid"])
  group = tiny.group(20)
  state = br.capture(decoder, params, group, schedule=br.Schedule(chunk_size=5))
  with pytest.raises(ValueError, match="chunk_size=8.*3 chunks of 8"):
    br.log_probs(
        decoder, params, group, state=state, schedule=br.Schedule(chunk_size=8)
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


def test_layers_of_a_pattern_are_stacked_by_place():
  config = dataclasses.replace(
      tiny.BASE, num_layers=8, layer_pattern=("sliding", "sliding", "full"),
      window=4,
  )
  assert pattern.layers(config) == [
      "sliding", "sliding", "full", "sliding", "sliding", "full",
      "sliding", "sliding",
  ]
  periods, rest = pattern.parts(config)
  assert [list(periods.layers(j)) for j in range(3)] == [
      [0, 3], [1, 4], [2, 5]
  ]
  assert [list(rest.layers(j)) for j in range(2)] == [[6], [7]]
  tree = pattern.build(config, lambda kind, count: (kind, count))
  assert tree == {
      "periods": {
          "0": ("sliding", 2), "1": ("sliding", 2), "2": ("full", 2)
      },
      "rest": {"0": ("sliding", 1), "1": ("sliding", 1)},
  }
  assert pattern.join(config, pattern.split(config, tree)) == tree
  # Parts of a tree, as where only some layers are trained, stay parts.
  part = {"periods": {"1": {"a": 1}}}
  assert pattern.join(config, pattern.split(config, part)) == part
