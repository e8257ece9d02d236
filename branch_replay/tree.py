# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees of branches as differentiable functions: replay, log_probs, a gradient.

  tree = br.Tree.from_sequences(sequences, config=model.config)
  log_probs_GS = tree_lib.log_probs(model, params, tree)

Every token that sequences share is run once, whatever the depth of the tree. A
tree of one level is a group and is run as one, by `prefix_replay`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay import engine
from branch_replay import group as group_lib
from branch_replay import params as params_lib
from branch_replay import prefix_replay
from branch_replay import readout as readout_lib
from branch_replay import token_tree
from branch_replay import tree_order
from branch_replay import tree_passes
from branch_replay.chunk_sampling import Sampling
from branch_replay.models import decoder
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.schedule import Schedule


def replay(
    model: decoder.Decoder,
    params,
    tree: token_tree.Tree,
    *,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    sampling: Sampling = Sampling(),
    key=None,
    schedule: Schedule = Schedule(),
):
  """What a readout reads at every token with loss, differentiable in `params`.

  The gradient runs the tree forward a second time: `value_and_grad`, where the
  loss allows it, does not.

  Args:
    model: the decoder.
    params: its parameters; the only differentiable argument.
    tree: the tree.
    readout: see `branch_replay.readout`; what it reads of a token comes from
      the hidden state before it.
    prefix_gradient: "exact" equals the full gradient. In "stop" each segment
      holds constant what its ancestors left behind, all but the token it starts
      on: inner segments with loss have the gradient of their own, and nothing
      of their children's. (On n devices a segment starts up to n − 1 tokens
      earlier, and so does what it does not hold constant.) "full" runs every
      sequence on its own. "sampled" estimates "exact" without bias: runs of
      inner segments with loss are always pulled back, of the others those that
      are drawn.
    sampling: of "sampled": how many runs without loss are pulled back, by
      which law. An inner segment has one run for every chunk.
    key: of "sampled": a PRNG key; the same key draws the same runs.
    schedule: sizes and policies, which do not change the result.

  Returns:
    The readout's pytree, each leaf [N, ...], in the order of `tree.tokens`, and
    0 where a token carries no loss. `tree.by_leaf` is what each leaf sees of
    it.

  Raises:
    ValueError: a tree that is not one, or is not the model's; no token with
      loss; an unknown mode; "sampled" without a key.
  """
  params_lib.check(model, params)
  token_tree.check(tree, model.config)
  if tree.is_group:
    group, places_GT = _as_group(tree, model.config)
    outputs = prefix_replay.replay(
        model, params, group, readout=readout, schedule=schedule,
        prefix_gradient=prefix_gradient, sampling=sampling, key=key,
    )
    return _at_places(outputs, places_GT, tree.tokens.size)
  task, program = plan(
      model, tree, readout, prefix_gradient, schedule, sampling=sampling
  )
  prefix_replay.check_key(task, key)
  size = tree.tokens.size

  @jax.custom_vjp
  def run(params, key):
    del key  # runs are drawn in the backward pass
    return tree_passes.outputs(task, params, program, size)

  def forward(params, key):
    return run(params, key), (params, key)

  def backward(residuals, d_outputs):
    params, key = residuals
    *_, grads = tree_passes.gradient(
        task, params, program, size, None, (d_outputs,), key
    )
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), None

  run.defvjp(forward, backward)
  return run(params, key)


def log_probs(
    model: decoder.Decoder, params, tree, *, temperature: float = 1.0,
    **options,
) -> jax.Array:
  """log p(token | tokens before) of every token of every sequence.

  Args:
    model: the decoder.
    params: its parameters.
    tree: the tree.
    temperature: of the softmax; the sampler's.
    **options: as in `replay`.

  Returns:
    f32[G, S], 0 where a token carries no loss or is padding, `tree.mask()`.

  Raises:
    ValueError: see `replay`.
  """
  params_lib.check(model, params)
  token_tree.check(tree, model.config)
  readout = readout_lib.LogProbs(temperature)
  return tree.by_leaf(
      replay(model, params, tree, readout=readout, **options)
  )


def dense_log_probs(
    model: decoder.Decoder, params, tree, *, temperature: float = 1.0
) -> jax.Array:
  """The reference of `log_probs`: whole sequences, plain attention, autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    tree: the tree.
    temperature: of the softmax.

  Returns:
    f32[G, S], 0 where a token carries no loss or is padding.
  """
  params_lib.check(model, params)
  token_tree.check(tree, model.config)
  checks.number(temperature, "temperature", above=0)
  tokens_GS = jnp.asarray(tree.sequences())
  hidden_GSM = model.apply({"params": params}, tokens_GS, method="hidden")
  result = log_probs_lib.reference(
      hidden_GSM[:, :-1].reshape(-1, model.config.width),
      model.apply({"params": params}, method="head_table"),
      tokens_GS[:, 1:].reshape(-1),
      temperature=temperature,
      vocab_size=model.config.vocab_size,
  )
  result_GS = jnp.pad(result.reshape(len(tokens_GS), -1), ((0, 0), (1, 0)))
  return jnp.where(tree.mask(), result_GS, 0)


