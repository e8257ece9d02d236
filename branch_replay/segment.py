# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One concept: a segment of tokens run on top of a prefix state.

`forward` runs a segment through all layers, `backward` is its hand-written
pullback. Layers are an explicit scan over stacked parameters: the backward
scan reads [layer, tile] slices of the state and adds to [layer, tile] slices
of the accumulator in place. `jax.vjp` through the scan would instead make a
fresh cotangent of the size of the state for every segment.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import layout as layout_lib
from jax.experimental.layout import with_layout_constraint
import jax.numpy as jnp

from branch_replay import adapters
from branch_replay import config as config_lib
from branch_replay.layout import Layout
from branch_replay.models import layers
from branch_replay.ops import attention


class Kept(NamedTuple):
  """Inputs of a layer's stages: all that its backward pass reads.

  With the stage inputs at hand no matrix product is computed twice. With
  `x_GTM` alone (`stages` None) the layer is run again.
  """

  x_GTM: jax.Array
  stages: Any = None  # _Stages


class _Stages(NamedTuple):
  projected: tuple[jax.Array, jax.Array, jax.Array]
  out_KGRTD: jax.Array
  lse_KGRT: jax.Array
  h_GTM: jax.Array
  expanded: tuple[jax.Array, jax.Array]


class Context(NamedTuple):
  """What a segment continues from, and where it stands.

  Attributes:
    prefix: pair (k_LKPD, v_LKPD), the positions that are on this device.
    prefix_length: i32[], how many of them the segment may see.
    positions_GT: i32, absolute positions of this device's tokens.
    lengths_G: i32, real tokens of each row on all devices, or None for all.
  """

  prefix: tuple[jax.Array, jax.Array]
  prefix_length: jax.Array
  positions_GT: jax.Array
  lengths_G: jax.Array | None = None


def _stage(config, kind, params, name):
  """stage(params, *inputs) and its parameters."""
  module = kind(config)
  return (
      lambda p, *inputs: module.apply({"params": p}, *inputs),
      params.get(name, {}),  # `rotate` owns none without q/k norm
  )


def layer_forward(config, params, x_GTM, positions_GT, attend):
  """One layer around a caller's attention.

  Args:
    config: geometry.
    params: of the layer.
    x_GTM: its input.
    positions_GT: i32 absolute positions.
    attend: (q_KGRTD, k_KGTD, v_KGTD) -> (out_KGRTD, anything).

  Returns:
    y_GTM, the "anything", and what the stages after the first read: the
    projections, the attention's output, h_GTM, and gate and up.
  """
  def run(kind, name, *inputs):
    stage, stage_params = _stage(config, kind, params, name)
    return stage(stage_params, *inputs)

  projected = run(layers.Project, "project", x_GTM)
  out, extra = attend(*run(layers.Rotate, "rotate", *projected, positions_GT))
  h_GTM = run(layers.Join, "join", x_GTM, out)
  expanded = run(layers.Expand, "expand", h_GTM)
  y_GTM = run(layers.Contract, "contract", h_GTM, *expanded)
  return y_GTM, extra, (projected, out, h_GTM, expanded)


def _replay_layer(config, layout, params, x_GTM, layer, context: Context):
  """(y_GTM, (k, v), stages) of one layer on top of a prefix.

  Queries travel, keys stay: every device attends with the queries of all to
  the keys it has, and gets its own queries' outputs back.
  """
  def attend(q, k, v):
    out, lse = layout.merge(*attention.forward(
        layout.all(q, 3), k, v, context.prefix, layer, context.prefix_length,
        context.lengths_G, stripe=layout.stripe(),
    ))
    return out.astype(q.dtype), (lse, k, v)

  y_GTM, (lse, k, v), (projected, out, h_GTM, expanded) = layer_forward(
      config, params, x_GTM, context.positions_GT, attend
  )
  return y_GTM, (k, v), _Stages(projected, out, lse, h_GTM, expanded)


def _layer_backward(
    config, layout, params, kept: Kept, dy_GTM, layer, context, accumulator,
    present_at, present_scale,
):
  """(dx_GTM, layer gradients, accumulator) of one layer; see `backward`."""
  x_GTM, stages = kept
  if stages is None:
    _, _, stages = _replay_layer(
        config, layout, params, x_GTM, layer, context
    )
  projected, out, lse, h_GTM, expanded = stages
  grads = {}

  def pull(kind, name, inputs, cotangent):
    stage, stage_params = _stage(config, kind, params, name)
    _, pullback = jax.vjp(stage, stage_params, *inputs)
    d_params, *d_inputs = pullback(cotangent)
    if stage_params:
      grads[name] = d_params
    return d_inputs

  dh_GTM, *d_expanded = pull(
      layers.Contract, "contract", (h_GTM, *expanded), dy_GTM
  )
  (dh_expand,) = pull(layers.Expand, "expand", (h_GTM,), tuple(d_expanded))
  dx_GTM, d_out = pull(
      layers.Join, "join", (x_GTM, out), dh_GTM + dh_expand
  )

  rotate, rotate_params = _stage(config, layers.Rotate, params, "rotate")
  (q, k, v), pull_rotate = jax.vjp(
      lambda p, *raw: rotate(p, *raw, context.positions_GT),
      rotate_params, *projected,
  )
  delta = attention.row_delta(d_out, out)
  dq, dk, dv, accumulator = attention.backward_rows(
      layout.all(d_out, 3), layout.all(q, 3), k, v, layout.all(lse, 3),
      layout.all(delta, 3), context.prefix, layer, context.prefix_length,
      accumulator=accumulator, stripe=layout.stripe(),
  )
  dq = layout.sum_mine(dq, 3).astype(q.dtype)
  if present_at is not None:
    # The op added to earlier positions only, so this may be read after it;
    # read before, XLA would keep a second copy of the whole accumulator.
    tokens = dy_GTM.shape[1]
    dk += present_scale * _present(accumulator[0], layer, present_at, tokens)
    dv += present_scale * _present(accumulator[1], layer, present_at, tokens)
  d_rotate, *d_projected = pull_rotate(
      (dq, dk.astype(k.dtype), dv.astype(v.dtype))
  )
  if rotate_params:
    grads["rotate"] = d_rotate
  (dx_project,) = pull(
      layers.Project, "project", (x_GTM,), tuple(d_projected)
  )
  return dx_GTM + dx_project, grads, accumulator


