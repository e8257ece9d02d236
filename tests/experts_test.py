# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: routing by hand, gradients, and kept choices."""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay.devices import sharding
from branch_replay.engine import runs
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.models import adapters
from branch_replay.models import pattern
from branch_replay.ops import experts as ops
from branch_replay.ops import experts_reference as reference
from branch_replay.ops import grouped_dot
from branch_replay.planning import flops
from branch_replay.planning import plan
from tests import gradient_test
from tests import tiny

TOLERANCE = 1e-11
EXPERTS = tiny.ARCHITECTURES["experts"]
# Layers: dense and sliding; full and sliding, a period of experts.
WINDOWS = dataclasses.replace(
    tiny.BASE, num_layers=3, layer_pattern=("sliding", "full"), window=5,
    experts=br.Experts(4, 1, 20, first_dense=1, normalised=False),
)
QWEN3_NEXT = dataclasses.replace(
    tiny.ARCHITECTURES["hybrid"],
    experts=br.Experts(5, 2, 20, shared_width=16, shared_gate=True),
)
CONFIGS = {
    "expert groups": tiny.ARCHITECTURES["expert groups"], "windows": WINDOWS,
    "qwen3 next": QWEN3_NEXT,
}


def problem(config):
  decoder, params = tiny.model(tiny.in_float64(config))
  group = tiny.group(12, (5, 1, 3))
  return decoder, params, group, tiny.weights(group)


@functools.cache
def dense_gradient(config):
  """Of `problem`, by autodiff of every expert on every token."""
  return tiny.dense_gradient(*problem(config))


def gradient(decoder, params, group, weights, **options):
  return br.value_and_grad(decoder, tiny.loss, **options)(
      params, group, weights
  )[1]


@pytest.mark.parametrize("sizes", ((3, 0, 9, 1), (0, 0, 0, 7), (1, 0, 0, 0)))
def test_rows_meet_the_matrix_of_their_group(x64, monkeypatch, sizes):
  monkeypatch.setattr(grouped_dot, "_LARGEST", 2)  # several blocks a group
  random = np.random.default_rng(0)
  rows, of_row = sum(sizes), np.repeat(np.arange(4), sizes)
  x_NA, w_EAB, dy_NB = (
      jnp.asarray(random.normal(size=shape))
      for shape in ((rows, 5), (4, 5, 3), (rows, 3))
  )
  sizes_E = jnp.asarray(sizes, jnp.int32)
  found = jax.vjp(
      lambda x, w: grouped_dot.grouped_dot(x, w, sizes_E), x_NA, w_EAB
  )
  wanted = jax.vjp(
      lambda x, w: jnp.einsum("na,nab->nb", x, w[of_row]), x_NA, w_EAB
  )
  np.testing.assert_allclose(found[0], wanted[0], atol=1e-14)
  for mine, other in zip(found[1](dy_NB), wanted[1](dy_NB), strict=True):
    np.testing.assert_allclose(mine, other, atol=1e-13)


def test_rows_in_the_order_of_experts_give_the_reference(x64):
  random = np.random.default_rng(1)
  tokens, experts, k = 7, 5, 3
  x_NM, gate, up, down = (
      jnp.asarray(random.normal(size=shape))
      for shape in ((tokens, 4), (experts, 4, 6), (experts, 4, 6),
                    (experts, 6, 4))
  )
  choices_Nk = jnp.asarray(
      [random.permutation(experts)[:k] for _ in range(tokens)], jnp.int32
  )
  weights_Nk = jnp.asarray(random.normal(size=(tokens, k)))
  rows = ops.order(choices_Nk, experts)
  x_RM = ops.to_experts(x_NM, rows)
  hidden_RF = jax.nn.silu(
      grouped_dot.grouped_dot(x_RM, gate, rows.sizes_E)
  ) * grouped_dot.grouped_dot(x_RM, up, rows.sizes_E)
  hidden_RF *= weights_Nk.reshape(-1, 1)[rows.to_R]
  out_RM = grouped_dot.grouped_dot(hidden_RF, down, rows.sizes_E)
  np.testing.assert_allclose(
      ops.to_tokens(out_RM, rows, tokens),
      reference.mix(x_NM, weights_Nk, choices_Nk, gate, up, down),
      atol=1e-12,
  )


def test_weights_of_a_softmax_by_hand(x64):
  logits = jnp.log(jnp.array([[1.0, 5.0, 3.0, 1.0]]))  # probabilities in tenths
  plain = br.Experts(4, 2, 1, normalised=False)
  choices = ops.choose(plain, logits)
  np.testing.assert_array_equal(choices, [[1, 2]])
  np.testing.assert_allclose(ops.weights(plain, logits, choices), [[0.5, 0.3]])
  normed = br.Experts(4, 2, 1, scaling=2.0)
  np.testing.assert_allclose(
      ops.weights(normed, logits, choices), [[1.25, 0.75]]
  )
  # The weights of other choices are those of the logits at hand.
  other = ops.weights(plain, logits, jnp.array([[0, 1]]))
  np.testing.assert_allclose(other, [[0.1, 0.5]])