def value_and_grad(
    model: decoder.Decoder,
    loss,
    *,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    sampling: Sampling = Sampling(),
    schedule: Schedule = Schedule(),
    trainable: str = "all",
    balance: float = 0.0,
):
  """One-pass gradient of a loss that is a sum over tokens.

  Every shared token is run once there and once back; a token's loss is taken
  where it stands in the tree, once for all sequences that share it. For a loss
  that is linear in the log-probs, `tree.sum_over_leaves` gives the weights of
  tokens. `jax.grad` of `log_probs` is for any other.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar of any [R, C] tokens, the *sum* over them;
      those without loss come with outputs and args of 0 and must add nothing.
      One function object compiles once; a new lambda compiles again.
    readout: as in `replay`.
    prefix_gradient: as in `replay`.
    sampling: as in `replay`.
    schedule: as in `replay`. What inner segments keep from there to back is of
      one path.
    trainable: "all" or "adapters", as in `prefix_replay.value_and_grad`.
    balance: coefficient of the load-balance term of a mixture of experts over
      all sequences, in which a shared token counts once for each; in "stop"
      that of leaves, and of inner segments with loss, alone. Unless 0 the whole
      tree runs forward once more, tokens that no loss depends on are run as
      well, and the result is a `passes.Balanced`.

  Returns:
    A function (params, tree, *args, key=None, balance_share=None) ->
    (`Evaluation`, grads); each of `args` has the leading axis N of
    `tree.tokens`, and so have the outputs. Who adds up the gradients of several
    trees passes balance_share=, as in `prefix_replay.value_and_grad`.
  """
  params_lib.check_model(model)
  prefix_replay.check_loss(loss)

  def run(params, tree, *args, key=None, balance_share=None):
    params_lib.check(model, params)
    token_tree.check(tree, model.config)
    size = tree.tokens.size
    checks.leading(args, (size,), "one a token of the tree, tree.tokens.size")
    args = jax.tree.map(jnp.asarray, args)
    # An empty tail of a group is padding; here it is a sequence, and counts.
    empty = not tree.lengths[tree.leaves].all()
    if tree.is_group and not (balance and empty):
      group, places_GT = _as_group(tree, model.config)
      evaluation, grads = prefix_replay.value_and_grad(
          model, loss, readout=readout, prefix_gradient=prefix_gradient,
          sampling=sampling, schedule=schedule, trainable=trainable,
          balance=balance,
      )(params, group, *jax.tree.map(
          lambda x: token_tree.take(x, places_GT), args
      ), key=key, balance_share=balance_share)
      outputs = _at_places(evaluation.outputs, places_GT, size)
      return evaluation._replace(outputs=outputs), grads
    task, program = plan(
        model, tree, readout, prefix_gradient, schedule, sampling, trainable,
        balance,
    )
    prefix_replay.check_key(task, key)
    share = prefix_replay.check_share(task, balance_share)
    return tree_passes.gradient(
        task, params, program, size, loss, args, key, share
    )

  return run


def plan(
    model, tree, readout, prefix_gradient, schedule, sampling=Sampling(),
    trainable="all", balance=0.0,
):
  """The task, its activation policy settled, and the program of a tree."""
  task = engine.Task(
      model, readout, prefix_gradient, schedule, sampling, trainable, balance
  )
  program = tree_order.program(
      tree, prefix_gradient, chunk_size=schedule.chunk_size,
      at_once=schedule.branches_at_once, devices=schedule.layout.devices,
      whole=bool(balance),
  )
  rows = max(run.tokens.size for run in program.started)
  path = program.capacity if task.accumulates else 0
  settled = dataclasses.replace(
      schedule, activations=schedule.policy(model.config, path, rows, rows)
  )
  return dataclasses.replace(task, schedule=settled), program


def _as_group(tree, config):
  """The group of a tree of one level, and where its tails' tokens are."""
  at = tree.starts[tree.leaves]
  lengths = tree.lengths[tree.leaves]
  group = group_lib.Group.create(
      tree.tokens[: tree.lengths[token_tree.ROOT]],
      [tree.tokens[a : a + n] for a, n in zip(at, lengths, strict=True)],
      config=config,
  )
  steps_GT = np.arange(group.tails.shape[1])[None]
  places_GT = np.where(
      steps_GT < lengths[:, None], at[:, None] + steps_GT, token_tree.NOWHERE
  )
  return group, places_GT


def _at_places(outputs, places_GT, size: int):
  """Outputs [G, T, ...] of a group as those of the tree's tokens, [N, ...]."""
  at = np.where(places_GT < 0, size, places_GT)

  def place(x):
    zeros = jnp.zeros((size, *x.shape[2:]), x.dtype)
    return zeros.at[at].set(x, mode="drop")

  return jax.tree.map(place, outputs)
