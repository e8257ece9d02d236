# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""exact == full == dense, and stop == dense with a stopped prefix."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.engine import compiled
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.ops.attention import reference
from tests import tiny

TOLERANCE = 1e-11  # float64, relative, worst parameter

# Sizes that divide nothing, every policy, every way to group branches.
SCHEDULES = {
    "keep, one chunk": br.Schedule(activations="keep"),
    "keep, chunks of 5": br.Schedule(
        activations="keep", chunk_size=5, branches_at_once=3
    ),
    "recompute, chunks of 4": br.Schedule(
        activations="recompute", chunk_size=4, branches_at_once=1
    ),
    "recompute layers, chunks of 7": br.Schedule(
        activations="recompute_layers", chunk_size=7, branches_at_once=2,
        readout_tokens=6,
    ),
    "recompute, chunks of 1": br.Schedule(
        activations="recompute", chunk_size=1
    ),
}


def one_pass(decoder, params, group, weights, **options):
  function = br.value_and_grad(decoder, tiny.loss, **options)
  return function(params, group, weights)


def by_autodiff(decoder, params, group, weights, **options):
  return jax.grad(
      lambda p: tiny.loss(br.log_probs(decoder, p, group, **options), weights)
  )(params)


@pytest.mark.exhaustive(but=("delta", "deepseek"))
# Two that differ from "yarn" in the constants of RoPE alone.
@pytest.mark.parametrize(
    "name", sorted(tiny.ARCHITECTURES.keys() - {"linear", "llama3"})
)
def test_exact_and_full_equal_dense_for_every_architecture(x64, name):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  group = tiny.group(tails=(5, 1, 3))
  weights = tiny.weights(group)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(chunk_size=5, activations="recompute")
  for mode in ("exact", "full"):
    (_, log_probs, _), gradient = one_pass(
        decoder, params, group, weights, prefix_gradient=mode,
        schedule=schedule,
    )
    assert tiny.worst(gradient, wanted) <= TOLERANCE, mode
    np.testing.assert_allclose(
        log_probs, br.dense_log_probs(decoder, params, group), atol=1e-12
    )


@pytest.mark.exhaustive(but=("recompute, chunks of 4", "keep, chunks of 5"))
@pytest.mark.parametrize("name", SCHEDULES)
def test_exact_equals_dense_for_every_schedule(x64, name):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(tails=(5, 1, 3, 7, 0))
  weights = tiny.weights(group)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  options = dict(schedule=SCHEDULES[name])
  _, gradient = one_pass(decoder, params, group, weights, **options)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  gradient = by_autodiff(decoder, params, group, weights, **options)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


def stopped_dense_gradient(decoder, params, group, weights):
  """Dense, with keys and values of positions 0…P−2 held constant."""
  captured = int(group.prompt_length) - 1

  def stop(x_KGTD):
    return x_KGTD.at[:, :, :captured].set(
        jax.lax.stop_gradient(x_KGTD[:, :, :captured])
    )

  def log_probs(params):
    tokens = group.sequences()

    logits = decoder.apply(
        {"params": params}, tokens,
        attend=lambda q, k, v: reference.causal(q, stop(k), stop(v)),
    )
    window = jax.nn.log_softmax(logits)[:, captured:][:, :-1]
    window = window[:, : group.tails.shape[1]]
    picked = jnp.take_along_axis(window, group.tails[..., None], -1)[..., 0]
    return jnp.where(group.mask(), picked, 0)

  return jax.jit(jax.grad(lambda p: tiny.loss(log_probs(p), weights)))(params)


