# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Bad input is an error that says what and what to do; states are checked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from tests import tiny


@pytest.mark.parametrize(
    "prompt,tails,message",
    [
        ([], [[1]], "Empty prompt"),
        ([1, 2], [], "at least one tail"),
        ([1, 64], [[1]], "prompt lie outside the vocabulary of 64"),
        ([1, -1], [[1]], "outside the vocabulary"),
        ([1], [[1, 2], [999]], "tails lie outside.*999"),
        ([1] * 250, [[1] * 7], "257 positions exceed.*256"),
    ],
)
def test_groups_that_no_model_can_run(prompt, tails, message):
  with pytest.raises(ValueError, match=message):
    br.Group.create(prompt, tails, config=tiny.BASE)


def test_the_longest_group_that_fits():
  group = br.Group.create([1] * 250, [[1] * 6], config=tiny.BASE)
  assert (int(group.prompt_length), group.tail_lengths.tolist()) == (250, [6])


def test_hand_made_groups_are_checked_too():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  outside = dataclasses.replace(group, tails=group.tails.at[0, 0].set(64))
  with pytest.raises(ValueError, match="outside the vocabulary"):
    br.log_probs(decoder, params, outside)
  empty = dataclasses.replace(group, prompt_length=jnp.int32(0))
  with pytest.raises(ValueError, match="Empty prompt"):
    br.value_and_grad(decoder, tiny.loss)(params, empty, 0)


