# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled driver: runs the steps of a group as loops under jit.

A group takes three loops: push its prefix chunk by chunk, visit its branches a
few at a time, pop the chunks last to first. One compiled program serves all
groups of a bucket: another prefix length, other tokens and other parameters do
not compile again. Arguments are not checked here but in `gradients` and
`prefix`.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.engine import balance
from branch_replay.engine import estimators
from branch_replay.engine import runs
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.engine.spec import Spec


@functools.partial(jax.jit, static_argnums=(0, 4))
def capture(spec: Spec, params, group, version, capacity=0):
  """Captures the prefix state of one group.

  Args:
    spec: model and schedule.
    params: parameters.
    group: the group; its tails are not read.
    version: u32 to mark the state with.
    capacity: positions to make room for; 0 for those of the prefix.
  """
  here = functools.partial(_capture, spec, capacity)
  return spec.layout.over(here, ("params", "all", "all"), spec.state)(
      params, group, version
  )


@functools.partial(jax.jit, static_argnums=0)
def extend(spec: Spec, params, state, tokens, length):
  """Runs more tokens on top of a state and appends them to it.

  Args:
    spec: model and schedule.
    params: parameters.
    state: a state with room to spare.
    tokens: i32 ids, padded.
    length: i32, positions of the state after the tokens, without their padding.

  Returns:
    The longer state, without what popping chunks would need.
  """
  real = (length - state.length)[None]
  run = runs.Run(state.length, tokens[None], real, jnp.ones(1, jnp.int32))
  state = steps.extend(spec, params, state, run)
  at = run.first + jnp.arange(tokens.size)
  at = jnp.where(at < length, at, state.capacity)
  return dataclasses.replace(
      state, length=length, saved=None, kept=None, attended={},
      tokens=state.tokens.at[at].set(tokens, mode="drop"),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(spec: Spec, keep, params, group, state):
  """Runs a group's tails forward, for `gradients.replay`.

  Args:
    spec: model, readout, mode and schedule.
    keep: whether activations are returned for `backward`; ignored on several
      devices, where the tails are run again.
    params: parameters.
    group: one group.
    state: its captured prefix; None captures it here.

  Returns:
    The outputs [G, T, ...], the state (None in "full"), and the activations.
  """
  # On several devices activations cannot be returned: tails are run again.
  keep = keep and spec.layout.devices == 1
  outs = "all", "all" if spec.whole else spec.state, "all"
  here = functools.partial(_forward, spec, keep)
  return spec.layout.over(here, ("params", "all", spec.state), outs)(
      params, group, state
  )


@functools.partial(jax.jit, static_argnums=0)
def backward(spec: Spec, params, group, state, key, kept, d_outputs):
  """Pulls the cotangent of a group's outputs back to the parameters.

  Args:
    spec, params, group: as in `forward`.
    state: the state that `forward` returned.
    key: PRNG key, for "sampled".
    kept: the activations that `forward` returned.
    d_outputs: cotangent of the outputs.

  Returns:
    Gradients of all parameters, in the parameters' dtypes.
  """
  ins = "params", "all", spec.state, "all", "all", "all"
  here = functools.partial(_backward, spec)
  return spec.layout.over(here, ins, "grads", params)(
      params, group, state, key, kept, d_outputs
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_grad(
    spec: Spec, loss, params, group, args, state, key, share=1.0
):
  """Computes loss and gradient of one group, or of stacked groups, in one pass.

  Args:
    spec: model, readout, mode and schedule.
    loss: (outputs, *args) -> scalar, a sum over branches.
    params: parameters.
    group: one group, or stacked ones.
    args: tuple of further arguments of the loss.
    state: the captured prefix of one group; None captures it here.
    key: PRNG key for "sampled"; else None.
    share: factor on the load-balance term.

  Returns:
    An `Evaluation` or `Balanced`; and gradients like `spec.trained(params)`, at
    least float32.
  """
  here = functools.partial(_value_and_grad, spec, loss)
  ins = "params", "all", "all", spec.state, "all", "all"
  outs = "all", "grads"
  return spec.layout.over(here, ins, outs, spec.trained(params))(
      params, group, args, state, key, share
  )


# Functions with an underscore run on every device, on its share.


def _capture(spec, capacity, params, group, version):
  positions = group.prompt.shape[0] - 1
  chunks = spec.chunks(positions)
  devices = spec.layout.devices
  capacity = -(-capacity // devices) * devices
  state = dataclasses.replace(
      state_lib.empty(
          spec.config, chunks.capacity, version, devices, room=capacity,
          keep_attention=spec.keeps_attention,
      ),
      tokens=jnp.pad(group.prompt[:-1], (0, chunks.capacity - positions)),
      length=group.prompt_length - 1,
  )
  keep = "stages" if spec.schedule.activations == "keep" else None
  # A state with room to be extended is never popped.
  saves = spec.accumulates and capacity <= chunks.capacity

  def push(index, state):
    state, saved, (_, kept) = steps.push(
        spec, params, state,
        runs.chunk(state.tokens, state.length, index, chunks.size), keep=keep,
    )
    return state, (saved if saves else None, kept)

  if not chunks.count:
    return state_lib.resize(spec.config, state, capacity)
  if chunks.count == 1:  # no loop, so what is kept is not copied into a buffer
    state, left = push(0, state)
    buffers = jax.tree.map(lambda x: x[None], left)
  else:
    shapes = jax.eval_shape(lambda: push(0, state)[1])
    buffers = jax.tree.map(
        lambda x: jnp.zeros((chunks.count, *x.shape), x.dtype), shapes
    )

    def push_into(index, carry):
      state, buffers = carry
      state, left = push(index, state)
      return state, jax.tree.map(
          lambda buffer, x: lax.dynamic_update_index_in_dim(
              buffer, x, index, 0
          ),
          buffers, left,
      )

    state, buffers = lax.fori_loop(
        0, runs.chunks_used(state.length, chunks), push_into, (state, buffers)
    )
  saved, kept = buffers
  state = dataclasses.replace(state, saved=saved, kept=kept)
  return state_lib.resize(
      spec.config, state, max(chunks.capacity, capacity)
  )


def _own_state(spec: Spec, keep: bool, params, group):
  """Captures a state for one gradient only, which needs no version."""
  keep = keep and spec.accumulates
  capturing = spec.with_policy("keep" if keep else "recompute")
  return _capture(capturing, 0, params, group, jnp.uint32(0))


def _forward(spec, keep, params, group, state):
  if state is None and not spec.whole:
    state = _own_state(spec, keep, params, group)
  outer = spec.outer(params)
  policy = steps.keeps(spec.schedule.activations) if keep else None

  def look(_, run):
    outputs, kept = steps.look(
        spec, params, outer, _beneath(spec, state), run, keep=policy
    )
    return None, (outputs, kept if keep else None)

  _, (equal, last) = _over_branches(spec, look, None, group)
  last = (None, None) if last is None else last
  return _join(equal[0], last[0]), state, (equal[1], last[1])


def _backward(spec, params, group, state, key, kept, d_outputs):
  grads, *_ = _gradient(
      spec, params, spec_lib.zero_grads(params), group, state, key,
      spec_lib.cotangent_of(None), (d_outputs,), kept,
  )
  return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)


def _value_and_grad(spec, loss, params, group, args, state, key, share):
  cotangent = spec_lib.cotangent_of(loss)
  if spec.balance:
    share = share / balance.groups(group.tail_lengths)

  def one(grads, inputs, state=None):
    group, args, key = inputs
    if state is None and not spec.whole:
      keep = spec.schedule.activations == "keep"
      state = _own_state(spec, keep, params, group)
    grads, outputs, (equal, last), reports = _gradient(
        spec, params, grads, group, state, key, cotangent, args, share=share
    )
    value = jnp.sum(equal) + (0 if last is None else last)
    return grads, spec_lib.evaluation(value, outputs, *reports)

  grads = spec_lib.zero_grads(spec.trained(params))
  if group.prompt.ndim == 1:
    grads, found = one(grads, (group, args, key), state)
  else:
    if key is not None:  # a key for every group, by its place
      key = jax.vmap(lambda i: jax.random.fold_in(key, i))(
          jnp.arange(group.prompt.shape[0])
      )
    grads, found = lax.scan(one, grads, (group, args, key))
    found = found._replace(loss=jnp.sum(found.loss))
  return found, grads


def _gradient(
    spec, params, grads, group, state, key, cotangent, args=(),
    kept=(None, None), share=1.0,
):
  """Adds the gradient of one group to `grads`, in any mode, on a given state.

  Returns:
    grads, the outputs, the "anything" of `cotangent` (of equal visits and of
    the last, smaller one), and (`PrefixPass` or None, expert load or None).
  """
  accumulator = report = load = seeds = None
  if state is not None:
    # Drop spare room, so that the work is that of the prompt.
    chunks = spec.chunks(group.prompt.shape[0] - 1)
    if state.capacity > chunks.capacity:
      state = state_lib.resize(spec.config, state, chunks.capacity)
  if spec.accumulates:
    accumulator = state_lib.accumulator(
        spec.config, chunks.capacity // spec.layout.devices,
        spec.schedule.accumulator_dtype, spec.layout.devices,
    )
  if spec.balance:
    counts = _count(spec, params, state, group)
    load = balance.load(spec.config, counts)
    seeds = balance.seeds(spec.config, share * spec.balance, counts)
  grads, accumulator, outputs, extra = visit_branches(
      spec, params, grads, accumulator, state, group,
      steps.Pull(cotangent, args), kept=kept, seeds=seeds,
  )
  if spec.accumulates and chunks.count:
    uniform_N = None
    if spec.prefix_gradient == "sampled":
      uniform_N = estimators.uniforms(key, chunks.count)
    grads, _, report = pop_chunks(
        spec, params, grads, accumulator, state, chunks, uniform_N=uniform_N,
        seeds=seeds, sequences=balance.answered(group.tail_lengths),
    )
  return grads, outputs, extra, (report, load)


# These run on every device too, and are public for experiments to call.


def visit_branches(
    spec: Spec, params, grads, accumulator, state, group, pull: steps.Pull, *,
    kept=(None, None), seeds=None,
):
  """Visits all branches of a group, a few at a time.

  Args:
    spec, params, grads, accumulator, seeds: as in `steps.visit`.
    state: the captured prefix; None in "full".
    group: prompt and tails.
    pull: turns the outputs into their cotangent; its args are [G, ...].
    kept: activations that `forward` kept; by default branches are run forward
      here.

  Returns:
    grads, accumulator, the outputs [G, T, ...], and the "anything" of `pull`:
    for the visits of `branches_at_once` branches, with a leading axis of
    visits, and for the last, smaller visit (or None).
  """
  beneath, outer = _beneath(spec, state), spec.outer(params)

  def visit(carry, run, args, kept):
    *carry, outputs, extra = steps.visit(
        spec, params, outer, *carry, beneath, run,
        steps.Pull(pull.cotangent, args), kept=kept, seeds=seeds,
    )
    return tuple(carry), (outputs, extra)

  (grads, accumulator), (equal, last) = _over_branches(
      spec, visit, (grads, accumulator), group, pull.args, kept
  )
  last = (None, None) if last is None else last
  outputs = _join(equal[0], last[0])
  return grads, accumulator, outputs, (equal[1], last[1])


def pop_chunks(
    spec: Spec, params, grads, accumulator, state, chunks: state_lib.Chunks, *,
    uniform_N=None, seeds=None, sequences=1,
):
  """Pops the chunks of a prefix, last to first.

  Args:
    spec, params, grads, accumulator, seeds: as in `steps.pop`.
    state: the captured prefix. It may have been captured in chunks of another
      size if all layers have a place for every position.
    chunks: how to cut it; the accumulator has room for just these chunks.
    uniform_N: in "sampled" a random number in [0, 1) for each chunk; else None.
    sequences: how many branches the load-balance term counts the prefix for.

  Returns:
    grads, the accumulated cotangent of the state, and in "sampled" the
    `PrefixPass`, else None.
  """
  config = spec.config
  used = runs.chunks_used(state.length, chunks)
  room = chunks.capacity - state.capacity
  tokens = jnp.pad(state.tokens, (0, max(0, room)))
  rest = state_lib.rest_of(config, state.mixer)
  buffers = state.saved, state.kept

  def pop(index, carry, draw=None):
    grads, accumulator, rest = carry
    saved, kept = jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False),
        buffers,
    )
    run = runs.chunk(tokens, state.length, index, chunks.size, sequences)
    grads, accumulator, rest, *_, report = steps.pop(
        spec, params, grads, accumulator,
        state_lib.with_rest(config, state, rest), run, saved,
        kept=None if kept is None else (None, kept), draw=draw, seeds=seeds,
    )
    return (grads, accumulator, rest), report

  carry, report = (grads, accumulator, rest), None
  if uniform_N is not None:
    carry, report = _pop_drawn(spec, uniform_N, chunks, used, pop, carry)
  elif chunks.count == 1:  # no loop, so what was kept is not copied
    carry, _ = pop(0, carry)
  else:
    carry = lax.fori_loop(
        0, used, lambda step, carry: pop(used - 1 - step, carry)[0], carry
    )
  return *carry[:2], report


