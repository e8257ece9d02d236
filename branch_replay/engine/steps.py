# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The three steps, push, visit and pop, of one run on top of a prefix state.

A run is rows of tokens that stand side by side at the same positions: a chunk
of a prefix, or some branches.

  push   runs a run forward, without autodiff, and appends what it leaves behind
         to the state;
  visit  runs a run forward and backward on top of the state, and adds the
         cotangent of the state to one accumulator that all branches share;
  pop    takes the run that was pushed last off the state and pulls the
         accumulated cotangent of what it left behind back through it.

With s the state as a function of the parameters θ, and ℓᵢ the loss of branch i,

  dℓ/dθ = Σᵢ ∂ℓᵢ/∂θ + (∂s/∂θ)ᵀ c,   c = Σᵢ ∂ℓᵢ/∂s:

"stop" computes the first sum, "exact" adds the second term, "banded" most of
it, "sampled" estimates it from some runs, "full" visits every sequence whole.
The derivation is in docs/mathematics.md. Two drivers call the steps: `compiled`
(loops under jit, for groups) and `hosted` (a loop in Python, for groups and
trees).

All functions here run on every device, on its share (`layout.over`).
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.engine import balance as balance_lib
from branch_replay.engine import estimators
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import runs
from branch_replay.engine import segment
from branch_replay.engine import state as state_lib
from branch_replay.engine.runs import Action
from branch_replay.engine.runs import Run
from branch_replay.engine.spec import Spec
from branch_replay.mixers import kinds
from branch_replay.mixers import sizes
from branch_replay.models import adapters
from branch_replay.ops.attention import tiling


class Pull(NamedTuple):
  """Turns the outputs of a run into their cotangent.

  Attributes:
    cotangent: function (outputs, *args) -> (cotangent of outputs, anything).
    args: its further arguments, pytrees of arrays [R, ...].
  """

  cotangent: object
  args: tuple = ()


def push(spec: Spec, params, state, run: Run, *, keep: str | None = None):
  """Runs a run of one row forward and appends what it leaves to the state.

  Args:
    spec: model and schedule.
    params: parameters.
    state: the `PrefixState` that the run continues from.
    run: the run.
    keep: which activations to keep for `pop`, see `segment.forward`.

  Returns:
    The new state; what `pop` needs of the old one; and (output of the last
    layer, activations kept of the layers).
  """
  context = _context(spec, state, run, Action.PUSH)
  y_RSM, present, stages = _forward(
      spec, params, run, context, keep=keep, present=True,
      keep_attention=bool(state.attended),
  )
  size = run.tokens_RS.shape[1] // spec.layout.devices
  saved = state_lib.save(spec.config, state.mixer, size)
  state = state_lib.push(spec.config, state, present, _chunk(spec, run))
  return state, saved, (y_RSM, stages)


def extend(spec: Spec, params, state, run: Run):
  """Appends a run that will never be popped, of any length, to the state.

  Unlike `push` it does not write padding, for which there may be no room.
  """
  context = _context(spec, state, run, Action.PUSH)
  _, present, _ = _forward(spec, params, run, context, keep=None, present=True)
  return state_lib.extend(spec.config, state, present, _chunk(spec, run))


def look(spec: Spec, params, outer, state, run: Run, *, keep: str | None):
  """Runs a run forward on top of a state and applies the readout.

  Args:
    spec, params, state, run: as in `push`, but with any number of rows.
    outer: `spec.outer(params)`.
    keep: which activations to keep for `visit`, see `segment.forward`.

  Returns:
    The outputs [R, T, ...], and what was kept.
  """
  context = _context(spec, state, run, Action.VISIT)
  y_RSM, _, stages = _forward(spec, params, run, context, keep=keep)
  outputs, _ = read(spec, outer, y_RSM, run, outer)
  return outputs, (y_RSM, stages)


