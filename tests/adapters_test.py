# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: their gradient, their size, and their merge."""

import dataclasses
import sys
from unittest import mock

from absl import flags
import chex
import jax
import jax.numpy as jnp
from ml_collections import config_flags
import pytest

import branch_replay as br
from branch_replay.config import Adapter
from branch_replay.devices import sharding
from branch_replay.models import adapters
from branch_replay.training import build
from branch_replay.training import run_config
from branch_replay.weights import hf
from configs import train as train_config
from experiments import train
from tests import tiny

ADAPTER = Adapter(rank=2, alpha=4.0, matrices=("query", "value", "down"))
SCHEDULE = br.Schedule(chunk_size=8)


def adapted():
  """A model whose adapters are not zero."""
  model, params = tiny.model(tiny.in_float64(tiny.BASE))
  model, params = adapters.add(model, params, ADAPTER, jax.random.key(1))
  key = jax.random.key(2)
  part = jax.tree.map(
      lambda x: x + 0.3 * jax.random.normal(key, x.shape, x.dtype),
      adapters.select(params, "adapters"),
  )
  return model, adapters.replace(params, part)


def gradient(model, params, group, **options):
  return br.value_and_grad(model, tiny.loss, **options)(
      params, group, tiny.weights(group)
  )[1]


def test_the_gradient_is_the_adapters_part_of_the_whole_one(x64):
  model, params = adapted()
  group = tiny.group(prompt=22, tails=(5, 1, 7))
  dense = tiny.dense_gradient(model, params, group, tiny.weights(group))
  whole = gradient(model, params, group, schedule=SCHEDULE)
  assert tiny.worst(whole, dense) <= 1e-11
  part = gradient(
      model, params, group, schedule=SCHEDULE, trainable="adapters"
  )
  chex.assert_trees_all_equal_structs(
      part, adapters.select(params, "adapters")
  )
  assert tiny.worst(part, adapters.select(dense, "adapters")) <= 1e-11
  names = {
      name for stage in part["layers"].values() for name in stage
  }
  assert names == set(ADAPTER.matrices)
  layout = sharding.sharded(params, 8)
  eight = gradient(
      model, params, group, trainable="adapters",
      schedule=br.Schedule(chunk_size=8, layout=layout),
  )
  assert tiny.worst(eight, part) <= 1e-11


def test_adapters_start_as_nothing_and_merge_into_the_base(x64):
  base, base_params = tiny.model(tiny.in_float64(tiny.BASE))
  group = tiny.group(prompt=9, tails=(4, 2))
  model, params = adapters.add(
      base, base_params, ADAPTER, jax.random.key(1)
  )
  before = br.log_probs(base, base_params, group)
  chex.assert_trees_all_close(
      br.log_probs(model, params, group), before, rtol=0, atol=1e-12
  )
  model, params = adapted()
  after = br.log_probs(model, params, group)
  assert jnp.max(jnp.abs(after - before)) > 1e-3
  merged, merged_params = adapters.merge(model, params)
  chex.assert_trees_all_equal_structs(merged_params, base_params)
  chex.assert_trees_all_close(
      br.log_probs(merged, merged_params, group), after, rtol=0, atol=1e-12
  )


@pytest.mark.exhaustive
def test_frozen_matrices_cost_no_gradient():
  model, params = tiny.model(tiny.BASE)
  model, params = adapters.add(model, params, ADAPTER, jax.random.key(1))
  group = tiny.group(prompt=22, tails=(5, 1, 7))

  def flops(trainable):
    function = br.value_and_grad(
        model, tiny.loss, schedule=SCHEDULE, trainable=trainable
    )
    lowered = jax.jit(function).lower(params, group, tiny.weights(group))
    return lowered.compile().cost_analysis()["flops"]

  assert flops("adapters") < 0.95 * flops("all")


def test_what_does_not_exist_is_an_error(tmp_path):
  base, params = tiny.model(tiny.BASE)
  group = tiny.group(prompt=9, tails=(4, 2))
  with pytest.raises(ValueError, match="use adapters.add"):
    gradient(base, params, group, trainable="adapters")
  with pytest.raises(ValueError, match="Unknown trainable='some'"):
    gradient(base, params, group, trainable="some")
  with pytest.raises(ValueError, match="name some of query"):
    Adapter(2, 4.0, ("queries",))
  with pytest.raises(ValueError, match="no adapters"):
    adapters.merge(base, params)
  model, params = adapters.add(base, params, ADAPTER, jax.random.key(1))
  with pytest.raises(ValueError, match="merge them first"):
    adapters.add(model, params, ADAPTER, jax.random.key(1))
  with pytest.raises(ValueError, match="adapters.merge"):
    hf.save_hf(tmp_path / "model", model.config, params)