def test_a_correction_moves_the_choice_and_not_the_weight(x64):
  routing = br.Experts(3, 1, 1, scores="sigmoid", normalised=False)
  logits = jnp.array([[0.0, jnp.log(3.0), jnp.log(9.0)]])  # 0.5, 0.75, 0.9
  np.testing.assert_array_equal(ops.choose(routing, logits), [[2]])
  moved = ops.choose(routing, logits, jnp.array([0.0, 0.2, 0.0]))
  np.testing.assert_array_equal(moved, [[1]])
  np.testing.assert_allclose(ops.weights(routing, logits, moved), [[0.75]])


def test_a_token_chooses_within_the_best_groups(x64):
  logits = jnp.log(jnp.array([[0.30, 0.01, 0.20, 0.19, 0.22, 0.08]]))
  by_best = br.Experts(6, 2, 1, groups=3, top_groups=1)
  np.testing.assert_array_equal(ops.choose(by_best, logits), [[0, 1]])
  by_two = dataclasses.replace(by_best, group_top=2)  # 0.31, 0.39, 0.30
  np.testing.assert_array_equal(ops.choose(by_two, logits), [[2, 3]])
  two = dataclasses.replace(by_two, top_groups=2)
  np.testing.assert_array_equal(ops.choose(two, logits), [[0, 2]])
  free = br.Experts(6, 2, 1)
  np.testing.assert_array_equal(ops.choose(free, logits), [[0, 4]])
  # Corrected scores may be negative; closed groups stay closed.
  low = jnp.full(6, -2.0).at[4].set(0.0)
  np.testing.assert_array_equal(ops.choose(by_best, logits, low), [[4, 5]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, activations, chunk_size", (
    ("expert groups", "keep", 4), ("windows", "recompute", 5),
    ("qwen3 next", "recompute_layers", 3),
))
def test_every_policy_gives_the_dense_gradient(
    x64, name, activations, chunk_size
):
  decoder, params, group, weights = problem(CONFIGS[name])
  wanted = dense_gradient(CONFIGS[name])
  schedule = br.Schedule(
      activations=activations, chunk_size=chunk_size, branches_at_once=2
  )
  found = gradient(decoder, params, group, weights, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE
  for path, leaf in traverse_util.flatten_dict(found, sep="/").items():
    assert leaf.any() == ("correction" not in path), path


@pytest.mark.exhaustive
def test_two_devices_give_the_dense_gradient(x64):
  decoder, params, group, weights = problem(CONFIGS["expert groups"])
  wanted = dense_gradient(CONFIGS["expert groups"])
  layout = sharding.sharded(params, 2)
  assert dict(layout.axes)["layers/periods/0/expand/expert_gate/kernel"] == 1
  schedule = br.Schedule(
      chunk_size=8, activations="recompute", layout=layout
  )
  found = gradient(decoder, params, group, weights, schedule=schedule)
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_stop_equals_dense_with_a_stopped_prefix(x64):
  decoder, params, group, weights = problem(EXPERTS)
  wanted = gradient_test.stopped_dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(chunk_size=4)
  found = gradient(
      decoder, params, group, weights, schedule=schedule,
      prefix_gradient="stop",
  )
  assert tiny.worst(found, wanted) <= TOLERANCE
  assert tiny.worst(found, dense_gradient(EXPERTS)) > 0.1


@pytest.mark.exhaustive
def test_the_host_loop_gives_the_dense_gradient(x64):
  decoder, params, group, weights = problem(EXPERTS)
  wanted = dense_gradient(EXPERTS)
  found = br.value_and_grad(
      decoder, tiny.loss, hosted=br.Hosted(),
      schedule=br.Schedule(chunk_size=4, activations="recompute"),
  )(params, group, weights)[1]
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("activations", ("recompute", "recompute_layers"))
def test_a_popped_chunk_has_the_experts_it_was_captured_with(x64, activations):
  """Of experts that tie, which run again is settled by what was kept."""
  decoder, params, group, _ = problem(EXPERTS)
  router = jax.tree.map(jnp.zeros_like, params["layers"]["expand"]["router"])
  expand = params["layers"]["expand"] | {"router": router}
  params = params | {"layers": params["layers"] | {"expand": expand}}
  spec = spec_lib.Spec(
      decoder, schedule=br.Schedule(chunk_size=8, activations=activations)
  )
  state = br.capture(decoder, params, group, schedule=spec.schedule)
  np.testing.assert_array_equal(  # the first of those that tie
      state.choices[:, 0, :11], np.broadcast_to([0, 1], (2, 11, 2))
  )

  @jax.jit
  def pop(choices):
    accumulator = jax.tree.map(
        jnp.ones_like, state_lib.accumulator(decoder.config, state.capacity)
    )
    run = runs.chunk(state.tokens, state.length, 1, 8)
    grads, *_ = steps.pop(
        spec, params, spec_lib.zero_grads(params), accumulator,
        dataclasses.replace(state, choices=choices), run, state.saved,
    )
    return jnp.abs(grads["layers"]["expand"]["expert_up"]["kernel"]).max((2, 3))

  # The last layer's feed-forward leaves nothing behind.
  np.testing.assert_array_equal(
      pop(state.choices) > 0, [[True, True, False, False], [False] * 4]
  )
  flipped = state.choices.at[:, :, 6:].set(jnp.array([3, 2], jnp.int32))
  np.testing.assert_array_equal(
      pop(flipped) > 0, [[False, False, True, True], [False] * 4]
  )


def test_choices_are_kept_by_position(x64):
  """Whatever the chunks, and in a state that was extended."""
  decoder, params, group, _ = problem(EXPERTS)
  prompt = group.prompt[: int(group.prompt_length)]
  whole = br.capture(decoder, params, group)
  assert whole.choices.dtype == jnp.int32
  assert len(np.unique(whole.choices[:, :, :11])) > 2  # there is a choice
  extended = br.extend(
      decoder, params,
      br.capture(
          decoder, params, prompt[:5], capacity=20,
          schedule=br.Schedule(chunk_size=2),
      ),
      prompt[4:11],
  )
  np.testing.assert_array_equal(
      extended.choices[:, :, :11], whole.choices[:, :, :11]
  )
  assert not extended.choices[:, :, 11:].any()


def test_plan_and_flops_count_what_there_is():
  config = CONFIGS["expert groups"]
  experts = config.experts
  step = plan.Step(
      config, prefix=64, branches=2, tail=8, devices=1, chunk_size=16
  )
  found = plan.bytes_per_device(step)
  keys = 4 * 3 * 2 * config.num_kv_heads * config.head_dim * 64
  assert found["state"] == keys + 4 * 2 * 64 * experts.top_k
  assert found["accumulator"] == keys
  decoder = br.Decoder(config)
  params = jax.eval_shape(
      lambda: decoder.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  # A token meets k of E experts.
  size = sum(
      x.size * (experts.top_k / experts.count if "expert_" in path else 1)
      for path, x in traverse_util.flatten_dict(
          params["layers"], sep="/"
      ).items()
      if path.endswith("kernel")
  )
  assert flops.layer_parameters(config) == size
  for keep, counted in (
      ("stages", schedule_lib.layers_bytes),
      ("inputs", schedule_lib.input_bytes),
  ):
    *_, (_, kept) = jax.eval_shape(
        lambda params, keep=keep: steps.push(
            spec_lib.Spec(decoder), params, state_lib.empty(config, 16),
            runs.chunk(jnp.zeros(16, int), 16, 0, 16), keep=keep,
        ), params,
    )
    assert counted(config) * 16 == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)
    )


