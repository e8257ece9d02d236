# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a segment of tokens on top of a prefix state, and pulls it back.

`forward` runs a segment through all layers; `backward` is its hand-written
pullback. Layers are an explicit scan over stacked parameters: the backward
scan reads [layer, tile] slices of the state and adds to [layer, tile] slices
of the accumulator in place. `jax.vjp` through the scan would instead make a
fresh cotangent of the size of the state for every segment.
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.devices import host_memory
from branch_replay.devices.layout import Layout
from branch_replay.mixers import kinds
from branch_replay.mixers import mixer as mixer_lib
from branch_replay.mixers import sizes
from branch_replay.models import adapters
from branch_replay.models import block
from branch_replay.models import pattern
from branch_replay.ops import experts as experts_lib


class Kept(NamedTuple):
  """Activations of one layer that its backward pass reads.

  Attributes:
    x_GTM: the layer's input.
    choices_Nk: the experts that each token chose; None without experts.
    stages: the inputs of the layer's later stages, with which no matrix product
      is computed twice. None to run the layer again with the same experts.
    attended: outputs of attention to use when it is run again, or None.
  """

  x_GTM: jax.Array
  choices_Nk: jax.Array | None
  stages: Any = None  # _Stages
  attended: Any = None


class _Stages(NamedTuple):
  projected: tuple[jax.Array, ...]
  out: jax.Array
  of_mixer: Any
  h_GTM: jax.Array
  expanded: tuple[jax.Array, ...]


class Present(NamedTuple):
  """What a segment leaves behind for later tokens, by stack.

  Attributes:
    mixer: what the mixer's `forward` returned; for attention the segment's keys
      and values, each [L, K, G, T, D].
    choices: the experts each token chose, i32[L, 1, G, T, k]; empty in stacks
      without experts.
    attended: outputs of attention, arrays [L, K, G, T, D]; empty unless they
      are kept.
  """

  mixer: Any
  choices: Any
  attended: Any


class Balance(NamedTuple):
  """The load-balance term's cotangent of router probabilities, see `balance`.

  The cotangent of a token's E probabilities is its weight times the seeds.

  Attributes:
    seeds: [L, E] by stack.
    weights_GT: the weight of each of this device's tokens.
  """

  seeds: Any
  weights_GT: jax.Array


class Reach(NamedTuple):
  """How far attention sends cotangents back, in "banded"; see `band.Band`.

  Attributes:
    lowest_GT: i32, for the tokens of all devices the lowest position that each
      reaches apart from the sinks.
    sinks: how many of the first positions all tokens reach.
  """

  lowest_GT: jax.Array
  sinks: int


class Context(NamedTuple):
  """The state a segment runs on top of, and where its tokens stand.

  Attributes:
    prefix: the part of the mixer state that it reads, see `state.seen`.
    prefix_length: i32[], how many of the prefix's positions on this device the
      segment may see.
    positions_GT: i32, absolute positions of this device's tokens.
    lengths_G: i32, real tokens of each row, counted over all devices; None if
      all are real.
    choices: the experts to use when one row is run again, [L, 1, T, k] by
      stack; None lets the router choose.
    attended: outputs of attention to use when one row is run again, arrays
      [L, K, T, D] by stack; None attends to the prefix.
    balance: cotangents of a load-balance term for the backward pass; None
      without such a term.
    blocks: `tiling.Blocks`, if tokens see later ones of their block; or None.
    reach: how far full attention sends cotangents back; None for all the way.
  """

  prefix: Any
  prefix_length: jax.Array
  positions_GT: jax.Array
  lengths_G: jax.Array | None = None
  choices: Any = None
  attended: Any = None
  balance: Balance | None = None
  blocks: Any = None
  reach: Reach | None = None


class Popped(NamedTuple):
  """Says that a segment is a chunk of the prefix that is being popped.

  Attributes:
    chunk: where it stands in the state.
    scale: factor on the accumulated cotangent of what it left behind; 1/q in
      "sampled", for a chunk that is drawn with probability q.
  """

  chunk: sizes.Chunk
  scale: jax.Array | float = 1.0


def _stage(module, params, name, choices_Nk=None):
  """Makes a module's pure function (params, *inputs), and finds its params."""
  chosen = () if choices_Nk is None else (choices_Nk,)
  return (
      lambda p, x, *rest: module.apply({"params": p}, x, *chosen, *rest),
      params.get(name, {}),  # `rotate` owns none without q/k norm
  )