def _pop_drawn(spec, uniform_N, chunks, used, pop, carry):
  """Draws and pops chunks last to first, for "sampled"."""
  index_N = jnp.arange(chunks.count)

  def visit(step, carry):
    *carry, budget, report = carry
    index = used - 1 - step
    draw = estimators.Draw(
        index_N * chunks.size, index_N <= index, index, budget,
        uniform_N[index],
    )
    carry, of_chunk = pop(index, tuple(carry), draw)
    report = jax.tree.map(
        lambda x_N, x: x_N.at[index].set(x), report, of_chunk
    )
    return *carry, budget - of_chunk.probability, report

  report = estimators.nothing_drawn(carry[1], chunks.count)
  budget = jnp.minimum(spec.sampling.chunks, used).astype(report.size.dtype)
  *carry, _, report = lax.fori_loop(0, used, visit, (*carry, budget, report))
  return carry, report


def _count(spec, params, state, group):
  """Counts how often each expert is chosen in a group's sequences, by stack.

  It runs all branches forward. The experts of the prefix are in the state, and
  count once for each branch whose tail is not empty.
  """
  beneath = _beneath(spec, state)

  def count(counts, run):
    return steps.count(spec, params, counts, beneath, run), None

  counts, _ = _over_branches(
      spec, count, balance.zeros(spec.config), group
  )
  if not spec.whole:
    layout = spec.layout
    real_P = layout.positions(0, state.capacity) < state.length
    counts = balance.add(
        counts, state.choices,
        balance.answered(group.tail_lengths) * real_P[None],
    )
  return spec.layout.sum(counts)


