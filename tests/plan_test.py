# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The planner: what it adds up, what it finds, and what it refuses."""

import dataclasses
import importlib.util
import json
import types

import jax
import pytest

from branch_replay.config import Adapter
from branch_replay.planning import flops
from branch_replay.planning import plan
from branch_replay.planning import presets
from branch_replay.weights import hf_config
from experiments import plan as planner
from tests import tiny

STEP = plan.Step(tiny.BASE, prefix=4096, branches=4, tail=32, chunk_size=256)

FLAGS = dict(
    model="qwen3-8b", prefix=2097152, branches=8, tail=8192, mode="exact",
    target="v5p:2x2x2", budget_gib=None, chunk=8192, branches_at_once=1,
    activations="recompute_layers", accumulator_dtype="bfloat16",
    param_dtype="bfloat16", moments_dtype="bfloat16", adapter_rank=0,
    compile=False, json=True, attention="auto",
)


def run(**changes):
  return planner.run(types.SimpleNamespace(**FLAGS | changes))


def total(step):
  return plan.bytes_per_device(step)["total"]


def test_states_accumulators_and_optimizers_by_hand():
  found = plan.bytes_per_device(STEP)
  cells = 2 * 2 * 2 * 16 * 4096 // 8  # k and v, L, K, D, a device's positions
  assert found["state"] == found["accumulator"] == 4 * cells
  parameters = sum(
      x.size for x in jax.tree.leaves(tiny.model(tiny.BASE)[1])
  )
  assert found["parameters"] == found["gradients"] == 4 * parameters // 8
  assert found["optimizer"] == 8 * parameters // 8
  kinds = [size for kind, size in found.items() if kind != "total"]
  assert found["total"] == sum(kinds) and all(kinds)
  stop = plan.bytes_per_device(dataclasses.replace(STEP, mode="stop"))
  assert stop["accumulator"] == 0 and stop["state"] == found["state"]
  narrow = dataclasses.replace(STEP, accumulator_dtype="bfloat16")
  assert plan.bytes_per_device(narrow)["accumulator"] == 2 * cells


def test_memory_grows_with_the_prefix_and_not_with_the_group():
  more = dataclasses.replace(STEP, branches=64)
  assert total(more) == total(STEP)
  together = dataclasses.replace(STEP, branches=64, branches_at_once=64)
  assert total(together) > total(STEP)
  longer = dataclasses.replace(STEP, prefix=8192)
  assert total(longer) - total(STEP) == 2 * plan.bytes_per_device(STEP)["state"]
  kept = dataclasses.replace(STEP, activations="keep")
  assert total(kept) > total(longer)


def test_adapters_spare_gradients_and_optimizer():
  config = dataclasses.replace(tiny.BASE, adapter=Adapter(2, 2.0))
  whole = plan.bytes_per_device(dataclasses.replace(STEP, config=config))
  part = plan.bytes_per_device(
      dataclasses.replace(STEP, config=config, trainable="adapters")
  )
  assert part["parameters"] == whole["parameters"]
  assert part["gradients"] < whole["gradients"] / 4
  assert part["optimizer"] < whole["optimizer"] / 4
  shape = dict(prefix=100, branches=2, tail=10, mode="exact", policy="keep")
  assert flops.gradient(config, trainable="adapters", **shape) < (
      flops.gradient(config, **shape)
  )


@pytest.mark.parametrize("mode", ["exact", "stop"])
def test_the_longest_prefix_just_fits(mode):
  step = dataclasses.replace(STEP, mode=mode)
  budget = 8 << 20
  longest = plan.longest_prefix(step, budget)
  assert longest > 4096
  at = dataclasses.replace(step, prefix=longest)
  assert total(at) <= budget
  assert total(dataclasses.replace(at, prefix=longest + 16)) > budget
  assert plan.longest_prefix(step, 1000) == 0


def test_the_published_shape_as_one_object():
  found = json.loads(json.dumps(run()))
  assert found["fits"] and found["longest_prefix"] > 2097152
  assert 80 < found["bytes_per_device"]["total"] / plan.GIB < 88
  # Tails of a shared prefix: near G times less than full, never more.
  assert 5 < found["ideal_speedup"] < 8
  stop = run(mode="stop")
  assert stop["bytes_per_device"]["total"] / plan.GIB < 54
  assert not run(budget_gib=40.0)["fits"]
  lora = run(adapter_rank=16)
  assert lora["trainable"] == "adapters"
  assert lora["longest_prefix"] > found["longest_prefix"]


def test_parameters_are_planned_as_training_stores_them():
  shape = dict(model="qwen3-8b", prefix=262144)
  trained, narrow, adapted = (
      run(**shape, **changes)["bytes_per_device"] for changes in (
          dict(param_dtype=None), {}, dict(param_dtype=None, adapter_rank=16),
      )
  )
  # 8.19e9 parameters on eight chips, two bytes more each.
  more = (trained["total"] - narrow["total"]) / plan.GIB
  assert more == pytest.approx(8.19e9 * 2 / 8 / plan.GIB, rel=1e-3)
  assert adapted["parameters"] < 1.05 * narrow["parameters"]