def visit(
    spec: Spec, params, outer, grads, accumulator, state, run: Run, pull: Pull,
    *, kept=None, seeds=None,
):
  """Runs a run forward and backward on top of a state.

  Args:
    spec, params, outer, state, run: as in `look`.
    grads: gradients so far, like `spec.trained(params)`, at least float32.
    accumulator: what has accumulated so far; None in "stop" and "full".
    pull: turns the outputs into their cotangent.
    kept: what `look` or `push` kept of this run; None runs it forward here.
    seeds: seeds of the load-balance term (see `balance`), or None.

  Returns:
    The updated grads and accumulator, the outputs [R, T, ...], and the
    "anything" of `pull`.
  """
  context = _context(spec, state, run, Action.VISIT, seeds=seeds)
  return _there_and_back(
      spec, params, outer, grads, accumulator, run, context, pull, kept
  )


def pop(
    spec: Spec, params, grads, accumulator, state, run: Run, saved, *,
    kept=None, pull: Pull | None = None, draw: estimators.Draw | None = None,
    seeds=None,
):
  """Takes the run that was pushed last off the state and pulls it back.

  Runs must be popped last to first: popping one adds to the cotangents of what
  was pushed before it.

  Args:
    spec, params, grads, run: as in `visit`.
    accumulator: what has accumulated for the state that includes the run.
    state: the state that includes the run.
    saved: what `push` returned of the state before the run.
    kept: activations that `push` kept; None runs it again, with the same
      experts, and with the outputs of attention if the state has them.
    pull: turns the run's own outputs into their cotangent; None if the run has
      no outputs.
    draw: inputs to the draw, for a run that "sampled" may leave out; else None.
    seeds: seeds of the load-balance term, or None.

  Returns:
    The updated grads; the updated accumulator, in which stacks without a place
    for every position now hold the cotangent of the state before the run; those
    stacks of the state before the run (`state.rest_of`); the outputs; the
    "anything" of `pull`; and with a draw an `estimators.PrefixPass` of scalars,
    else None.
  """
  config, chunk, report, scale = spec.config, _chunk(spec, run), None, 1.0
  rest = state_lib.restore(config, state, saved, chunk)
  state = state_lib.with_rest(config, state, rest)
  if draw is not None:
    report = estimators.drawn(
        config, spec.sampling, accumulator, draw, spec.layout
    )
    scale = estimators.weight(report.probability, report.drawn)
  context = _context(
      spec, state, run, Action.POP, seeds=seeds, scale=scale
  )
  if kept is None:
    size = run.tokens_RS.shape[1] // spec.layout.devices
    choices, attended = state_lib.of_chunk(
        (state.choices, state.attended), chunk.start, size,
        state_lib.places(config, accumulator),
    )
    context = context._replace(choices=choices, attended=attended)

  def pull_back(grads, accumulator):
    outer = None if pull is None else spec.outer(params)
    return _there_and_back(
        spec, params, outer, grads, accumulator, run, context, pull, kept,
        segment.Popped(chunk, scale),
    )

  if draw is None:
    grads, accumulator, outputs, extra = pull_back(grads, accumulator)
  else:
    outputs = extra = None
    grads, accumulator = estimators.pop_or_skip(
        config, report.drawn, lambda *carry: pull_back(*carry)[:2],
        lambda accumulator: state_lib.skip(config, accumulator, chunk),
        grads, accumulator,
    )
  return grads, accumulator, rest, outputs, extra, report


def restore(spec: Spec, state, run: Run, saved):
  """Rebuilds `state.rest_of` the state before the run that was pushed last."""
  return state_lib.restore(spec.config, state, saved, _chunk(spec, run))


def count(spec: Spec, params, counts, state, run: Run):
  """Counts how often each expert is chosen in a run on top of a state.

  Args:
    spec, params, state, run: as in `look`.
    counts: counts so far over this device's tokens, [L, E] by stack. A row
      counts once for each sequence that contains it.

  Returns:
    The updated counts.
  """
  context = _context(spec, state, run, Action.VISIT)
  _, present, _ = _forward(spec, params, run, context, keep=None, present=True)
  return balance_lib.add(counts, present.choices, _sequences(run, context))


