# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows: segments with autodiff, run side by side on top of one state.

Forward through the layers, readout of a window of every row, and back. How rows
are cut into visits of a few at a time is here too.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import adapters
from branch_replay import readout as readout_lib
from branch_replay import segment


class Rows(NamedTuple):
  """Rows to run with autodiff, leading axis G.

  A tail runs on its own inputs; in `full` a row is the whole sequence. The T
  targets belong to the row's positions from a window on, which starts at 0 for
  a tail and at the boundary token for a whole sequence.
  """

  tokens_GS: jax.Array
  targets_GT: jax.Array
  lengths_G: jax.Array


def segment_keep(policy: str | None) -> str | None:
  """What a segment with autodiff keeps between its forward and backward."""
  if policy is None:
    return None
  return "inputs" if policy == "recompute_layers" else "stages"


def pad_tokens(task, x_GT):
  """Padding that deals the tokens evenly to the devices."""
  return jnp.pad(x_GT, ((0, 0), (0, -x_GT.shape[1] % task.layout.devices)))


def run(task, params, rows: Rows, context, policy):
  """Output of the last layer, and what was kept of the layers."""
  tokens = task.layout.mine(rows.tokens_GS, 1)
  y_GSM, _, stages = segment.forward(
      task.config, params["layers"],
      segment.embed(task.config, params, tokens, task.layout), context,
      layout=task.layout, keep=segment_keep(policy),
  )
  return y_GSM, stages


def visit(
    task, params, outer, grads, accumulator, rows: Rows, window, context,
    cotangent, args=(), kept=None, popped=None,
):
  """Forward and backward of some rows.

  Args:
    task: `engine.Task`: model, readout and schedule.
    params: parameters.
    outer: those outside the layers, as `task.outer` gives them.
    grads: like `task.trained(params)`, at least float32; added to.
    accumulator: cotangent of the state, added to; None to stop at the state.
    rows: what to run.
    window: where the targets of every row start.
    context: what the rows continue from.
    cotangent: (outputs, *args) -> (cotangent of the outputs, anything).
    args: handed to `cotangent`.
    kept: what `run` returned for these rows; None runs them here.
    popped: `segment.Popped` if the one row is also part of a state, whose
      accumulated cotangent is pulled back with it.

  Returns:
    grads, accumulator, the outputs [G, T, ...], and "anything".
  """
  if kept is None:
    kept = run(task, params, rows, context, task.schedule.activations)
  y_GSM, stages = kept
  outputs, pull = read(task, outer, y_GSM, rows, window, segment.outer(grads))
  d_outputs, extra = cotangent(outputs, *args)
  d_outer, dy_GSM = pull(d_outputs)
  d_outer = adapters.pick(
      task.layout.reduce("", d_outer), segment.outer(grads)
  )
  dx_GSM, layer_grads, accumulator = segment.backward(
      task.config, params["layers"], grads["layers"], stages, dy_GSM,
      context, layout=task.layout, accumulator=accumulator, popped=popped,
  )
  grads = {"layers": layer_grads} | jax.tree.map(
      lambda total, new: total + new.astype(total.dtype),
      segment.outer(grads), d_outer,
  )
  tokens = task.layout.mine(rows.tokens_GS, 1)
  grads = segment.embed_backward(
      task.config, grads, tokens, dx_GSM, task.layout
  )
  return grads, accumulator, outputs, extra


def read(task, outer, y_GSM, rows: Rows, window, trained):
  """The readout of the rows' windows, 0 where a tail is padding.

  Returns:
    The outputs [G, T, ...] of all devices' tokens, and their pullback to
    cotangents of `outer` and `y_GSM`. Collectives stand outside of what is
    differentiated.
  """
  layout, tokens = task.layout, rows.targets_GT.shape[1]
  targets_GT = pad_tokens(task, rows.targets_GT)
  whole = task.prefix_gradient == "full"
  y_GTM = y_GSM
  if whole:
    y_GTM = layout.all(y_GSM, 1)
    room = window, targets_GT.shape[1]
    y_GTM = jnp.pad(y_GTM, ((0, 0), (0, layout.devices - 1), (0, 0)))
    padded = y_GTM.shape
    y_GTM = layout.mine(lax.dynamic_slice_in_dim(y_GTM, *room, axis=1), 1)
  outputs, pull = jax.vjp(
      lambda outer, y: readout_lib.chunked(
          task.readout, task.model, outer, y, layout.mine(targets_GT, 1),
          tokens=task.schedule.readout_tokens, layout=layout,
      ),
      segment.widened(outer, trained), y_GTM,
  )
  real_GT = jnp.arange(tokens)[None] < rows.lengths_G[:, None]

  def mask(x):
    real = real_GT.reshape(*real_GT.shape, *(1,) * (x.ndim - 2))
    return jnp.where(real, x, jnp.zeros((), x.dtype))

  def pullback(d_outputs):
    d_outer, dy_GTM = pull(jax.tree.map(
        lambda x: layout.mine(_pad_axis(mask(x), targets_GT.shape[1]), 1),
        d_outputs,
    ))
    if not whole:
      return d_outer, dy_GTM
    dy_GSM = lax.dynamic_update_slice_in_dim(
        jnp.zeros(padded, dy_GTM.dtype), layout.all(dy_GTM, 1), window, axis=1
    )
    sequence = y_GSM.shape[1] * layout.devices
    return d_outer, layout.mine(dy_GSM[:, :sequence], 1)

  outputs = jax.tree.map(
      lambda x: mask(layout.all(x, 1)[:, :tokens]), outputs
  )
  return outputs, pullback


def _pad_axis(x, tokens: int):
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, tokens - x.shape[1])
  return jnp.pad(x, widths)


def split(tree, at_once: int):
  """(whole, rest): G rows as visits of `at_once`, and one of what is left."""
  leaves = jax.tree.leaves(tree)
  whole, left = divmod(leaves[0].shape[0], at_once)
  cut = whole * at_once
  visits = jax.tree.map(
      lambda x: x[:cut].reshape(whole, at_once, *x.shape[1:]), tree
  )
  return visits, jax.tree.map(lambda x: x[cut:], tree) if left else None


def scan_parts(step, carry, parts):
  """`step` over the whole visits and the smaller last one of `split`."""
  whole, rest = parts
  carry, results = lax.scan(step, carry, whole)
  if rest is None:
    return carry, (results, None)
  carry, last = step(carry, rest)
  return carry, (results, last)


def join(whole, rest):
  """Undoes `split` on results with leading axes [visits, at_once]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), whole)
  if rest is None:
    return flat
  return jax.tree.map(lambda *x: jnp.concatenate(x), flat, rest)
