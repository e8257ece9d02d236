# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the memory and work of a training step by arithmetic, without running.

It counts parameters, gradients, optimizer state, the prefix state and its
accumulator, the activations kept of a chunk or a visit, and the working memory
of one layer; docs/planning.md derives each and what is alive at the peak. The
compiler's figure for the same step comes from `experiments.plan --compile`; the
two agree within a tenth.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import state as state_lib
from branch_replay.mixers import kinds
from branch_replay.models import adapters
from branch_replay.models import decoder
from branch_replay.models import pattern
from branch_replay.planning import flops

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Step:
  """One optimizer step on one group, to be planned.

  Attributes:
    config: the model, with its dtypes and adapter.
    prefix: P, positions of the prefix.
    branches: G, tails of the group.
    tail: T, tokens of a tail.
    mode: the `prefix_gradient`: "exact", "banded", "sampled" or "stop".
    devices: number of devices that share parameters and tokens.
    chunk_size: most positions of the prefix that are run at a time.
    branches_at_once: tails that are run side by side.
    activations: activation policy, see `Schedule`.
    accumulator_dtype: see `Schedule`.
    moments_dtype: dtype of Adam's two moments.
    trainable: which parameters get a gradient, "all" or "adapters".
    readout_tokens: see `Schedule`.
    attention: implementation of attention, see `Schedule`; the plan is the same
      for all.
  """

  config: config_lib.ModelConfig
  prefix: int
  branches: int
  tail: int
  mode: str = "exact"
  devices: int = 8
  chunk_size: int = 8192
  branches_at_once: int = 1
  activations: str = "recompute_layers"
  keep_attention: bool = False
  accumulator_dtype: str | None = None
  moments_dtype: str = "float32"
  trainable: str = "all"
  readout_tokens: int = 1024
  attention: str = "auto"

  def __post_init__(self):
    schedule_lib.check_mode(self.mode)
    adapters.check_trainable(self.trainable, self.config)
    if self.mode == "full":
      raise ValueError("mode='full' has no prefix state to plan for.")
    for field in ("branches", "tail", "devices", "chunk_size"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1: {getattr(self, field)}")
    if self.prefix < 0:
      raise ValueError(f"prefix must not be negative: {self.prefix}")


def _itemsize(dtype) -> int:
  return jnp.dtype(dtype).itemsize


def _wide(config) -> int:
  return config_lib.at_least_float32(config.compute_dtype).itemsize


@functools.lru_cache(maxsize=8)
def _parameters(config: config_lib.ModelConfig):
  """Shapes and dtypes of all parameters."""
  model = decoder.Decoder(config)
  return jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]


def _bytes(tree, itemsize: int | None = None) -> int:
  return sum(
      leaf.size * (itemsize or leaf.dtype.itemsize)
      for leaf in jax.tree.leaves(tree)
  )


def bytes_per_device(step: Step) -> dict[str, int]:
  """Computes the bytes that are alive on one device at the peak of a step.

  Returns:
    Bytes of "parameters", "gradients", "optimizer" state, prefix "state",
    "accumulator", activations "kept" from forward to backward pass, and
    "working" memory of one layer; and "total", their sum.
  """
  config, devices = step.config, step.devices
  params = _parameters(config)
  trained = adapters.select(params, step.trainable)
  moment = _itemsize(step.moments_dtype)
  accumulates = step.mode != "stop"
  found = {
      "parameters": _bytes(params) // devices,
      "gradients": _bytes(trained, _wide(config)) // devices,
      "optimizer": 2 * _bytes(trained, moment) // devices,
      "state": _state_bytes(step),
      "accumulator": accumulates * _bytes(_accumulator(step)),
      "kept": _kept(step),
      "working": _working(step, params, trained),
  }
  return found | {"total": sum(found.values())}