def parsed(*of_fields):
  """The smoke config as the command line makes it."""
  words = ["train", f"--config={train_config.__file__}:tiny", *of_fields]
  values = flags.FlagValues()
  with mock.patch.object(sys, "argv", words):  # where it looks for fields
    config_flags.DEFINE_config_file("config", flag_values=values)
    values(words)
  return values.config


def test_a_rank_alone_trains(tmp_path):
  assert Adapter(8).alpha == 16
  config = parsed("--config.adapter.rank=8")
  config.data_dir = str(tmp_path)
  problem = train.build(config)
  model, tokens_GT = problem.run.model, jnp.arange(8)[None]
  assert model.config.adapter == Adapter(8, 16.0)

  def loss(part):
    params = adapters.replace(problem.start.params, part)
    return jnp.mean(jnp.square(model.apply({"params": params}, tokens_GT)))

  trained = adapters.select(problem.start.params, "adapters")
  grads = jax.jit(jax.grad(loss))(trained)
  assert jnp.linalg.norm(grads["layers"]["join"]["output"]["adapter_out"]) > 0
  learner = problem.run.phases[-1].learner
  assert learner.trainable == "adapters" and learner.param_dtype == "float32"


@pytest.mark.parametrize("alpha", ["0", "-2", "nan", "inf"])
def test_adapters_that_cannot_train_are_errors(alpha, tmp_path):
  with pytest.raises(ValueError, match="Adapter.alpha=.* above 0"):
    Adapter(8, float(alpha))
  config = parsed(
      "--config.adapter.rank=8", f"--config.adapter.alpha={alpha}"
  )
  config.data_dir = str(tmp_path)
  with pytest.raises(ValueError, match="Adapter.alpha=.* above 0"):
    train.build(config)


def test_settings_of_an_adapter_without_a_rank_are_an_error(tmp_path):
  config = parsed("--config.adapter.alpha=16")
  config.data_dir = str(tmp_path)
  with pytest.raises(ValueError, match="set adapter.rank too"):
    train.build(config)


def test_dtypes_of_a_file_need_one(tmp_path):
  config = parsed("--config.param_dtype=file")
  config.data_dir = str(tmp_path)
  with pytest.raises(ValueError, match="param_dtype='file'.*no file"):
    train.build(config)


@pytest.mark.parametrize("rank, param_dtype, stored", [
    (0, "float32", "float32"), (0, "file", "bfloat16"),
    (2, "float32", "bfloat16"),
])
def test_what_a_file_gives_is_trained_in_float32(
    tmp_path, rank, param_dtype, stored
):
  narrow = dataclasses.replace(
      tiny.BASE, param_dtype="bfloat16", compute_dtype="bfloat16"
  )
  br.save_hf(tmp_path, narrow, tiny.model(narrow)[1])
  config = train_config.get_config()
  config.pretrained = str(tmp_path)
  config.adapter.rank, config.param_dtype = rank, param_dtype
  loaded = build.weights_of(run_config.of_config(config))
  assert loaded.config.compute_dtype == "bfloat16"
  assert {str(x.dtype) for x in jax.tree.leaves(loaded.params)} == {stored}


def test_a_narrow_base_loses_nothing_of_its_adapters_when_merged():
  narrow = dataclasses.replace(tiny.BASE, param_dtype="bfloat16")
  model, params = adapters.add(*tiny.model(narrow), Adapter(1, 1.0),
                               jax.random.key(0))
  gate = params["layers"]["expand"]["gate"]
  gate["adapter_in"] = jnp.full_like(gate["adapter_in"], 1e-2)
  gate["adapter_out"] = jnp.full_like(gate["adapter_out"], 1e-2)
  merged, found = adapters.merge(model, params)
  assert merged.config.param_dtype == "float32"
  moved = found["layers"]["expand"]["gate"]["kernel"] - gate["kernel"]
  chex.assert_trees_all_close(
      moved, jnp.full_like(moved, 1e-4), rtol=1e-2, atol=1e-7
  )
