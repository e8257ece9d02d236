# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The engine: three pure functions of (task, params, ...).

  push_chunk       runs a chunk of the prefix, appends its keys and values;
  visit_branches   runs tails with their backward pass, adds the cotangent of
                   the prefix state to one accumulator, whatever G is;
  pop_chunk        runs a chunk again (or reads what was kept) and pulls its
                   accumulated cotangent back, last chunk first.

With s the prefix state as a function of θ and ℓᵢ the loss of branch i,

  dℓ/dθ = Σᵢ ∂ℓᵢ/∂θ + (∂s/∂θ)ᵀ c,   c = Σᵢ ∂ℓᵢ/∂s:

`stop` is the first sum, `exact` adds the second, `sampled` estimates it from
some chunks, `full` runs every sequence on its own. The derivation is in
docs/mathematics.md.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import adapters
from branch_replay import balance as balance_lib
from branch_replay import checks
from branch_replay import chunk_sampling
from branch_replay import config as config_lib
from branch_replay import group as group_lib
from branch_replay import layout as layout_lib
from branch_replay import params as params_lib
from branch_replay import readout as readout_lib
from branch_replay import rows as rows_lib
from branch_replay import schedule as schedule_lib
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay.mixers import sizes
from branch_replay.models import decoder
from branch_replay.ops import tiling
from branch_replay.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Task:
  """The static half of a computation: what a compilation depends on."""

  model: decoder.Decoder
  readout: Any = readout_lib.LogProbs()
  prefix_gradient: str = "exact"
  schedule: Schedule = Schedule()
  sampling: chunk_sampling.Sampling = chunk_sampling.Sampling()
  trainable: str = "all"
  balance: float = 0.0

  def __post_init__(self):
    params_lib.check_model(self.model)
    checks.function(
        self.readout, "readout", "branch_replay.readout has some."
    )
    schedule_lib.check(self.schedule)
    schedule_lib.check_mode(self.prefix_gradient)
    checks.instance(self.sampling, "sampling", chunk_sampling.Sampling)
    if self.prefix_gradient == "sampled" and self.config.recurrent:
      raise ValueError(
          "prefix_gradient='sampled' through recurrent layers would multiply "
          "the weights of chunks: use 'exact'."
      )
    adapters.check_trainable(self.trainable, self.config)
    balance_lib.check(self.balance, self.config)

  @property
  def config(self) -> config_lib.ModelConfig:
    return self.model.config

  @property
  def accumulates(self) -> bool:
    """Whether tails add up the cotangent of the prefix state."""
    return self.prefix_gradient in ("exact", "sampled")

  @property
  def layout(self) -> layout_lib.Layout:
    schedule = self.schedule
    return dataclasses.replace(
        schedule.layout, implementation=schedule.attention
    )

  def trained(self, params):
    """The part of the parameters whose gradient is wanted."""
    return adapters.select(params, self.trainable)

  def chunks(self, positions: int) -> state_lib.Chunks:
    return state_lib.chunks(
        positions, self.schedule.chunk_size, self.layout.devices
    )

  def outer(self, params):
    """Parameters outside the layers: whole, but for the vocabulary tables."""
    return self.layout.gather("", segment.outer(params))

  def at_once(self, branches: int) -> int:
    if self.prefix_gradient == "full":
      return 1
    return min(self.schedule.branches_at_once or branches, branches)

  def policy(self, group: group_lib.Group, *, one_pass: bool) -> str:
    """The activation policy for groups of this shape.

    Args:
      group: the group, or its shapes.
      one_pass: whether the backward pass of a visit follows its forward pass
        at once, so that one visit's activations are held at a time.
    """
    branches, tokens = group.tails.shape[-2:]
    prefix = group.prompt.shape[-1] - 1
    if self.prefix_gradient == "full":
      tokens, prefix = prefix + tokens, 0
    elif self.prefix_gradient == "stop":
      prefix = 0
    rows = self.at_once(branches) * tokens
    # Several devices do not keep tails for `replay`, see `passes.forward`.
    one_pass = one_pass or self.layout.devices > 1
    held = rows if one_pass else branches * tokens
    return self.schedule.policy(self.config, prefix, rows, held)


def push_chunk(task: Task, params, state, index, *, keep: str | None = None):
  """Runs chunk `index` of `state.tokens` and appends it to the state.

  Args:
    task: model and schedule; the chunk size is that of its schedule.
    params: parameters.
    state: holds the chunks before; its `length` is that of the whole prefix.
    index: i32 scalar.
    keep: what to keep for `pop_chunk`, as in `segment.forward`.

  Returns:
    The state with what the chunk left behind, and what was kept.
  """
  size = task.chunks(state.capacity).size
  seen = state_lib.seen(task.config, state.mixer)
  tokens, context, chunk = _chunk(
      task, state.tokens, seen, index, size, state.length
  )
  _, present, kept = segment.forward(
      task.config, params["layers"],
      segment.embed(task.config, params, tokens, task.layout), context,
      layout=task.layout, keep=keep, present=True,
  )
  return state_lib.push(task.config, state, present, chunk), kept