def _state_bytes(step: Step) -> int:
  """Bytes on one device of the state and of what popping its chunks needs."""
  config, devices = step.config, step.devices
  capacity = math.ceil(step.prefix / devices) * devices
  state = jax.eval_shape(
      lambda: state_lib.empty(config, capacity, devices=devices)
  )
  size = min(step.chunk_size, max(step.prefix, 1))
  chunks = math.ceil(step.prefix / size) if step.mode != "stop" else 0
  saved = jax.eval_shape(
      lambda: state_lib.save(config, state.mixer, size // devices)
  )
  outputs = 0
  if step.keep_attention and step.mode != "stop":
    outputs = math.ceil(step.prefix / devices) * schedule_lib.attended_bytes(
        config
    )
  return _bytes((state.mixer, state.choices)) + chunks * _bytes(saved) + outputs


def _accumulator(step: Step):
  """Shapes of the state's cotangent on one device."""
  here = math.ceil(step.prefix / step.devices)
  return jax.eval_shape(lambda: state_lib.accumulator(
      step.config, here, step.accumulator_dtype, step.devices
  ))


def _segments(step: Step) -> tuple[int, int]:
  """Tokens of a popped chunk (0 in "stop"), and of a visit of branches."""
  chunk = min(step.chunk_size, step.prefix) if step.mode != "stop" else 0
  return chunk, min(step.branches_at_once, step.branches) * step.tail


def _kept(step: Step) -> int:
  """Bytes held between a segment's forward and backward pass, on one device."""
  config = step.config
  chunk, visit = _segments(step)
  layers = schedule_lib.layers_bytes(config)
  if step.activations == "recompute_layers":
    layers = schedule_lib.input_bytes(config)
  tokens = max(chunk, visit)
  if step.activations == "keep" and step.mode != "stop":
    tokens = step.prefix + visit
  return layers * tokens // step.devices


def _working(step: Step, params, trained) -> int:
  """Bytes that one layer's backward pass works with on one device.

  Its parameters are gathered whole, and the queries are those of all devices.
  """
  config, wide = step.config, _wide(step.config)
  narrow = _itemsize(config.compute_dtype)
  chunk, visit = _segments(step)
  tokens = max(chunk, visit, min(step.chunk_size, step.prefix))
  layer, of_trained = (
      sum(x.size for x in jax.tree.leaves(tree["layers"])) / config.num_layers
      for tree in (params, trained)
  )
  # A layer's gathered weights; where trained, also a copy in float32 and the
  # gradient before it is scattered.
  weights = layer * narrow + of_trained * 2 * wide if step.devices > 1 else 0
  # In the compute dtype: queries, and cotangents of outputs. In at least
  # float32: outputs of attention to prefix and segment, their merge, and the
  # queries' cotangents.
  queries = max(
      kinds.of(config, kind).query_numbers() for kind in config.layer_pattern
  )
  rows = tokens * queries * (2 * narrow + 4 * wide)
  largest = max(
      schedule_lib.stage_bytes(config, kind, part.experts)
      for part in pattern.parts(config) for kind in part.kinds
  )
  stages = 2 * largest * tokens / step.devices
  readout = min(step.readout_tokens, math.ceil(visit / step.devices))
  logits = 3 * 2048 * readout * wide
  return round(weights + rows + max(stages, logits))


def longest_prefix(step: Step, budget: int) -> int:
  """Finds the longest prefix whose step fits `budget` bytes a device.

  It is in positions, and 0 if none fits. Only memory counts: the result may
  exceed `config.max_positions`.
  """
  def fits(prefix):
    at = dataclasses.replace(step, prefix=prefix)
    return bytes_per_device(at)["total"] <= budget

  if not fits(0):
    return 0
  high = step.devices
  while fits(high):
    high *= 2
    if high > 1 << 40:
      return high
  low = high // 2
  while high - low > step.devices:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low if fits(low) else 0


def work(step: Step) -> dict[str, float]:
  """Counts the operations of a step, and its ideal speed-up over "full".

  Returns:
    "flops", floating-point operations of all devices together; and
    "ideal_speedup", the operations of mode "full" with the same activation
    policy, divided by "flops".
  """
  shape = dict(prefix=step.prefix, branches=step.branches, tail=step.tail)
  mine = flops.gradient(
      step.config, mode=step.mode, policy=step.activations,
      trainable=step.trainable, keep_attention=step.keep_attention, **shape,
  )
  full = flops.gradient(
      step.config, mode="full", policy=step.activations,
      trainable=step.trainable, **shape,
  )
  return {"flops": mine, "ideal_speedup": full / mine}
