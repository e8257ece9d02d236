# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The schedule: chunk sizes, branches at a time, which activations are kept."""

import dataclasses
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.devices import layout as layout_lib
from branch_replay.mixers import kinds
from branch_replay.models import pattern
from branch_replay.ops.attention import kernels

PrefixGradient = Literal["full", "exact", "banded", "sampled", "stop"]
Activations = Literal["keep", "recompute", "recompute_layers"]


def check_mode(prefix_gradient: str):
  """Raises ValueError for a `prefix_gradient` that does not exist."""
  if prefix_gradient not in get_args(PrefixGradient):
    raise ValueError(
        f"Unknown prefix_gradient {prefix_gradient!r}: use one of "
        f"{', '.join(get_args(PrefixGradient))}."
    )


def check(schedule):
  """Raises TypeError for anything but a `Schedule`."""
  checks.instance(schedule, "schedule", Schedule)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Sizes and policies; they change time and memory, never the result.

  Attributes:
    chunk_size: most positions of the prefix that are run at a time.
    branches_at_once: tails that are run side by side; None for all of a group.
      1 makes memory independent of the group's size, unless activations of all
      tails are kept for the backward pass of `replay`.
    activations: which activations are held from forward to backward pass.
      "keep" holds those of the whole prefix; "recompute" runs a chunk again
      when it is popped; "recompute_layers" runs each layer again when the
      backward pass reaches it; None takes the first of these that fits
      `memory_budget`.
    keep_attention: whether the outputs of attention to the prefix are kept from
      the time a chunk is pushed, heads · (head_dim + 1) numbers a position and
      layer, so that popping it does not attend to the whole prefix again. It is
      not needed where "keep" holds all activations. None decides by
      `memory_budget` where that decides on `activations`, and is False else.
    memory_budget: bytes of activations that a device may hold; read if
      `activations` is None.
    accumulator_dtype: dtype of the accumulated cotangent of the prefix state;
      None is the compute dtype, or float32 if that is narrower. "bfloat16"
      halves its memory but rounds every time a chunk or a visit adds to it, so
      its error grows with the number of chunks.
    readout_tokens: most tail tokens whose readout is computed at a time.
    layout: on which devices tokens and parameters are.
    attention: implementation of attention without a window, see
      `ops.attention.kernels`: "auto" takes the platform's kernel where it fits
      and plain XLA loops elsewhere; "loops" runs anywhere. Results of two
      implementations differ by rounding.
  """

  chunk_size: int = 1024
  branches_at_once: int | None = None
  activations: Activations | None = None
  keep_attention: bool | None = None
  memory_budget: int = 4 << 30
  accumulator_dtype: str | None = None
  readout_tokens: int = 1024
  layout: layout_lib.Layout = layout_lib.Layout()
  attention: kernels.Name = "auto"

  def __post_init__(self):
    for field in ("chunk_size", "branches_at_once", "readout_tokens"):
      value = getattr(self, field)
      if value is not None or field != "branches_at_once":
        checks.integer(value, field, 1)
    checks.integer(self.memory_budget, "memory_budget", 0)
    if self.keep_attention is not None:
      checks.flag(self.keep_attention, "keep_attention")
    checks.instance(
        self.layout, "layout", layout_lib.Layout,
        "sharding.sharded(params) makes one for several devices.",
    )
    if self.accumulator_dtype is not None:
      dtype = checks.float_dtype(self.accumulator_dtype, "accumulator_dtype")
      object.__setattr__(self, "accumulator_dtype", dtype.name)
    kernels.check_name(self.attention)
    if self.activations not in (None, *get_args(Activations)):
      raise ValueError(
          f"Unknown activations {self.activations!r}: use one of "
          f"{', '.join(get_args(Activations))} or None."
      )

  def settled(
      self, config: config_lib.ModelConfig, prefix: int, row_tokens: int,
      held_tokens: int,
  ) -> "Schedule":
    """Returns the schedule with `activations` and `keep_attention` chosen.

    Args:
      config: geometry of the model.
      prefix: positions of the prefix whose activations "keep" would hold.
      row_tokens: tokens, over all rows, of the largest run; chunks of a group's
        prefix need not be counted.
      held_tokens: tokens of branches whose activations "keep" would hold at the
        same time: those of one run in a one-pass gradient, of all branches
        between the forward and the backward pass of `replay`.

    Returns:
      It as it is if `activations` is set. Else with the first policy that fits
      the budget, and with outputs of attention if they still fit beside it.
    """
    if self.activations is not None:
      keep = self.keep_attention and self.activations != "keep"
      return dataclasses.replace(self, keep_attention=bool(keep))
    budget, devices = self.memory_budget, self.layout.devices
    segment_tokens = max(row_tokens, min(prefix, self.chunk_size))
    held = {
        "keep": layers_bytes(config) * (prefix + held_tokens),
        "recompute": layers_bytes(config) * segment_tokens,
        "recompute_layers": input_bytes(config) * segment_tokens,
    }
    policy = next(
        (name for name, size in held.items() if size <= budget * devices),
        "recompute_layers",
    )
    outputs = attended_bytes(config) * prefix
    keep = self.keep_attention
    if keep is None:
      keep = 0 < outputs <= budget * devices - held[policy]
    return dataclasses.replace(
        self, activations=policy, keep_attention=keep and policy != "keep"
    )


def layers_bytes(config: config_lib.ModelConfig) -> int:
  """Bytes that one token's stage inputs (`segment.Kept`) take in all layers."""
  return sum(
      part.count * stage_bytes(config, kind, part.experts)
      for part in pattern.parts(config) for kind in part.kinds
  )


def input_bytes(config: config_lib.ModelConfig) -> int:
  """Bytes that one token's layer inputs and expert choices take in all layers.
  """
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  return sum(
      part.count * len(part.kinds)
      * (config.width * itemsize + _choices_bytes(config, part.experts))
      for part in pattern.parts(config)
  )


def attended_bytes(config: config_lib.ModelConfig) -> int:
  """Bytes that one token's outputs of attention take in all layers, if kept.
  """
  def of(kind):
    mixer = kinds.of(config, kind)
    if not mixer.attends:
      return 0
    zeros = jax.eval_shape(lambda: mixer.attended_zeros(1, 1))
    return sum(x.size * x.dtype.itemsize for x in zeros)

  return sum(
      part.count * sum(map(of, part.kinds)) for part in pattern.parts(config)
  )


def stage_bytes(
    config: config_lib.ModelConfig, kind: config_lib.Kind, experts: bool = False
) -> int:
  """Bytes that one token's stage inputs take in one layer.

  Args:
    config: geometry of the model.
    kind: the kind of the layer.
    experts: whether its feed-forward is a mixture of experts.
  """
  itemsize = jnp.dtype(config.compute_dtype).itemsize
  wide = config_lib.at_least_float32(config.compute_dtype).itemsize
  expanded = 2 * config.ffn_width * itemsize
  if experts:  # rows of all choices, the shared expert's, and logits
    mixture = config.experts
    rows = mixture.top_k * mixture.width + mixture.shared_width
    expanded = itemsize * (2 * rows + mixture.shared_gate)
    expanded += wide * mixture.count + _choices_bytes(config, True)
  return expanded + kinds.of(config, kind).stage_bytes()


def _choices_bytes(config: config_lib.ModelConfig, experts: bool) -> int:
  return 4 * config.experts.top_k if experts else 0