def test_unknown_modes_and_policies():
  decoder, params = tiny.model(tiny.BASE)
  with pytest.raises(
      ValueError, match="'detach'.*full, exact, banded, sampled, stop"
  ):
    br.log_probs(decoder, params, tiny.group(), prefix_gradient="detach")
  with pytest.raises(ValueError, match="'offload'.*keep, recompute"):
    br.Schedule(activations="offload")
  for field in ("chunk_size", "branches_at_once", "readout_tokens"):
    with pytest.raises(ValueError, match=f"{field} must be at least 1"):
      br.Schedule(**{field: 0})


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(num_kv_heads=3), "not a multiple"),
        (dict(head_dim=15), "even head_dim"),
        (dict(rope_scaling="ntk"), "Unknown RoPE scaling"),
        (dict(num_layers=0), "num_layers must be at least 1"),
        (dict(compute_dtype="int32"), "must be a float"),
    ],
)
def test_bad_geometry(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(tiny.BASE, **change)


def test_stacking_different_numbers_of_branches():
  with pytest.raises(ValueError, match=r"Groups of \[2, 3\] branches"):
    br.stack([tiny.group(tails=(1, 2)), tiny.group(tails=(1, 2, 3))])


def test_padding_a_group_to_more_branches_adds_neutral_ones():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group(tails=(3, 4))
  tails = [np.asarray(group.tails[i, :n]) for i, n in enumerate((3, 4))]
  padded = br.Group.create(
      group.prompt[:12], tails, config=tiny.BASE, branches=4
  )
  log_probs = br.log_probs(decoder, params, padded)
  np.testing.assert_allclose(
      log_probs[:2], br.log_probs(decoder, params, group), atol=1e-6
  )
  assert log_probs.shape[0] == 4 and not log_probs[2:].any()


def updated(params):
  return jax.tree.map(lambda x: x + 1e-3, params)


@pytest.mark.exhaustive
def test_a_captured_state_gives_the_same_result():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  weights = tiny.weights(group)
  for keep in (False, True):
    schedule = br.Schedule(chunk_size=5, activations="keep")
    state = br.capture(decoder, params, group, schedule=schedule, keep=keep)
    assert int(state.length) == 11  # the prompt's last token runs with tails
    function = br.value_and_grad(decoder, tiny.loss, schedule=schedule)
    (_, wanted, _), gradient = function(params, group, weights)
    (_, log_probs, _), other = function(params, group, weights, state=state)
    np.testing.assert_allclose(log_probs, wanted, atol=1e-6)
    assert tiny.worst(other, gradient) <= 1e-5
    by_autodiff = jax.grad(
        lambda p, state=state, schedule=schedule: tiny.loss(
            br.log_probs(decoder, p, group, state=state, schedule=schedule),
            weights,
        )
    )(params)
    assert tiny.worst(by_autodiff, gradient) <= 1e-5


def test_a_state_captured_inside_of_grad_is_a_constant():
  decoder, params = tiny.model(tiny.BASE)
  group, schedule = tiny.group(), br.Schedule(chunk_size=5)

  def total(params):
    state = br.capture(decoder, params, group, schedule=schedule)
    return sum(jnp.sum(x) for x in state.mixer)

  assert not any(x.any() for x in jax.tree.leaves(jax.grad(total)(params)))


def test_a_state_of_other_parameters_is_refused_unless_asked_for():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  state = br.capture(decoder, params, group)
  new = updated(params)
  with pytest.raises(ValueError, match="captured under other parameters"):
    br.log_probs(decoder, new, group, state=state)
  with pytest.raises(ValueError, match="captured under other parameters"):
    jax.grad(
        lambda p: br.log_probs(decoder, p, group, state=state).sum()
    )(new)
  with pytest.raises(ValueError, match="captured under other parameters"):
    br.value_and_grad(decoder, tiny.loss)(
        new, group, tiny.weights(group), state=state
    )
  stale = br.log_probs(decoder, new, group, state=state, allow_stale=True)
  fresh = br.log_probs(decoder, new, group)
  assert jnp.isfinite(stale).all() and (stale != fresh).any()


def test_under_jit_a_wrong_version_turns_everything_into_nan():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  state = br.capture(decoder, params, group, version=7)

  @jax.jit
  def log_probs(params, version):
    return br.log_probs(decoder, params, group, state=state, version=version)

  assert jnp.isfinite(log_probs(params, 7)).all()
  assert jnp.isnan(log_probs(params, 8)).all()


def test_a_state_of_another_prompt_or_schedule_is_refused():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  other = br.capture(decoder, params, tiny.group(seed=5))
  with pytest.raises(ValueError, match="another prompt"):
    br.log_probs(decoder, params, group, state=other)
  state = br.capture(decoder, params, group)
  with pytest.raises(ValueError, match="no state="):
    br.log_probs(decoder, params, group, state=state, prefix_gradient="full")
  with pytest.raises(ValueError, match="stacked groups"):
    br.log_probs(decoder, params, br.stack([group, group]), state=state)
  kept = br.capture(
      decoder, params, group, keep=True, schedule=br.Schedule(chunk_size=4)
  )
  with pytest.raises(ValueError, match="chunks of 4 positions"):
    br.log_probs(decoder, params, group, state=kept)


@pytest.mark.exhaustive
def test_extending_a_state_equals_capturing_the_whole_prompt(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=20)
  prompt = np.asarray(group.prompt[:20])
  state = br.capture(decoder, params, prompt[:8], capacity=24)
  assert int(state.length) == 7
  state = br.extend(decoder, params, state, prompt[7:12])
  state = br.extend(decoder, params, state, prompt[12:19])
  weights = tiny.weights(group)
  function = br.value_and_grad(
      decoder, tiny.loss, schedule=br.Schedule(activations="recompute")
  )
  (_, wanted, _), gradient = function(params, group, weights)
  (_, log_probs, _), other = function(params, group, weights, state=state)
  np.testing.assert_allclose(log_probs, wanted, atol=1e-12)
  assert tiny.worst(other, gradient) <= 1e-11


def test_a_full_state_is_an_error_before_anything_is_overwritten():
  decoder, params = tiny.model(tiny.BASE)
  state = br.capture(decoder, params, [1, 2, 3, 4, 5, 6], capacity=8)
  before = jax.tree.map(np.asarray, state)
  with pytest.raises(ValueError, match="full: 5 of 8.*4 more do not fit"):
    br.extend(decoder, params, state, [1, 2, 3, 4])
  jax.tree.map(np.testing.assert_array_equal, state, before)
  with pytest.raises(ValueError, match="capacity=3 is less"):
    br.capture(decoder, params, [1, 2, 3, 4, 5, 6], capacity=3)


def test_under_jit_a_stale_state_turns_everything_into_nan():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  weights = tiny.weights(group)
  state = br.capture(decoder, params, group)
  function = jax.jit(br.value_and_grad(decoder, tiny.loss))
  evaluation, grads = function(params, group, weights, state=state)
  assert jnp.isfinite(evaluation.loss)
  evaluation, grads = function(updated(params), group, weights, state=state)
  for leaf in (evaluation.loss, *jax.tree.leaves(grads)):
    assert jnp.isnan(leaf).all()
  by_autodiff = jax.jit(jax.grad(
      lambda p: tiny.loss(
          br.log_probs(decoder, p, group, state=state), weights
      )
  ))(updated(params))
  assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(by_autodiff))


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(prompt_length=40), "prompt_length=40 of a prompt of 17"),
        (dict(tail_lengths=[9, 1, 1, 1]), "tail_lengths from 1 to 9 of tails"),
        (dict(tail_lengths=[-1, 1, 1, 1]), "tail_lengths from -1"),
    ],
)
def test_lengths_that_do_not_fit_their_arrays(change, message):
  decoder, params = tiny.model(tiny.BASE)
  wrong = dataclasses.replace(
      tiny.group(),
      **{name: jnp.asarray(value) for name, value in change.items()},
  )
  with pytest.raises(ValueError, match=message):
    br.log_probs(decoder, params, wrong)