def count_pushed(spec: Spec, counts, state, run: Run):
  """As `count`, for the run pushed last; reads its experts from the state."""
  chunk, tokens = _chunk(spec, run), run.tokens_RS.shape[1]
  chosen = state_lib.of_chunk(
      state.choices, chunk.start, tokens // spec.layout.devices, 0
  )
  chosen = jax.tree.map(lambda x_L1Ck: x_L1Ck[:, :, None], chosen)
  context = _context(spec, state, run, Action.PUSH)
  return balance_lib.add(counts, chosen, _sequences(run, context))


def keeps(policy: str | None) -> str | None:
  """Translates an activation policy into the `keep` of `segment.forward`."""
  if policy is None:
    return None
  return "inputs" if policy == "recompute_layers" else "stages"


def _there_and_back(
    spec, params, outer, grads, accumulator, run, context, pull, kept,
    popped=None,
):
  """Runs a run forward unless it is kept, then backward.

  Returns (grads, accumulator, outputs, "anything"), for `visit` and `pop`.
  """
  config, layout = spec.config, spec.layout
  if kept is None:
    y_RSM, _, stages = _forward(
        spec, params, run, context, keep=keeps(spec.schedule.activations)
    )
  else:
    y_RSM, stages = kept
  outputs = extra = None
  tokens_RS = layout.mine(run.tokens_RS, 1)
  if pull is None:
    dy_RSM = jnp.zeros((*tokens_RS.shape, config.width), config.compute_dtype)
  else:
    of_outer = segment.outer(grads)
    outputs, pull_outputs = read(spec, outer, y_RSM, run, of_outer)
    d_outputs, extra = pull.cotangent(outputs, *pull.args)
    d_outer, dy_RSM = pull_outputs(d_outputs)
    d_outer = adapters.pick(layout.reduce("", d_outer), of_outer)
    grads = grads | jax.tree.map(
        lambda total, new: total + new.astype(total.dtype), of_outer, d_outer
    )
  dx_RSM, of_layers, accumulator = segment.backward(
      config, params["layers"], grads["layers"], stages, dy_RSM, context,
      layout=layout, accumulator=accumulator, popped=popped,
  )
  grads = segment.embed_backward(
      config, grads | {"layers": of_layers}, tokens_RS, dx_RSM, layout
  )
  return grads, accumulator, outputs, extra


def _forward(
    spec, params, run, context, *, keep, present=False, keep_attention=False
):
  """Embeds this device's tokens of a run and calls `segment.forward`."""
  tokens_RS = spec.layout.mine(run.tokens_RS, 1)
  return segment.forward(
      spec.config, params["layers"],
      segment.embed(spec.config, params, tokens_RS, spec.layout), context,
      layout=spec.layout, keep=keep, present=present,
      keep_attention=keep_attention,
  )


def _masked(config, run, action: Action) -> bool:
  """Whether the layers are told each row's length.

  Attention layers of a run that is pushed need not be: no real token sees the
  padding after it. When the run is popped they still need not, unless it has
  outputs. Recurrent layers always must: what they leave behind depends on every
  token they are given.
  """
  if action is Action.VISIT or kinds.recurrent(config):
    return True
  return action is Action.POP and run.read is not None