def test_layers_before_the_experts_are_a_part():
  longer = dataclasses.replace(WINDOWS, num_layers=4)
  assert [tuple(part) for part in pattern.parts(longer)] == [
      ("dense", ("sliding",), 1, 0, False),
      ("periods", ("full", "sliding"), 1, 1, True),
      ("rest", ("full",), 1, 3, True),
  ]
  short = dataclasses.replace(WINDOWS, num_layers=2)
  assert [tuple(part) for part in pattern.parts(short)] == [
      ("dense", ("sliding",), 1, 0, False), ("rest", ("full",), 1, 1, True),
  ]
  assert [tuple(part) for part in pattern.parts(EXPERTS)] == [
      ("", ("full",), 2, 0, True)
  ]


@pytest.mark.parametrize("options, message", (
    (dict(top_k=5), "top_k=5 is more than the 4 experts"),
    (dict(count=0), "count must be at least 1, not 0"),
    (dict(scores="tanh"), "'softmax' or 'sigmoid': 'tanh'"),
    (dict(shared_gate=True), "give it a shared_width"),
    (dict(groups=3), "count=4 is not a multiple of groups=3"),
    (dict(groups=2, top_groups=3), "2 groups of 2: top_groups=3"),
    (dict(groups=2, top_k=3, top_groups=1), "more than the 2 experts"),
))
def test_impossible_experts_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    br.Experts(**dict(count=4, top_k=2, width=8) | options)


def test_experts_have_no_adapters(x64):
  decoder, params, *_ = problem(EXPERTS)
  with pytest.raises(ValueError, match=r"as in \('query', 'key', 'value'"):
    adapters.add(
        decoder, params, config_lib.Adapter(2, 4.0), jax.random.key(0)
    )
  adapter = config_lib.Adapter(2, 4.0, ("query", "output"))
  model, params = adapters.add(decoder, params, adapter, jax.random.key(0))
  part = adapters.select(params, "adapters")
  assert set(part["layers"]) == {"project", "join"}
  with pytest.raises(ValueError, match="leaves none of 2 layers"):
    dataclasses.replace(
        EXPERTS, experts=br.Experts(4, 2, 8, first_dense=2)
    )