def layer_forward(config, kind, params, x_GTM, mix, choices_Nk=None):
  """Runs one layer: project, `mix`, join, feed-forward.

  Args:
    config: geometry of the model.
    kind: the kind of the layer.
    params: the layer's parameters.
    x_GTM: the layer's input.
    mix: (mixer parameters, projections) -> (mixer output, anything).
    choices_Nk: the experts to use for each token; None lets the router choose.

  Returns:
    y_GTM, the "anything", and the inputs of the stages after the first: the
    projections, the mixer's output, h_GTM (the residual stream before the
    feed-forward), the experts chosen or None, and the hidden activations of
    the feed-forward (gate and up).
  """
  def run(module, name, *inputs, choices_Nk=None):
    stage, stage_params = _stage(module, params, name, choices_Nk)
    return stage(stage_params, *inputs)

  mixer = kinds.of(config, kind)
  projected = run(mixer.project(), "project", x_GTM)
  mixed, joined = projected[: mixer.takes], projected[mixer.takes :]
  out, extra = mix(params.get(mixer.stage, {}), mixed)
  h_GTM = run(mixer.join(), "join", x_GTM, out, *joined)
  expand, contract = (stage(config) for stage in block.feed_forward(params))
  if choices_Nk is None:
    choices_Nk = block.choose(config, params, h_GTM)
  expanded = run(expand, "expand", h_GTM, choices_Nk=choices_Nk)
  y_GTM = run(contract, "contract", h_GTM, *expanded, choices_Nk=choices_Nk)
  return y_GTM, extra, (projected, out, h_GTM, choices_Nk, expanded)


def _replay_layer(
    config, kind, layout, params, x_GTM, choices_Nk, layer, context, prefix,
    attended=None,
):
  """Runs one layer on a prefix: (y_GTM, present, choices_Nk, stages).

  With the outputs of attention given, there is no `present`.
  """
  def mix(params, mixed):
    if attended:
      out, of_mixer = kinds.of(config, kind).given(attended)
      return out, (None, of_mixer)
    at = mixer_lib.OnPrefix(layout, layer, context, prefix)
    out, present, of_mixer = kinds.of(config, kind).forward(at, params, mixed)
    return out, (present, of_mixer)

  y_GTM, (present, of_mixer), stages = layer_forward(
      config, kind, params, x_GTM, mix, choices_Nk
  )
  projected, out, h_GTM, choices_Nk, expanded = stages
  stages = _Stages(projected, out, of_mixer, h_GTM, expanded)
  return y_GTM, present, choices_Nk, stages


def _layer_backward(
    config, kind, layout, params, kept: Kept, dy_GTM, layer, context, prefix,
    accumulator, popped, seed_E,
):
  """Pulls back one layer: (dx_GTM, its gradients, accumulator)."""
  x_GTM, choices_Nk, stages, attended = kept
  if stages is None:
    *_, stages = _replay_layer(
        config, kind, layout, params, x_GTM, choices_Nk, layer, context, prefix,
        attended,
    )
  projected, out, of_mixer, h_GTM, expanded = stages
  grads = {}

  def pull(module, name, inputs, cotangent, choices_Nk=None):
    stage, stage_params = _stage(module, params, name, choices_Nk)
    _, pullback = jax.vjp(stage, stage_params, *inputs)
    d_params, *d_inputs = pullback(cotangent)
    if stage_params:
      grads[name] = d_params
    return d_inputs

  mixer = kinds.of(config, kind)
  mixed, joined = projected[: mixer.takes], projected[mixer.takes :]
  expand, contract = (stage(config) for stage in block.feed_forward(params))
  dh_GTM, *d_expanded = pull(
      contract, "contract", (h_GTM, *expanded), dy_GTM, choices_Nk
  )
  if seed_E is not None:  # the router's logits come first
    dp_NE = context.balance.weights_GT.reshape(-1, 1) * seed_E[None]
    d_expanded[0] += experts_lib.pull_probabilities(
        config.experts, expanded[0], dp_NE
    )
  (dh_expand,) = pull(
      expand, "expand", (h_GTM,), tuple(d_expanded), choices_Nk
  )
  dx_GTM, d_out, *d_joined = pull(
      mixer.join(), "join", (x_GTM, out, *joined), dh_GTM + dh_expand
  )
  d_mixed, d_params, accumulator = mixer.backward(
      mixer_lib.OnPrefix(layout, layer, context, prefix),
      params.get(mixer.stage, {}), mixer_lib.Record(mixed, out, of_mixer),
      d_out, accumulator, popped,
  )
  if d_params:
    grads[mixer.stage] = d_params
  (dx_project,) = pull(
      mixer.project(), "project", (x_GTM,), (*d_mixed, *d_joined)
  )
  return dx_GTM + dx_project, grads, accumulator