def _beneath(spec, state):
  """The state that branches are visited on; in "full" an empty one."""
  if spec.whole:
    return state_lib.empty(spec.config, 0, devices=spec.layout.devices)
  return state


def _over_branches(spec, step, carry, group, args=None, kept=(None, None)):
  """Calls a step on the branches of a group, a few at a time.

  Args:
    spec: its schedule says how many branches make a visit.
    step: (carry, run) -> (carry, results), or, if there are args,
      (carry, run, args, kept) -> (carry, results).
    carry: pytree handed from one visit to the next.
    group: the group.
    args: tuple of pytrees with leading axis G, or None.
    kept: activations of the equal visits, and of the last, smaller one.

  Returns:
    The carry, and (results of the equal visits with a leading axis, results of
    the smaller one or None).
  """
  run = runs.branches(spec, group)
  at_once = spec.at_once(group.tails.shape[0])
  equal, last = _split((run.rows, args), at_once)

  def one(carry, inputs):
    (rows, args), kept = inputs
    if args is None:
      return step(carry, run.of_rows(rows))
    return step(carry, run.of_rows(rows), args, kept)

  carry, results = lax.scan(one, carry, (equal, kept[0]))
  if last is None:
    return carry, (results, None)
  carry, of_last = one(carry, (last, kept[1]))
  return carry, (results, of_last)


def _split(tree, at_once: int):
  """Cuts G rows into equal visits [visits, at_once, ...] and a smaller last.

  The last is None if no rows are left for it.
  """
  leaves = jax.tree.leaves(tree)
  visits, left = divmod(leaves[0].shape[0], at_once)
  cut = visits * at_once
  equal = jax.tree.map(
      lambda x: x[:cut].reshape(visits, at_once, *x.shape[1:]), tree
  )
  return equal, jax.tree.map(lambda x: x[cut:], tree) if left else None


def _join(equal, last):
  """Undoes `_split` on results with leading axes [visits, at_once]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), equal)
  if last is None:
    return flat
  return jax.tree.map(lambda *x: jnp.concatenate(x), flat, last)