def test_stop_equals_dense_with_a_stopped_prefix(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  weights = tiny.weights(group)
  wanted = stopped_dense_gradient(decoder, params, group, weights)
  for schedule in (SCHEDULES["keep, one chunk"],
                   SCHEDULES["recompute, chunks of 4"]):
    options = dict(prefix_gradient="stop", schedule=schedule)
    _, gradient = one_pass(decoder, params, group, weights, **options)
    assert tiny.worst(gradient, wanted) <= TOLERANCE
    gradient = by_autodiff(decoder, params, group, weights, **options)
    assert tiny.worst(gradient, wanted) <= TOLERANCE
  exact = tiny.dense_gradient(decoder, params, group, weights)
  assert tiny.worst(gradient, exact) > 0.1, "stop must be visibly biased here"


def test_parameters_stay_equal_over_three_updates(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  optimizer = optax.adam(1e-2)
  trained = {}
  for mode in ("dense", "exact", "full"):
    mine, memory = params, optimizer.init(params)
    for step in range(3):
      group = tiny.group(seed=step)  # mixed-sign weights, ragged tails
      weights = tiny.weights(group, seed=step)
      if mode == "dense":
        gradient = tiny.dense_gradient(decoder, mine, group, weights)
      else:
        _, gradient = one_pass(
            decoder, mine, group, weights, prefix_gradient=mode,
            schedule=SCHEDULES["keep, one chunk"],
        )
      updates, memory = optimizer.update(gradient, memory)
      mine = optax.apply_updates(mine, updates)
    trained[mode] = mine
  assert tiny.worst(trained["exact"], trained["dense"]) <= TOLERANCE
  assert tiny.worst(trained["full"], trained["dense"]) <= TOLERANCE


@pytest.mark.parametrize("prompt,tails", [(1, (3, 2)), (2, (1,)), (9, (1, 1))])
def test_shortest_prompts_and_tails(x64, prompt, tails):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt, tails)
  weights = tiny.weights(group)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  _, gradient = one_pass(decoder, params, group, weights)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


def test_the_prefix_share_of_key_and_value_gradients_is_there(x64):
  # A cache that detaches would lose it, and the loss would not show it.
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  weights = tiny.weights(group)
  _, exact = one_pass(decoder, params, group, weights)
  _, stop = one_pass(
      decoder, params, group, weights, prefix_gradient="stop"
  )
  for name in ("key", "value"):
    share = jax.tree.map(
        lambda a, b: a - b,
        exact["layers"]["project"][name], stop["layers"]["project"][name],
    )
    assert float(jnp.linalg.norm(share["kernel"])) > 0.1
  np.testing.assert_allclose(
      exact["head"]["table"], stop["head"]["table"], rtol=1e-12, atol=1e-14
  )


def test_order_of_branches_does_not_matter(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  weights = tiny.weights(group)
  order = jnp.array([2, 0, 3, 1])
  shuffled = dataclasses.replace(
      group, tails=group.tails[order], tail_lengths=group.tail_lengths[order]
  )
  schedule = br.Schedule(branches_at_once=3)
  (_, log_probs, _), gradient = one_pass(
      decoder, params, group, weights, schedule=schedule
  )
  (_, moved, _), other = one_pass(
      decoder, params, shuffled, weights[order], schedule=schedule
  )
  assert tiny.worst(other, gradient) <= TOLERANCE
  np.testing.assert_allclose(moved, log_probs[order], atol=1e-13)


@pytest.mark.exhaustive
def test_stacked_groups_equal_the_sum_of_their_gradients(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  groups = [
      tiny.group(prompt, tails, seed=prompt)
      for prompt, tails in ((5, (3, 4)), (19, (9, 1)), (1, (2, 0)))
  ]
  stacked = br.stack(groups)
  weights = tiny.weights(stacked)
  gradients, log_probs = [], []
  for group, of_group in zip(groups, weights, strict=True):
    of_group = of_group[:, : group.tails.shape[1]]
    gradients.append(
        tiny.dense_gradient(decoder, params, group, of_group)
    )
    log_probs.append(br.dense_log_probs(decoder, params, group))
  wanted = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
  schedule = br.Schedule(chunk_size=8, activations="recompute")
  (_, outputs, _), gradient = one_pass(
      decoder, params, stacked, weights, schedule=schedule
  )
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  for mine, of_group in zip(outputs, log_probs, strict=True):
    width = of_group.shape[1]
    np.testing.assert_allclose(mine[:, :width], of_group, atol=1e-12)
    assert not mine[:, width:].any()
  gradient = by_autodiff(decoder, params, stacked, weights, schedule=schedule)
  assert tiny.worst(gradient, wanted) <= TOLERANCE


def test_each_branch_is_predicted_by_the_shared_last_prompt_token(x64):
  # One physical token, four logical targets, one of them a whole tail.
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  rng = np.random.default_rng(0)
  tails = [[first, *rng.integers(0, 64, 4)] for first in (3, 9, 27)] + [[40]]
  group = br.Group.create(rng.integers(0, 64, 12), tails, config=tiny.BASE)
  logits = decoder.apply({"params": params}, group.prompt[None, :12])
  wanted = jax.nn.log_softmax(logits[0, 11])[jnp.array([3, 9, 27, 40])]
  first = br.log_probs(decoder, params, group)[:, 0]
  np.testing.assert_allclose(first, wanted, atol=1e-12)


def test_padding_changes_nothing(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  weights = tiny.weights(group)
  padded = dataclasses.replace(
      group,
      prompt=jnp.pad(group.prompt, (0, 13), constant_values=7),
      tails=jnp.pad(group.tails, ((0, 0), (0, 5)), constant_values=3),
  )
  wide = jnp.pad(weights, ((0, 0), (0, 5)), constant_values=2.0)
  (value, log_probs, _), gradient = one_pass(decoder, params, group, weights)
  (other, more, _), longer = one_pass(decoder, params, padded, wide)
  np.testing.assert_allclose(other, value, rtol=1e-12)
  np.testing.assert_allclose(more[:, : log_probs.shape[1]], log_probs,
                             atol=1e-12)
  assert tiny.worst(longer, gradient) <= TOLERANCE


@pytest.mark.exhaustive
def test_tails_of_nothing_give_zeros_and_a_zero_gradient():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group(tails=(0, 0))
  weights = tiny.weights(group)
  (value, log_probs, _), gradient = one_pass(decoder, params, group, weights)
  assert float(value) == 0 and not log_probs.any()
  chex.assert_trees_all_equal(gradient, spec_lib.zero_grads(params))


@pytest.mark.exhaustive
def test_float32_and_temperature_agree_with_dense():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  weights = tiny.weights(group)

  def gradient(log_probs):
    return jax.grad(
        lambda p: tiny.loss(
            log_probs(decoder, p, group, temperature=0.6), weights
        )
    )(params)

  wanted = gradient(br.dense_log_probs)
  assert tiny.worst(gradient(br.log_probs), wanted) <= 1e-5


def test_bfloat16_compute_gives_float32_gradients_near_the_float32_ones():
  decoder, params = tiny.model(tiny.BASE)
  half = br.Decoder(
      dataclasses.replace(tiny.BASE, compute_dtype="bfloat16")
  )
  group = tiny.group()
  weights = tiny.weights(group)
  (_, log_probs, _), gradient = one_pass(half, params, group, weights)
  assert log_probs.dtype == jnp.float32
  assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {
      jnp.dtype("float32")
  }
  _, wanted = one_pass(decoder, params, group, weights)
  assert tiny.worst(gradient, wanted) < 0.2


def test_any_readout_is_differentiable(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  with_head = params | {"value": {"kernel": jnp.linspace(-1.0, 1.0, 32)}}

  def gradient(prefix_gradient):
    def loss(params):
      outputs = br.replay(
          decoder, params, group, readout=value_and_entropy,
          prefix_gradient=prefix_gradient,
      )
      return jnp.sum(outputs["value"] ** 2) + jnp.sum(outputs["entropy"])
    return jax.grad(loss)(with_head)

  exact, full = gradient("exact"), gradient("full")
  assert float(jnp.linalg.norm(full["value"]["kernel"])) > 0.1
  assert tiny.worst(exact, full) <= TOLERANCE


def value_and_entropy(model, params, hidden_NM, targets_N, layout):
  del layout
  """A readout with parameters of its own."""
  del targets_N
  table = model.apply(
      {"params": {k: v for k, v in params.items() if k != "value"}},
      method="head_table",
  )
  log_probs_NV = jax.nn.log_softmax(hidden_NM @ table.T)
  entropy_N = -jnp.sum(jnp.exp(log_probs_NV) * log_probs_NV, axis=-1)
  return {"value": hidden_NM @ params["value"]["kernel"], "entropy": entropy_N}


def test_two_compilations_are_bit_equal():
  """Of two functions that say the same, so that no program is used twice."""
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  weights = tiny.weights(group)
  before = compiled.value_and_grad._cache_size()
  first, second = (
      br.value_and_grad(decoder, lambda *args: tiny.loss(*args))(
          params, group, weights
      )
      for _ in range(2)
  )
  assert compiled.value_and_grad._cache_size() == before + 2
  chex.assert_trees_all_equal(first, second)


def test_chunks_are_equal_and_hold_the_prefix():
  for positions in range(1, 200):
    for at_most in (1, 3, 8, 64, 1000):
      count, size = state_lib.chunks(positions, at_most)
      assert size <= at_most and (count - 1) * size < positions <= count * size
      # A state made for these chunks is cut into the same ones again.
      assert state_lib.chunks(count * size, at_most) == (count, size)


@pytest.mark.exhaustive
def test_bfloat16_parameters_have_gradients_summed_in_float32():
  # Chunks of the readout must not be rounded to bfloat16 one by one.
  config = dataclasses.replace(tiny.BASE, param_dtype="bfloat16")
  decoder, params = tiny.model(config)
  group = tiny.group(tails=(20, 20, 20))
  weights = tiny.weights(group)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  _, wanted = one_pass(
      br.Decoder(tiny.BASE), wide, group, weights
  )
  _, gradient = one_pass(
      decoder, params, group, weights,
      schedule=br.Schedule(readout_tokens=8, branches_at_once=1, chunk_size=4),
  )
  assert tiny.worst(gradient, wanted) <= 1e-5


def test_a_loss_that_is_not_a_scalar_is_refused():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  with pytest.raises(ValueError, match="must be a scalar"):
    br.value_and_grad(decoder, lambda log_probs: log_probs.sum(axis=1))(
        params, group
    )