def test_presets_are_what_their_files_say(tmp_path):
  # Billions of parameters as published.
  counts = {
      "qwen3-8b": 8.19, "qwen3-4b": 4.02, "qwen3-0.6b": 0.596,
      "llama-3.1-8b": 8.03, "qwen2.5-7b": 7.62, "smollm2-135m": 0.1345,
      "qwen3.5-27b": 26.9, "qwen3-30b-a3b": 30.5,
  }
  assert set(counts) == set(presets.PRESETS)
  for name, billions in counts.items():
    step = dataclasses.replace(
        STEP, config=presets.geometry(name.upper()), devices=1
    )
    size = plan.bytes_per_device(step)["parameters"] / 4e9
    assert size == pytest.approx(billions, rel=5e-3), name
  written = hf_config.config_to_hf(presets.geometry("qwen3-4b"))
  (tmp_path / "config.json").write_text(json.dumps(written))
  assert presets.geometry(str(tmp_path)) == presets.geometry("qwen3-4b")


def test_a_hybrid_grows_with_its_full_layers_alone():
  shape = dict(model="qwen3.5-27b", mode="stop", budget_gib=88.0)
  short, long = (
      run(prefix=prefix, **shape) for prefix in (2097152, 4456448)
  )
  # 16 of 64 layers: keys and values of 4 heads of 256, two bytes each.
  position = 16 * 2 * 4 * 256 * 2
  grown = (
      long["bytes_per_device"]["total"] - short["bytes_per_device"]["total"]
  )
  assert grown == position * (4456448 - 2097152) // 8
  assert long["fits"]
  exact = shape | dict(mode="exact")
  assert run(prefix=2097152, **exact)["fits"]
  assert not run(prefix=4456448, **exact)["fits"]
  kept = run(prefix=2097152, **exact)["bytes_per_device"]
  # A chunk's incoming matrices and inputs: 48 layers, 2 of 16 heads here.
  before = 48 * 2 * (3 * 128 * 128 * 4 + 3 * (2 + 3) * 128 * 2)
  assert kept["state"] - short["bytes_per_device"]["state"] == 256 * before


def test_a_prefix_beyond_the_model_is_said_to_be_so(tmp_path):
  short = dataclasses.replace(
      presets.geometry("smollm2-135m"), max_positions=512
  )
  (tmp_path / "config.json").write_text(
      json.dumps(hf_config.config_to_hf(short))
  )
  shape = dict(model=str(tmp_path), tail=64)
  found = run(prefix=256, **shape)
  assert found["model_positions"] == 512
  assert found["longest_prefix_in_context"] == 512 - 64
  assert found["longest_prefix"] > 512  # by memory
  lines = planner.table(found)
  assert "has 512 positions, the longest more" in lines and "is 448" in lines
  assert "this plan and the longest more" in planner.table(
      run(prefix=449, **shape)
  )
  within = run(
      model="llama-3.1-8b", prefix=1024, tail=64, target="h100:1",
      budget_gib=81.0,
  )
  assert within["longest_prefix"] == within["longest_prefix_in_context"] > 1024
  assert "positions" not in planner.table(within)


@pytest.mark.parametrize(
    "name,gib", [("h20", 95), ("h100", 79), ("h200", 139), ("b200", 178)]
)
def test_gpus_are_planned_for_by_name_and_number(name, gib):
  two, four = (run(target=f"{name}:{n}", budget_gib=None) for n in (2, 4))
  assert two["budget_bytes"] == gib << 30
  of_two, of_four = (
      x["bytes_per_device"]["parameters"] for x in (two, four)
  )
  assert of_two == 2 * of_four
  with pytest.raises(ValueError, match=rf"Say how many, as in '{name}:8'"):
    run(target=name)
  with pytest.raises(ValueError, match="is unknown"):
    run(target=f"{name}:0")
  with pytest.raises(ValueError, match="GPUs are planned for by arithmetic"):
    run(target=f"{name}:8", compile=True)


def test_what_cannot_be_planned_is_an_error():
  with pytest.raises(ValueError, match="did you mean 'qwen3-8b'"):
    run(model="qwen3-8")
  with pytest.raises(ValueError, match="target='v4' is unknown"):
    run(target="v4")
  with pytest.raises(ValueError, match="branches must be at least 1"):
    run(branches=0)
  with pytest.raises(ValueError, match="prefix must not be negative"):
    run(prefix=-1)
  with pytest.raises(ValueError, match="no prefix state to plan for"):
    dataclasses.replace(STEP, mode="full")


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None,
    reason="the TPU compiler is installed",
)
def test_a_missing_compiler_says_what_to_install():
  with pytest.raises(ValueError, match=r"jax\[tpu\]"):
    run(compile=True)