def _present(x_LKPD, layer, start, tokens):
  """What stands at a segment of one row: [K, G=1, C, D]."""
  x_KPD = lax.dynamic_index_in_dim(x_LKPD, layer, 0, keepdims=False)
  x_KCD = lax.dynamic_slice_in_dim(x_KPD, start, tokens, axis=1)
  # What follows would rather have positions innermost; unpinned, XLA for TPU
  # keeps a transposed copy of the whole accumulator to read this from.
  x_KCD = with_layout_constraint(x_KCD, layout_lib.Layout((0, 1, 2)))
  return lax.optimization_barrier(x_KCD)[:, None]


def forward(
    config: config_lib.ModelConfig,
    layer_params,
    x_GTM,
    context: Context,
    *,
    layout: Layout,
    keep: str | None,
    present: bool = False,
):
  """Runs a segment through all layers.

  Args:
    config: geometry.
    layer_params: the tree under "layers", leading axis L.
    x_GTM: embedded tokens.
    context: the state it continues from.
    layout: where parameters live.
    keep: "stages" to keep the inputs of all stages for `backward`, "inputs"
      to keep those of whole layers (it then runs each layer again), None for
      nothing.
    present: whether to return the segment's own keys and values.

  Returns:
    y_GTM before the final norm, the present (pair of [L, K, G, T, D]) or None,
    and `Kept` with a leading L axis or None.
  """
  def step(x_GTM, inputs):
    layer, params = inputs
    y_GTM, new, stages = _replay_layer(
        config, layout, layout.gather("layers", params), x_GTM, layer, context
    )
    kept = {
        None: None, "inputs": Kept(x_GTM), "stages": Kept(x_GTM, stages),
    }[keep]
    return y_GTM, (new if present else None, kept)

  numbered = jnp.arange(config.num_layers), layer_params
  y_GTM, (present_LKGTD, kept) = lax.scan(step, x_GTM, numbered)
  return y_GTM, present_LKGTD, kept


def backward(
    config: config_lib.ModelConfig,
    layer_params,
    layer_grads,
    kept: Kept,
    dy_GTM,
    context: Context,
    *,
    layout: Layout,
    accumulator=None,
    present_at=None,
    present_scale=1.0,
):
  """Pulls a cotangent back through all layers.

  Args:
    config: geometry.
    layer_params: as in `forward`.
    layer_grads: like `layer_params`, or the part of them that is trained, at
      least float32; added to in place.
    kept: what `forward` kept.
    dy_GTM: cotangent of its result.
    context: as in `forward`.
    layout: where parameters live.
    accumulator: pair like the prefix that its cotangent is added to in place;
      None to stop at the prefix.
    present_at: for a chunk of the prefix, where it starts in the accumulator:
      its own accumulated cotangent is read there and pulled back too.
    present_scale: factor on that cotangent.

  Returns:
    dx_GTM, the updated layer_grads, and the updated accumulator.
  """
  def step(carry, inputs):
    dy_GTM, layer_grads, accumulator = carry
    layer, params, kept = inputs
    dx_GTM, grads, accumulator = _layer_backward(
        config, layout, widened(layout.gather("layers", params), layer_grads),
        kept, dy_GTM, layer, context, accumulator, present_at, present_scale,
    )
    grads = adapters.pick(grads, layer_grads)
    layer_grads = jax.tree.map(
        lambda total, new: total.at[layer].add(new.astype(total.dtype)),
        layer_grads,
        layout.reduce("layers", grads),
    )
    return (dx_GTM, layer_grads, accumulator), None

  numbered = jnp.arange(config.num_layers), layer_params, kept
  carry, _ = lax.scan(
      step, (dy_GTM, layer_grads, accumulator), numbered, reverse=True
  )
  return carry


def embed(config: config_lib.ModelConfig, params, tokens_GT, layout: Layout):
  """Embedded tokens, [G, T, M] in the compute dtype."""
  table_VM = params["embed"]["table"]
  return layout.look_up(table_VM, tokens_GT, config.compute_dtype)


def embed_backward(grads, tokens_GT, dx_GTM, layout: Layout):
  """Adds the cotangent of embedded tokens to their rows, if it is wanted."""
  if "embed" not in grads:
    return grads
  table = layout.add_rows(grads["embed"]["table"], tokens_GT, dx_GTM)
  return grads | {"embed": grads["embed"] | {"table": table}}


def widened(params, trained):
  """Trained parameters in at least float32, so that their cotangents are."""
  if not isinstance(params, dict):
    return params.astype(config_lib.at_least_float32(params.dtype))
  return params | {
      name: widened(params[name], child) for name, child in trained.items()
  }


def outer(params):
  """Parameters outside the layers: embedding, final norm, head, extras."""
  return {name: tree for name, tree in params.items() if name != "layers"}