def forward(
    config: config_lib.ModelConfig,
    layer_params,
    x_GTM,
    context: Context,
    *,
    layout: Layout,
    keep: str | None,
    present: bool = False,
    keep_attention: bool = False,
):
  """Runs a segment through all layers.

  Args:
    config: geometry of the model.
    layer_params: the parameters under "layers".
    x_GTM: this device's embedded tokens.
    context: the state the segment runs on, and where it stands.
    layout: on which devices parameters and tokens are.
    keep: what to store for `backward`: "stages" the inputs of every stage;
      "inputs" those of whole layers, which `backward` then runs again; None
      nothing.
    present: whether to return what the segment leaves behind.
    keep_attention: whether that includes the outputs of attention.

  Returns:
    y_GTM before the final norm; the `Present`, or None; and the `Kept` of each
    stack, or None.
  """
  def layer(x_GTM, part, place, index, params, chosen, attended, prefix):
    params = layout.gather(part.path(place), params)
    given = context.choices is not None and part.experts
    choices_Nk = chosen.reshape(-1, chosen.shape[-1]) if given else None
    prefix, at = host_memory.fetch(prefix, index)
    y_GTM, new, choices_Nk, stages = _replay_layer(
        config, part.kinds[place], layout, params, x_GTM, choices_Nk, at,
        context, prefix, attended,
    )
    kept = {
        None: None,
        "inputs": Kept(x_GTM, choices_Nk, attended=attended or None),
        "stages": Kept(x_GTM, choices_Nk, stages),
    }[keep]
    left = None
    if present:
      chosen = {}
      if part.experts:
        chosen = choices_Nk.reshape(1, *x_GTM.shape[:2], -1)
      outputs, mixer = (), kinds.of(config, part.kinds[place])
      if keep_attention and mixer.attends:
        outputs = mixer.attended(stages.out, stages.of_mixer)
      left = Present(new, chosen, outputs if keep_attention else {})
    return y_GTM, (left, kept)

  lefts, kepts = [], []
  for part, stacks, chosen, attended, prefixes in zip(
      pattern.parts(config), pattern.split(config, layer_params),
      *(pattern.split(config, {} if tree is None else tree)
        for tree in (context.choices, context.attended)),
      pattern.split(config, context.prefix), strict=True,
  ):
    def turn(x_GTM, inputs, part=part, prefixes=prefixes):
      index, *inputs = inputs
      found = []
      for place, of_place in enumerate(zip(*inputs, prefixes, strict=True)):
        x_GTM, of_layer = layer(x_GTM, part, place, index, *of_place)
        found.append(of_layer)
      return x_GTM, found

    inputs = jnp.arange(part.count), stacks, chosen, attended
    x_GTM, found = lax.scan(turn, x_GTM, inputs)
    lefts.append([left for left, _ in found])
    kepts.append([kept for _, kept in found])
  left = None
  if present:
    left = Present(*(
        pattern.join(config, [[getattr(x, of) for x in part] for part in lefts])
        for of in Present._fields
    ))
  return x_GTM, left, pattern.join(config, kepts) if keep else None