def pop_chunk(
    task: Task, params, grads, accumulator, state, index, kept=None, scale=1.0,
    seeds=None,
):
  """Pulls the accumulated cotangent of chunk `index` back, in place.

  Chunks must be popped last to first: popping one adds to the cotangents of
  those before it.

  Args:
    task: model and schedule.
    params: parameters.
    grads: like `task.trained(params)`, at least float32; added to.
    accumulator: cotangent of the state; added to.
    state: the state the cotangent belongs to.
    index: i32 scalar.
    kept: what `push_chunk` kept of this chunk; None runs it again.
    scale: factor on the chunk's accumulated cotangent, and on the seeds.
    seeds: of the load-balance term for a position of the prefix, or None.

  Returns:
    grads and accumulator.
  """
  positions = state_lib.positions(task.config, accumulator, state)
  size = task.chunks(positions).size
  room = max(0, positions - state.capacity)
  all_tokens = jnp.pad(state.tokens, (0, room))
  seen = state_lib.seen(
      task.config, state.mixer, index, size // task.layout.devices
  )
  tokens, context, chunk = _chunk(
      task, all_tokens, seen, index, size, state.length
  )
  if seeds is not None:
    real_GT = context.positions_GT < state.length
    context = context._replace(balance=segment.Balance(seeds, scale * real_GT))
  if kept is None:
    here = size // task.layout.devices
    context = context._replace(choices=state_lib.chosen(
        state, chunk.start, here, room // task.layout.devices
    ))
  popped = segment.Popped(chunk, scale)
  return pull_back(
      task, params, grads, accumulator, tokens, context, popped, kept
  )


def pull_back(
    task: Task, params, grads, accumulator, tokens_GT, context, popped,
    kept=None,
):
  """Pulls the accumulated cotangent of one segment back, in place.

  Args:
    task, params, grads, accumulator: as in `pop_chunk`.
    tokens_GT: this device's tokens of the segment.
    context: what it continued from.
    popped: `segment.Popped`.
    kept: what `segment.forward` kept; None runs it again.

  Returns:
    grads and accumulator.
  """
  if kept is None:
    _, _, kept = segment.forward(
        task.config, params["layers"],
        segment.embed(task.config, params, tokens_GT, task.layout), context,
        layout=task.layout,
        keep=rows_lib.segment_keep(task.schedule.activations),
    )
  nothing_GTM = jnp.zeros(
      (*tokens_GT.shape, task.config.width), task.config.compute_dtype
  )
  dx_GTM, layer_grads, accumulator = segment.backward(
      task.config, params["layers"], grads["layers"], kept,
      nothing_GTM, context, layout=task.layout, accumulator=accumulator,
      popped=popped,
  )
  grads = grads | {"layers": layer_grads}
  grads = segment.embed_backward(
      task.config, grads, tokens_GT, dx_GTM, task.layout
  )
  return grads, accumulator


def skip_chunk(task: Task, accumulator, state, index):
  """The accumulator after the turn of a chunk that is not popped."""
  positions = state_lib.positions(task.config, accumulator, state)
  size = task.chunks(positions).size
  chunk = _stretch(task, index, size, state.length)
  return state_lib.skip(task.config, accumulator, chunk)


def visit_branches(
    task: Task, params, grads, accumulator, state, group, cotangent, args=(),
    kept=(None, None), seeds=None,
):
  """Forward and backward of all branches, `branches_at_once` at a time.

  Args:
    task: model, readout, mode and schedule.
    params: parameters.
    grads: like `task.trained(params)`, at least float32; added to.
    accumulator: cotangent of the state, added to; None in stop and full.
    state: the captured prefix; None in full.
    group: prompt and tails.
    cotangent: (outputs, *args) -> (cotangent of the outputs, anything), for
      the branches of one visit.
    args: tuple of arrays with leading axis G, handed to `cotangent`.
    kept: what `run_branches` kept; by default the branches are run here.
    seeds: of the load-balance term, or None.

  Returns:
    grads, accumulator, the outputs [G, T, ...], and "anything" for the whole
    visits (with a leading axis) and for the last, smaller one.
  """
  branches, window, context_of = _branches(task, state, group)
  outer = task.outer(params)

  def visit(carry, part):
    (of_visit, args), kept = part
    context = context_of(of_visit)
    if seeds is not None:
      real_GT = _real(task, state, context, window)
      context = context._replace(balance=segment.Balance(seeds, real_GT))
    *carry, outputs, extra = rows_lib.visit(
        task, params, outer, *carry, of_visit, window, context, cotangent,
        args, kept,
    )
    return tuple(carry), (outputs, extra)

  parts = rows_lib.split((branches, args), task.at_once(group.tails.shape[0]))
  parts = tuple(
      None if part is None else (part, of_part)
      for part, of_part in zip(parts, kept, strict=True)
  )
  carry, (whole, rest) = rows_lib.scan_parts(visit, (grads, accumulator), parts)
  outputs = rows_lib.join(whole[0], None if rest is None else rest[0])
  return *carry, outputs, (whole[1], None if rest is None else rest[1])