@pytest.mark.parametrize("prompt", [[1.5, 2.0], [[1, 2], [3, 4]]])
def test_ids_that_are_not_a_sequence_of_integers(prompt):
  with pytest.raises(ValueError, match="one sequence of integer ids"):
    br.Group.create(prompt, [[1]], config=tiny.BASE)


@pytest.mark.exhaustive
def test_room_to_spare_costs_nothing_and_changes_nothing(x64):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group()
  weights = tiny.weights(group)
  roomy = br.capture(decoder, params, group, capacity=200)
  assert roomy.capacity == 200
  function = br.value_and_grad(decoder, tiny.loss)
  _, wanted = function(params, group, weights)
  _, gradient = function(params, group, weights, state=roomy)
  assert tiny.worst(gradient, wanted) <= 1e-11
  np.testing.assert_array_equal(roomy.mixer[0][:, :, 16:], 0)


def test_under_jit_a_state_of_another_prompt_turns_everything_into_nan():
  decoder, params = tiny.model(tiny.BASE)
  group, other = tiny.group(), tiny.group(seed=5)
  function = jax.jit(
      lambda group, state: br.log_probs(decoder, params, group, state=state)
  )
  state = br.capture(decoder, params, group)
  np.testing.assert_allclose(
      function(group, state), br.log_probs(decoder, params, group), atol=1e-6
  )
  wrong = function(group, br.capture(decoder, params, other))
  assert jnp.isnan(wrong).all()


def test_a_state_marked_by_the_caller_can_be_extended_and_sampled_from():
  decoder, params = tiny.model(tiny.BASE)
  state = br.capture(decoder, params, [1, 2, 3], capacity=8, version=7)
  with pytest.raises(ValueError, match="captured under other parameters"):
    br.extend(decoder, params, state, [3, 4])
  state = br.extend(decoder, params, state, [3, 4], version=7)
  rollout = br.sample(
      decoder, params, [1, 2, 3, 4, 5], key=jax.random.key(0), branches=1,
      max_tokens=2, state=state, version=7,
  )
  assert rollout.lengths.tolist() == [2]
  with pytest.raises(ValueError, match="belongs to a state"):
    br.log_probs(decoder, params, tiny.group(), version=7)