def _context(
    spec, state, run, action: Action, *, seeds=None, scale=1.0
) -> segment.Context:
  """Builds the `segment.Context` of a run that is pushed, visited or popped."""
  layout, (rows, tokens) = spec.layout, run.tokens_RS.shape
  positions_S = layout.positions(run.first, tokens)[None]
  blocks = None
  if run.block is not None:
    blocks = tiling.Blocks(run.block, run.read.window, run.lengths_R)
  context = segment.Context(
      state_lib.seen(spec.config, state.mixer), layout.here(run.first),
      jnp.broadcast_to(positions_S, (rows, positions_S.shape[1])),
      run.lengths_R if _masked(spec.config, run, action) else None,
      blocks=blocks, reach=_reach(spec, run),
  )
  if seeds is None:
    return context
  weights_RS = scale * _sequences(run, context)
  return context._replace(balance=segment.Balance(seeds, weights_RS))


def _reach(spec, run) -> segment.Reach | None:
  """How far a run's tokens send cotangents back; None for all the way."""
  if spec.prefix_gradient != "banded" or run.inner_RS is None:
    return None
  positions_S = run.first + jnp.arange(run.tokens_RS.shape[1])
  lowest_RS = spec.band.lowest(positions_S[None], run.inner_RS)
  return segment.Reach(lowest_RS, spec.band.sinks)


def _sequences(run, context):
  """How many sequences contain each of this device's tokens, [R, S]."""
  end_R1 = run.first + run.lengths_R[:, None]
  return jnp.where(context.positions_GT < end_R1, run.sequences_R[:, None], 0)


def _chunk(spec, run) -> sizes.Chunk:
  """Where a run of one row stands on this device."""
  start = spec.layout.here(run.first)
  return sizes.Chunk(
      start, spec.layout.here(run.first + run.lengths_R[0]) - start
  )


def read(spec: Spec, outer, y_RSM, run: Run, trained):
  """Applies the readout to the tokens in `run.read`.

  No collective is differentiated: they are outside the function given to vjp.

  Args:
    spec: model, readout, schedule.
    outer: parameters outside the layers.
    y_RSM: output of the last layer for this device's tokens.
    run: the run.
    trained: the part of `outer` that gets a gradient.

  Returns:
    The outputs [R, T, ...] for the tokens of all devices, 0 at padding; and
    their pullback, from a cotangent to those of `outer` and `y_RSM`.
  """
  layout, what = spec.layout, run.read
  tokens = what.targets_RT.shape[1]
  targets_RT = runs.deal(what.targets_RT, layout.devices)
  y_RTM = y_RSM
  if spec.whole:
    y_RTM = layout.all(y_RSM, 1)
    y_RTM = jnp.pad(y_RTM, ((0, 0), (0, layout.devices - 1), (0, 0)))
    padded = y_RTM.shape
    y_RTM = layout.mine(lax.dynamic_slice_in_dim(
        y_RTM, what.window, targets_RT.shape[1], axis=1
    ), 1)
  outputs, pull = jax.vjp(
      lambda outer, y: readout_lib.chunked(
          spec.readout, spec.model, outer, y, layout.mine(targets_RT, 1),
          tokens=spec.schedule.readout_tokens, layout=layout,
      ),
      segment.widened(outer, trained), y_RTM,
  )
  real_RT = jnp.arange(tokens)[None] < what.lengths_R[:, None]

  def mask(x):
    real = real_RT.reshape(*real_RT.shape, *(1,) * (x.ndim - 2))
    return jnp.where(real, x, jnp.zeros((), x.dtype))

  def pullback(d_outputs):
    d_outer, dy_RTM = pull(jax.tree.map(
        lambda x: layout.mine(runs.deal(mask(x), layout.devices), 1), d_outputs
    ))
    if not spec.whole:
      return d_outer, dy_RTM
    dy_RSM = lax.dynamic_update_slice_in_dim(
        jnp.zeros(padded, dy_RTM.dtype), layout.all(dy_RTM, 1), what.window,
        axis=1,
    )
    sequence = y_RSM.shape[1] * layout.devices
    return d_outer, layout.mine(dy_RSM[:, :sequence], 1)

  outputs = jax.tree.map(
      lambda x: mask(layout.all(x, 1)[:, :tokens]), outputs
  )
  return outputs, pullback