def run_branches(task: Task, params, state, group, *, keep: bool):
  """Forward of all branches, without a backward pass.

  Args:
    task: model, readout, mode and schedule.
    params: parameters.
    state: the captured prefix; None in full.
    group: prompt and tails.
    keep: whether to keep activations for `visit_branches`.

  Returns:
    The outputs [G, T, ...], and what was kept.
  """
  branches, window, context_of = _branches(task, state, group)
  policy = task.schedule.activations if keep else None
  outer = task.outer(params)

  def run(_, rows):
    context = context_of(rows)
    y_GSM, stages = rows_lib.run(task, params, rows, context, policy)
    outputs, _ = rows_lib.read(task, outer, y_GSM, rows, window, outer)
    return None, (outputs, (y_GSM, stages) if keep else None)

  parts = rows_lib.split(branches, task.at_once(group.tails.shape[0]))
  _, (whole, rest) = rows_lib.scan_parts(run, None, parts)
  rest = (None, None) if rest is None else rest
  return rows_lib.join(whole[0], rest[0]), (whole[1], rest[1])


def count_choices(task: Task, params, state, group):
  """How often each expert was chosen in a group's whole sequences, by stack.

  Runs all branches, without a backward pass; the prefix, which the state knows
  the choices of, counts once a branch whose tail is not empty.
  """
  branches, window, context_of = _branches(task, state, group)
  config, layout = task.config, task.layout

  def run(counts, rows):
    context = context_of(rows)
    _, present, _ = segment.forward(
        config, params["layers"],
        segment.embed(
            config, params, layout.mine(rows.tokens_GS, 1), layout
        ),
        context, layout=layout, keep=None, present=True,
    )
    real_GT = _real(task, state, context, window)
    return balance_lib.add(counts, present.choices, real_GT), None

  parts = rows_lib.split(branches, task.at_once(group.tails.shape[0]))
  counts, _ = rows_lib.scan_parts(run, balance_lib.zeros(config), parts)
  if task.prefix_gradient != "full":
    real_P = layout.positions(0, state.capacity) < state.length
    counts = balance_lib.add(
        counts, state.choices,
        balance_lib.answered(group.tail_lengths) * real_P[None],
    )
  return layout.sum(counts)


def zero_grads(params):
  """Zeros like the parameters, at least float32."""
  return jax.tree.map(
      lambda x: jnp.zeros(x.shape, config_lib.at_least_float32(x.dtype)),
      params,
  )


def _chunk(task: Task, tokens, seen, index, size, length):
  """Tokens [1, C] of a chunk, its context, and where it stands."""
  layout, start = task.layout, index * size
  positions_C = layout.positions(start, size)
  lengths_G = None
  if task.config.recurrent:  # attention cannot see what is past the length
    lengths_G = jnp.clip(length - start, 0, size)[None]
  chunk = _stretch(task, index, size, length)
  context = segment.Context(seen, chunk.start, positions_C[None], lengths_G)
  tokens_1C = lax.dynamic_slice_in_dim(tokens, start, size)[None]
  return layout.mine(tokens_1C, 1), context, chunk


def _stretch(task: Task, index, size, length) -> sizes.Chunk:
  """Where a chunk stands on this device."""
  layout, start = task.layout, index * size
  end = jnp.clip(length, start, start + size)
  here = start // layout.devices
  return sizes.Chunk(index, here, layout.here(end) - here)


def _branches(task: Task, state, group):
  """The rows to run, where their outputs start, and each part's context."""
  if task.prefix_gradient == "full":
    window, first = group.prompt_length - 1, 0
    tokens_GS = group.rows()
    nothing = state_lib.empty(task.config, 0, devices=task.layout.devices)
    prefix = state_lib.seen(task.config, nothing.mixer)
  else:
    window, first = 0, state.length
    tokens_GS = group.inputs()
    prefix = state_lib.seen(task.config, state.mixer)
  rows = rows_lib.Rows(
      rows_lib.pad_tokens(task, tokens_GS), group.tails, group.tail_lengths
  )
  layout = task.layout

  def context_of(rows):
    branches, tokens = rows.tokens_GS.shape
    positions_S = layout.positions(first, tokens)[None]
    lengths_G, blocks = window + rows.lengths_G, None
    if group.block is not None:
      blocks = tiling.Blocks(group.block, window, lengths_G)
    return segment.Context(
        prefix, layout.here(first),
        jnp.broadcast_to(positions_S, (branches, positions_S.shape[1])),
        lengths_G, blocks=blocks,
    )

  return rows, window, context_of


def _real(task: Task, state, context: segment.Context, window):
  """Which of this device's tokens of branches count, bool[G, T]: no padding.

  Nor, in "full", the prefix of a row whose tail is empty.
  """
  first = 0 if task.prefix_gradient == "full" else state.length
  lengths_G1 = context.lengths_G[:, None]
  return (context.positions_GT < first + lengths_G1) & (lengths_G1 > window)
