# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the real training step for accelerators that are not there."""

import os
import re
import time
from typing import NamedTuple

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import optax

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.planning import plan
from branch_replay.training import optimizers
from branch_replay.training import step as step_lib


class Target(NamedTuple):
  """Devices to plan for."""

  topology: str | None  # of TPU chips, to compile for; None for GPUs
  devices: int
  bytes: int  # of memory of each


TARGETS = {
    name: Target(name, 8, gib * plan.GIB)
    for name, gib in (("v5p:2x2x2", 95), ("v5e:2x4", 16), ("v6e:2x4", 32))
}
# GiB that the driver shows of one, less than its name says.
GPUS = {"h20": 95, "h100": 79, "h200": 139, "b200": 178}
NAMES = (*TARGETS, *(f"{name}:N" for name in GPUS))


def target(name: str) -> Target:
  """The target of that name: one of `TARGETS`, or "h100:8", GPUs by number.

  Raises:
    ValueError: there is none.
  """
  if name in TARGETS:
    return TARGETS[name]
  kind, _, count = str(name).partition(":")
  if kind in GPUS and count.isascii() and count.isdigit() and int(count) > 0:
    return Target(None, int(count), GPUS[kind] * plan.GIB)
  hint = f" Say how many, as in '{kind}:8'." if kind in GPUS else ""
  raise ValueError(
      f"target={name!r} is unknown: use one of {', '.join(NAMES)}.{hint}"
  )


def _devices(of: Target):
  if of.topology is None:
    raise ValueError(
        "--compile is for TPU targets, "
        f"{', '.join(TARGETS)}: GPUs are planned for by arithmetic."
    )
  # The compiler would otherwise look for a metadata server, and for chips.
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
  try:
    return topologies.get_topology_desc(
        platform="tpu", topology_name=of.topology
    ).devices
  except Exception as error:  # jax raises what the plugin raised
    if "lockfile" in str(error):
      raise ValueError(
          "Another process is using the TPU compiler; one at a time."
      ) from error
    raise ValueError(
        "--compile needs the TPU compiler, which is not installed: "
        f'pip install "jax[tpu]=={jax.__version__}" in an environment of its '
        f"own. ({error})"
    ) from error


def _loss(log_probs_GT, advantages_G):
  return -jnp.sum(log_probs_GT * advantages_G[:, None])


def compile_step(step: plan.Step, of: Target) -> dict:
  """Compiles one optimizer step with AdamW for a target.

  Returns:
    "compiled_bytes_per_device", everything alive at the peak with arguments
    and results; "compile_seconds"; and "state_layout_copies", how many copies
    of the whole prefix state or accumulator in another layout the compiled
    text has.

  Raises:
    ValueError: no compiler for the target.
  """
  config = step.config
  devices = _devices(of)
  model = br.Decoder(config)
  params = jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  layout = sharding.sharded(params, devices=devices)
  schedule = br.Schedule(
      chunk_size=step.chunk_size, branches_at_once=step.branches_at_once,
      activations=step.activations, accumulator_dtype=step.accumulator_dtype,
      readout_tokens=step.readout_tokens, layout=layout,
      attention=step.attention,
  )
  optimizer = optimizers.with_state_dtype(
      optax.adamw(1e-6, b2=0.98), step.moments_dtype
  )
  where = step_lib.shardings(
      params, optimizer, trainable=step.trainable, layout=layout
  )
  whole = NamedSharding(layout.mesh, PartitionSpec())

  def placed(shape, dtype, sharding=whole):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  train_state = jax.tree.map(
      lambda x, sharding: placed(x.shape, x.dtype, sharding),
      jax.eval_shape(
          lambda p: step_lib.create(
              p, optimizer, trainable=step.trainable, param_dtype="file"
          ),
          params,
      ),
      where,
  )
  group = br.Group(
      placed((step.prefix + 1,), jnp.int32), placed((), jnp.int32),
      placed((step.branches, step.tail), jnp.int32),
      placed((step.branches,), jnp.int32),
  )
  function = step_lib.make_step(
      model, _loss, optimizer, schedule=schedule, trainable=step.trainable,
      prefix_gradient=step.mode,
  )
  start = time.perf_counter()
  key = None
  if step.mode == "sampled":
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = placed(key.shape, key.dtype)
  compiled = function.lower(
      train_state, group, (placed((step.branches,), jnp.float32),), key
  ).compile()
  seconds = time.perf_counter() - start
  state = (
      config.num_layers, config.num_kv_heads, -(-step.prefix // of.devices),
      config.head_dim,
  )
  return {
      "compiled_bytes_per_device": (
          compiled.memory_analysis().peak_memory_in_bytes
      ),
      "compile_seconds": round(seconds, 1),
      "state_layout_copies": _copies(compiled.as_text(), state),
  }


def _copies(text: str, shape: tuple[int, ...]) -> int:
  """Copies of arrays of a shape, which in place there would be none of."""
  of_shape = r"\[" + ",".join(map(str, shape)) + r"\]\S* (copy|transpose)\("
  return len(re.findall(of_shape, text))