def backward(
    config: config_lib.ModelConfig,
    layer_params,
    layer_grads,
    kept,
    dy_GTM,
    context: Context,
    *,
    layout: Layout,
    accumulator=None,
    popped: Popped | None = None,
):
  """Pulls a cotangent back through all layers.

  Args:
    config: geometry of the model.
    layer_params: as in `forward`.
    layer_grads: gradients so far, like the part of `layer_params` that is
      trained, at least float32; added to in place.
    kept: what `forward` kept.
    dy_GTM: cotangent of y_GTM.
    context: as in `forward`.
    layout: as in `forward`.
    accumulator: cotangent so far of the context's prefix; added to in place.
      None treats the prefix as constant.
    popped: for a chunk of the prefix that is popped: what has accumulated for
      the chunk's own positions is pulled back too. None for other segments.

  Returns:
    dx_GTM, the updated layer_grads, and the updated accumulator.
  """
  def layer(carry, part, place, index, params, kept, prefix, seeds):
    dy_GTM, layer_grads, accumulator = carry
    path = part.path(place)
    seeded = context.balance is not None and part.experts
    prefix, at = host_memory.fetch(prefix, index)
    fetched, _ = host_memory.fetch(accumulator, index)
    dx_GTM, grads, fetched = _layer_backward(
        config, part.kinds[place], layout,
        widened(layout.gather(path, params), layer_grads), kept, dy_GTM, at,
        context, prefix, fetched, popped, seeds[index] if seeded else None,
    )
    accumulator = host_memory.put_back(accumulator, index, fetched)
    grads = adapters.pick(grads, layer_grads)
    layer_grads = jax.tree.map(
        lambda total, new: total.at[index].add(new.astype(total.dtype)),
        layer_grads,
        layout.reduce(path, grads),
    )
    return dx_GTM, layer_grads, accumulator

  trees = [
      pattern.split(config, tree)
      for tree in (
          layer_params, kept, context.prefix,
          {} if context.balance is None else context.balance.seeds, layer_grads,
      )
  ]
  accumulators = [[None] * len(part) for part in trees[0]]
  if accumulator is not None:
    accumulators = pattern.split(config, accumulator)
  all_grads, all_accumulators = [], []
  for part, stacks, kepts, prefixes, seeds, grads, accumulated in reversed(
      list(zip(pattern.parts(config), *trees, accumulators, strict=True))
  ):
    def turn(carry, inputs, part=part, prefixes=prefixes, seeds=seeds):
      dy_GTM, grads, accumulated = carry
      index, stacks, kepts = inputs
      grads, accumulated = list(grads), list(accumulated)
      for place in reversed(range(len(part.kinds))):
        dy_GTM, grads[place], accumulated[place] = layer(
            (dy_GTM, grads[place], accumulated[place]), part, place, index,
            stacks[place], kepts[place], prefixes[place], seeds[place],
        )
      return (dy_GTM, grads, accumulated), None

    (dy_GTM, grads, accumulated), _ = lax.scan(
        turn, (dy_GTM, grads, accumulated),
        (jnp.arange(part.count), stacks, kepts), reverse=True,
    )
    all_grads.insert(0, grads)
    all_accumulators.insert(0, accumulated)
  if accumulator is not None:
    accumulator = pattern.join(config, all_accumulators)
  return dy_GTM, pattern.join(config, all_grads), accumulator


def embed(config: config_lib.ModelConfig, params, tokens_GT, layout: Layout):
  """Looks up tokens in the embedding table: [G, T, M] in the compute dtype.

  Args:
    config: geometry of the model.
    params: all parameters, or those outside the layers.
    tokens_GT: i32 ids of this device's tokens.
    layout: on which devices the table is.
  """
  table_VM = params["embed"]["table"]
  x_GTM = layout.look_up(table_VM, tokens_GT, config.compute_dtype)
  return x_GTM * config.embedding_scale


def embed_backward(
    config: config_lib.ModelConfig, grads, tokens_GT, dx_GTM, layout: Layout
):
  """Pulls the cotangent of `embed` back to the embedding table.

  Args:
    config: geometry of the model.
    grads: gradients so far.
    tokens_GT: the ids that were looked up.
    dx_GTM: cotangent of what `embed` returned.
    layout: as in `embed`.

  Returns:
    The gradients, that of the table updated; unchanged if "embed" is not among
    them, because the table is not trained.
  """
  if "embed" not in grads:
    return grads
  dx_GTM = dx_GTM * config.embedding_scale
  table = layout.add_rows(grads["embed"]["table"], tokens_GT, dx_GTM)
  return grads | {"embed": grads["embed"] | {"table": table}}


def widened(params, trained):
  """Casts the parameters in `trained` to at least float32.

  Their cotangents are then at least float32 too.
  """
  if not isinstance(params, dict):
    return params.astype(config_lib.at_least_float32(params.dtype))
  return params | {
      name: widened(params[name], child) for name, child in trained.items()
  }


def outer(params):
  """Parameters outside the layers: embedding, final norm, head, and others."""
  return {name: tree for name, tree in params.items() if name != "layers"}
