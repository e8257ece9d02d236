# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What one update does to parameters, to their dtypes, and when it is skipped.
"""

import dataclasses
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.config import Adapter
from branch_replay.devices import sharding
from branch_replay.models import adapters
from branch_replay.rl import objectives
from branch_replay.rollout import unstacked
from branch_replay.rollout.drafters import learned
from branch_replay.training import actor_critic
from branch_replay.training import optimizers
from branch_replay.training import step as step_lib
from branch_replay.training.drafting import trainer as trainer_lib
from tests import tiny

SMALL = dataclasses.replace(tiny.BASE, num_layers=1, tied_embeddings=True)
NARROW = dataclasses.replace(
    SMALL, param_dtype="bfloat16", compute_dtype="bfloat16"
)
OPTIMIZERS = {
    "adamw": optimizers.adamw(optax.constant_schedule(0.1), weight_decay=0.1),
    "narrow moments": optimizers.with_state_dtype(
        optimizers.adamw(0.1, weight_decay=0.1), "bfloat16"
    ),
    "adam, first moment narrow": optax.adam(0.1, mu_dtype="bfloat16"),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "by its hyperparameters": optax.inject_hyperparams(optax.adam)(0.1),
}


def shapes(tree):
  return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


def dtypes(tree):
  return {str(x.dtype) for x in jax.tree.leaves(tree)}


@pytest.mark.filterwarnings("ignore:Parameters are trained")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("param_dtype", [None, "file"])
def test_no_update_changes_a_dtype(x64, name, dtype, param_dtype):
  optimizer = OPTIMIZERS[name]
  params = {"kernel": jnp.ones((4, 4), dtype), "bias": jnp.ones(4, dtype)}

  def create(params):
    return step_lib.create(params, optimizer, param_dtype=param_dtype)

  before = jax.eval_shape(create, params)
  after, _ = jax.eval_shape(
      lambda state: step_lib.update(optimizer, state, state.params, 0.0), before
  )
  assert shapes(after) == shapes(before)
  wanted = dtype
  if param_dtype is None and dtype.endswith("16"):
    wanted = "float32"
  assert dtypes(before.params) == {wanted}
  moments = dtypes(before.optimizer) - {"int32"}
  narrow = {"bfloat16"} if "narrow" in name else set()
  assert moments <= {"float32", "float64"} | narrow


@pytest.mark.filterwarnings("ignore:Parameters are trained")
def test_an_update_of_narrow_parameters_compiles_once():
  optimizer = OPTIMIZERS["adamw"]
  train_state = step_lib.create(
      {"kernel": jnp.ones((4, 4), "bfloat16")}, optimizer, param_dtype="file"
  )
  update = jax.jit(functools.partial(step_lib.update, optimizer))
  for _ in range(3):
    train_state, _ = update(train_state, train_state.params, 0.0)
  assert update._cache_size() == 1


def test_what_is_trained_is_float32_and_what_is_frozen_is_as_it_was(x64):
  model, params = tiny.model(NARROW)
  train_state = step_lib.create(params, optax.adam(1e-3))
  assert dtypes(train_state.params) == {"float32"}
  chex.assert_trees_all_equal(
      jax.tree.map(lambda x: x.astype("bfloat16"), train_state.params), params
  )
  assert dtypes(params) == {"bfloat16"}
  adapted, params = adapters.add(model, params, Adapter(2), jax.random.key(0))
  train_state = step_lib.create(params, optax.adam(1), trainable="adapters")
  trained = adapters.select(train_state.params, "adapters")
  assert dtypes(trained) == {"float32"}
  assert str(train_state.params["embed"]["table"].dtype) == "bfloat16"
  headed = actor_critic.add_head(tiny.model(NARROW)[1], adapted.config)
  assert dtypes(headed["value_head"]) == {"float32"}
  wide = {"kernel": jnp.ones(3, "float64"), "ids": jnp.ones(3, "int32")}
  assert dtypes(step_lib.as_trained(wide)) == {"float64", "int32"}
  cast = step_lib.as_trained(wide, param_dtype="bfloat16")
  assert dtypes(cast) == {"bfloat16", "int32"}
  for wrong in ("int8", "flaot32", "File"):
    with pytest.raises(ValueError, match=f"param_dtype='{wrong}'"):
      step_lib.as_trained(wide, param_dtype=wrong)


def test_a_drafter_is_trained_in_float32():
  model, params = tiny.model(NARROW)
  drafter = learned.Learned.create(model, params, [1, 5], jax.random.key(0))
  assert dtypes(drafter.params) == {"float32"}
  read = dataclasses.replace(  # from a file
      drafter, params=jax.tree.map(
          lambda x: x.astype("bfloat16"), drafter.params
      )
  )
  trainer = trainer_lib.Trainer(model, optax.adam(1e-3), 2, 8)
  trained = trainer.create(read)
  assert dtypes(trained.params) == {"float32"}
  assert dtypes(trained.optimizer) == {"float32", "int32"}


@pytest.mark.exhaustive
def test_float32_parameters_give_what_the_file_gives_in_bfloat16():
  narrow, params = tiny.model(NARROW)
  wide = br.Decoder(dataclasses.replace(NARROW, param_dtype="float32"))
  masters = step_lib.as_trained(params)
  group = tiny.group(prompt=9, tails=(4, 2), config=NARROW)
  chex.assert_trees_all_equal(
      br.log_probs(narrow, params, group), br.log_probs(wide, masters, group)
  )
  rollouts = [
      br.sample(
          model, of, np.asarray(group.prompt[:9]), key=jax.random.key(0),
          branches=2, max_tokens=4, layers=layers,
      )
      for model, of, layers in (
          (narrow, params, None), (wide, masters, None),
          (wide, masters, unstacked.layers(wide.config, masters)),
      )
  ]
  for one in rollouts[1:]:
    chex.assert_trees_all_equal(one.tokens, rollouts[0].tokens)
  chex.assert_trees_all_equal(rollouts[1].log_probs, rollouts[0].log_probs)
  chex.assert_trees_all_close(
      rollouts[2].log_probs, rollouts[0].log_probs, rtol=0, atol=0.02
  )


def moved(tmp_path, param_dtype):
  """Share of the parameters of a file that twenty updates change."""
  br.save_hf(tmp_path, NARROW, tiny.model(NARROW)[1])
  pretrained = br.load_hf(tmp_path, compute_dtype="bfloat16")
  assert pretrained.config.param_dtype == "bfloat16"
  group = tiny.group(prompt=9, tails=(6, 5, 7, 4), config=NARROW)
  objective = objectives.grpo(kl_coefficient=0.0)
  optimizer = optimizers.adamw(1e-6, b2=0.99)
  train_state = step_lib.create(
      jax.tree.map(jnp.copy, pretrained.params), optimizer,
      param_dtype=param_dtype,
  )
  before = jax.tree.map(jnp.copy, train_state.params)
  step = step_lib.make_step(pretrained.model, objective, optimizer)
  answers = objective.answers(
      group.mask(), jnp.array([1.0, -1.0, 0.5, -0.5]),
      old_log_probs=br.log_probs(pretrained.model, before, group),
  )
  for _ in range(20):
    train_state, report = step(train_state, group, (answers,))
  assert train_state.step == 20 and step._cache_size() == 1
  changed = jax.tree.map(lambda a, b: jnp.sum(a != b), before,
                         train_state.params)
  total = sum(x.size for x in jax.tree.leaves(before))
  return sum(map(int, jax.tree.leaves(changed))) / total, report


@pytest.mark.exhaustive
def test_a_small_learning_rate_moves_the_parameters_of_a_bfloat16_file(
    tmp_path,
):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    share, report = moved(tmp_path, None)
  assert share >= 0.9
  assert report.rounded_away == 0
  with pytest.warns(UserWarning, match="trained in bfloat16.*rounded away"):
    share, report = moved(tmp_path, "file")
  assert share < 0.02
  assert report.rounded_away > 0.98


def test_updates_that_are_rounded_away_are_counted():
  optimizer = optax.sgd(1.0)
  # Below 1 a step of bfloat16 is 2⁻⁸, and half of it is 0.00195.
  grads = {"kernel": jnp.array([[1e-3, 1.8e-3, 2.1e-3], [0.0, 0.5, 1e-4]])}
  params = {"kernel": jnp.ones((2, 3))}

  def lost(dtype):
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      train_state = step_lib.create(params, optimizer, param_dtype=dtype)
    return step_lib.update(optimizer, train_state, grads, 0.0)[1].rounded_away

  np.testing.assert_allclose(lost("bfloat16"), 3 / 5)
  assert lost("float32") == 0


def test_matrices_decay_and_nothing_else_does():
  configs = [
      tiny.ARCHITECTURES[name]
      for name in ("qwen2", "gemma3", "qwen3.5", "deepseek", "expert groups")
  ] + [dataclasses.replace(SMALL, adapter=Adapter(2))]

  def fresh(config):
    params = br.Decoder(config).init(
        jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
    )["params"]
    return actor_critic.add_head(params, config)

  params = {}  # one of each, by the module that has it
  for config in configs:
    found = jax.eval_shape(functools.partial(fresh, config))
    for path, _ in jax.tree.leaves_with_path(found):
      *_, stage, name = (key.key for key in path)
      params.setdefault(stage, {})[name] = jnp.full((2, 3), 0.5)
  optimizer = optimizers.adamw(0.01, weight_decay=0.1)
  zeros = jax.tree.map(jnp.zeros_like, params)

  def update(_, train_state):
    return step_lib.update(optimizer, train_state, zeros, 0.0)[0]

  train_state = jax.jit(lambda x: jax.lax.fori_loop(0, 100, update, x))(
      step_lib.create(params, optimizer)
  )
  seen = set()
  for path, leaf in jax.tree.leaves_with_path(train_state.params):
    stage, name = (key.key for key in path)
    stays = "norm" in stage or name in (
        "bias", "log_rate", "rate_bias", "correction"
    )
    wanted = 0.5 if stays else 0.5 * (1 - 0.01 * 0.1) ** 100
    np.testing.assert_allclose(leaf, wanted, rtol=1e-5, err_msg=str(path))
    assert not stays or np.all(leaf == 0.5), path
    seen.add((stays, name))
  assert {name for stays, name in seen if stays} == {
      "scale", "bias", "log_rate", "rate_bias", "correction"
  }
  assert {name for stays, name in seen if not stays} == {
      "kernel", "table", "filter", "key_up", "value_up", "adapter_in",
      "adapter_out",
  }


def test_scales_by_other_names_do_not_decay():
  names = "scale", "scale_less_1", "offset"
  assert not any(optimizers.decays(dict.fromkeys(names, 0)).values())


def poisoned(log_probs_GT, weights_G):
  return jnp.sum(log_probs_GT * weights_G[:, None])


def test_an_update_that_is_not_finite_leaves_everything_as_it_was():
  model, params = tiny.model(SMALL)
  group = tiny.group(prompt=6, tails=(3, 2))
  optimizer = optimizers.adamw(
      optimizers.learning_rates(1e-2, updates=9, warmup=5)
  )
  step = step_lib.make_step(model, poisoned, optimizer)
  train_state = step_lib.create(jax.tree.map(jnp.copy, params), optimizer)
  good, bad = jnp.array([1.0, -1.0]), jnp.array([1.0, jnp.nan])
  train_state, _ = step(train_state, group, (good,))
  before = jax.device_get(train_state)
  for count in (1, 2):
    train_state, report = step(train_state, group, (bad,))
    assert report.skipped and train_state.skipped == count
    chex.assert_trees_all_equal(
        jax.device_get(train_state._replace(skipped=before.skipped)), before
    )
  train_state, report = step(train_state, group, (good,))
  assert not report.skipped and train_state.skipped == 0
  assert train_state.step == 2 and jnp.isfinite(report.grad_norm)
  # What was skipped leaves no trace: not in the moments, not in the schedule.
  straight = step_lib.create(jax.tree.map(jnp.copy, params), optimizer)
  for _ in range(2):
    straight, _ = step(straight, group, (good,))
  chex.assert_trees_all_equal(
      jax.device_get(straight), jax.device_get(train_state)
  )
  assert step._cache_size() == 1


@pytest.mark.parametrize("loss, grad", [
    (jnp.nan, 1.0), (jnp.inf, 1.0), (0.0, jnp.nan), (0.0, -jnp.inf),
    (0.0, 1e30),  # whose norm overflows
])
def test_devices_skip_together(loss, grad):
  optimizer = optimizers.adamw(0.1)
  _, params = tiny.model(tiny.BASE)
  layout = sharding.sharded(params, 8)
  train_state = step_lib.create(params, optimizer, layout=layout)
  grads = jax.tree.map(jnp.ones_like, train_state.params)
  table = grads["embed"]["table"]  # one element, on one of the devices
  grads["embed"]["table"] = table.at[3, 9].set(grad)
  before = jax.device_get(train_state)
  after, applied = jax.jit(functools.partial(step_lib.update, optimizer))(
      train_state, grads, loss
  )
  assert applied.skipped and after.skipped == 1
  for shard in after.skipped.addressable_shards:
    assert shard.data == 1
  chex.assert_trees_all_equal(
      jax.device_get(after._replace(skipped=before.skipped)), before
  )
  assert jax.tree.map(lambda x: x.sharding, after.params) == jax.tree.map(
      lambda x: x.sharding, train_state.params
  )


def test_skipping_needs_no_second_copy_of_anything():
  optimizer = optimizers.adamw(1e-3, weight_decay=0.1)
  params = {
      f"{number}": {"kernel": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}
      for number in range(8)
  }
  train_state = jax.eval_shape(
      lambda x: step_lib.create(x, optimizer), params
  )

  def plain(train_state, grads, loss):
    updates, moments = optimizer.update(
        grads, train_state.optimizer, train_state.params
    )
    moved = optax.apply_updates(train_state.params, updates)
    return train_state._replace(params=moved, optimizer=moments), loss

  def temporary(function):
    compiled = jax.jit(function, donate_argnums=0).lower(
        train_state, params, jnp.float32(0)
    ).compile()
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes, found.alias_size_in_bytes

  guarded = temporary(functools.partial(step_lib.update, optimizer))
  wanted = temporary(plain)
  of_params = 4 * 8 * 512 * 1024
  assert guarded[0] - wanted[0] < 0.05 * of_params
  assert guarded[1] >= 3 * of_params  # updated in place


@pytest.mark.parametrize("settings", [
    dict(learning_rate=0.0), dict(learning_rate=float("inf")),
    dict(learning_rate=float("nan")),
])
def test_learning_rates_that_move_nothing_or_everything_are_errors(settings):
  with pytest.raises(ValueError, match="learning_rate must be finite and > 0"):
    optimizers.learning_rates(updates=3, **settings)


@pytest.mark.parametrize("settings, message", [
    (dict(b1=1.0), "b1 must lie in"), (dict(b2=-0.1), "b2 must lie in"),
    (dict(weight_decay=-1.0), "weight_decay"),
    (dict(weight_decay=float("nan")), "weight_decay"),
    (dict(clip_norm=0.0), "clip_norm"), (dict(clip_norm=-1.0), "clip_norm"),
])
def test_settings_of_the_optimizer_out_of_range_are_errors(settings, message):
  with pytest.raises(ValueError, match=message):
    optimizers.adamw(1e-3, **settings)


def test_moments_need_the_range_of_float32():
  for wrong in ("float16", "int8"):
    with pytest.raises(ValueError, match=f"dtype='{wrong}' cannot hold"):
      optimizers.with_state_dtype(optax.adam(1e-3), wrong)
