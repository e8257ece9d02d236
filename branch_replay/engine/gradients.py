# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay as differentiable functions of a group or a tree.

  log_probs_GT = br.log_probs(model, params, group)
  gradient = br.value_and_grad(model, loss)

A group is one prompt and G answers to it. In a tree, branches branch again, and
every token that several sequences share is run once. A tree of one level is run
as a group.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay.data import group as group_lib
from branch_replay.data import token_tree
from branch_replay.engine import compiled
from branch_replay.engine import hosted as hosted_lib
from branch_replay.engine import prefix as prefix_lib
from branch_replay.engine import program as program_lib
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.band import Band
from branch_replay.engine.estimators import Sampling
from branch_replay.engine.schedule import Schedule
from branch_replay.engine.spec import Spec
from branch_replay.models import decoder
from branch_replay.models import params as params_lib

Data = group_lib.Group | token_tree.Tree


def replay(
    model: decoder.Decoder,
    params,
    data: Data,
    *,
    state: state_lib.PrefixState | None = None,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    sampling: Sampling = Sampling(),
    band: Band = Band(),
    key=None,
    schedule: Schedule = Schedule(),
    allow_stale: bool = False,
    version=None,
):
  """Applies a readout to a group's tails, or to a tree's tokens with loss.

  The result is differentiable in `params`. Its backward pass runs a tree
  forward a second time, and may run a group's tails again. `value_and_grad`
  runs nothing twice, but takes only losses that are sums over branches.

  Args:
    model: the decoder.
    params: its parameters; the only differentiable argument.
    data: a group, stacked groups, or a tree. Stacked groups are run one after
      the other, and the states of all live until the backward pass.
    state: the group's captured prefix, which is then not run forward again. In
      "exact" it is still back-propagated through, with the activations that
      `capture(keep=True)` stored if there are any.
    readout: function from hidden states to outputs, see `engine.readout`. The
      output of a token is computed from the hidden state before it.
    prefix_gradient: "exact" equals the full gradient. "banded" runs the same
      backward pass, but cuts attention inside the prefix to a band, see
      `engine.band`, which is nearly exact. "sampled" estimates the full
      gradient without bias from some chunks of the prefix (for a tree: from
      some of the runs that have no loss of their own). "stop" treats the
      captured positions as constants, which is biased; in a tree each segment
      treats what its ancestors left behind as constant, except the token it
      starts on. (On n
      devices a segment of a tree starts up to n − 1 tokens earlier, and so does
      what it does not hold constant.) "full" runs every sequence on its own.
    sampling: how many chunks prefix_gradient="sampled" pulls back and by which
      law it chooses them. An inner segment of a tree has one run per chunk.
    band: how far prefix_gradient="banded" reaches inside the prefix. Layers
      with a window or a recurrence are pulled back as in "exact".
    key: PRNG key for "sampled"; the same key draws the same chunks.
    schedule: sizes and policies, which do not change the result.
    allow_stale: accept a state that was captured under other parameters.
      Otherwise such a state is an error, as is a state of another prompt; under
      `jit`, which cannot raise, all outputs and gradients become NaN instead.
    version: u32 the state must be marked with, in place of the fingerprint of
      `params`.

  Returns:
    The readout's pytree. For a group each leaf is [G, T, ...] and 0 where a
    tail is padding (stacked groups: [groups, G, T, ...]). For a tree each leaf
    is [N, ...], in the order of `tree.tokens`, and 0 where a token carries no
    loss; `tree.by_leaf` arranges it by sequence.

  Raises:
    TypeError: an argument of the wrong type.
    ValueError: a malformed group or tree, or ids or lengths that the model does
      not have; a tree without loss; an unknown mode; "sampled" without a key; a
      state of another prompt or other parameters, or a state for a tree.
  """
  options = dict(
      readout=readout, prefix_gradient=prefix_gradient, schedule=schedule,
      sampling=sampling, band=band,
  )
  if isinstance(data, token_tree.Tree):
    _check_no_state(state, allow_stale, version)
    return _replay_tree(model, params, data, options, key)
  spec = spec_lib.of_group(model, data, one_pass=False, **options)
  params_lib.check(model, params)
  spec_lib.check_key(spec, key)
  if state is None and version is not None:
    raise ValueError("version= belongs to a state=.")
  if data.prompt.ndim == 2:
    if state is not None:
      raise ValueError("state= takes one group; stacked groups have several.")
    numbers = jnp.arange(data.prompt.shape[0])

    def one(inputs):
      group, number = inputs
      mine = None if key is None else jax.random.fold_in(key, number)
      return _replay(spec, allow_stale, params, group, None, None, mine)

    return lax.map(one, (data, numbers))
  return _replay(spec, allow_stale, params, data, state, version, key)


def log_probs(
    model: decoder.Decoder, params, data: Data, *, temperature: float = 1.0,
    **options,
) -> jax.Array:
  """log p(token | tokens before it), in nats, of every token of every tail.

  Args:
    model: the decoder.
    params: its parameters.
    data: a group, stacked groups, or a tree.
    temperature: τ > 0 of softmax(logits / τ); use that of the sampler.
    **options: as in `replay`.

  Returns:
    For a group f32[G, T], 0 where a tail is padding; for a tree f32[G, S] over
    its G whole sequences, 0 where `tree.mask()` is false (a token is padding or
    carries no loss).

  Raises:
    ValueError: see `replay`.
  """
  readout = readout_lib.LogProbs(temperature)
  found = replay(model, params, data, readout=readout, **options)
  return data.by_leaf(found) if isinstance(data, token_tree.Tree) else found


def value_and_grad(
    model: decoder.Decoder,
    loss,
    *,
    readout=readout_lib.LogProbs(),
    prefix_gradient: str = "exact",
    sampling: Sampling = Sampling(),
    band: Band = Band(),
    schedule: Schedule = Schedule(),
    trainable: str = "all",
    balance: float = 0.0,
    hosted: hosted_lib.Hosted | None = None,
):
  """Makes a function that computes a loss and its gradient in one pass.

  The loss must be a sum over branches or tokens. Then the loss of a branch is
  known as soon as the branch has been run, its backward pass follows at once,
  and nothing is run twice; the state of only one of several stacked groups
  lives at a time. `jax.grad` of `replay` gives the same for any loss.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar. For groups it must *sum* over the branches
      it is given: a mean would depend on `branches_at_once`. For trees it must
      sum over the [R, C] tokens it is given; a token that several sequences
      share is given once. Tokens without loss come with outputs and args of 0
      and must add nothing. (For a loss that is linear in the log-probs,
      `tree.sum_over_leaves` turns weights of sequences into weights of tokens.)
      Pass the same function object every time: a new lambda compiles again.
    readout: function from hidden states to outputs, see `engine.readout`.
    prefix_gradient: as in `replay`.
    sampling: as in `replay`.
    band: as in `replay`.
    schedule: as in `replay`. With activations="keep", only the inner segments
      of one path of a tree hold their activations at a time.
    trainable: "all", or "adapters" for the gradient of low-rank adapters
      alone, see `adapters.add`; no weight gradients of the base are computed.
    balance: coefficient of the load-balance term of a mixture of experts, see
      `engine.balance`; the term's gradient is added. In a tree a shared token
      counts once for each sequence; stacked groups contribute the mean of their
      terms; in "stop" only what is back-propagated contributes. Unless it is 0,
      it costs one more forward pass (a group's tails or the whole tree), and
      the function returns a `spec.Balanced`, with the load of every expert.
    hosted: None compiles a group as one program. A `Hosted` runs its chunks and
      branches step by step from Python, with a progress bar if wanted; an
      interrupt raises KeyboardInterrupt between two steps and leaves the
      arguments as they were. Such a function must not be called under `jit`.
      Trees are always run this way.

  Returns:
    A function (params, data, *args, state=None, key=None, allow_stale=False,
    version=None, balance_share=None) -> (`Evaluation`, grads). The evaluation
    has the loss, the outputs, and in "sampled" which chunks ran. Each of `args`
    has the leading axes of the tails, [G, ...] or [groups, G, ...], or of a
    tree's tokens, [N, ...]. Gradients are at least float32 and have the
    structure of `adapters.select(params, trainable)`. balance_share is a factor
    on the load-balance term: pass 1/N to add up the gradients of N calls; None
    is 1.

  Raises:
    TypeError: an argument of the wrong type. The returned function also raises
      as `replay` does, and ValueError for `trainable="adapters"` with a model
      that has no adapters.
  """
  params_lib.check_model(model)
  checks.function(
      loss, "loss", "It is a function of the outputs and of further arguments."
  )
  if hosted is not None:
    checks.instance(hosted, "hosted", hosted_lib.Hosted)
  options = dict(
      readout=readout, prefix_gradient=prefix_gradient, schedule=schedule,
      sampling=sampling, band=band, trainable=trainable, balance=balance,
  )

  def run(
      params, data, *args, state=None, key=None, allow_stale=False,
      version=None, balance_share=None,
  ):
    if isinstance(data, token_tree.Tree):
      _check_no_state(state, allow_stale, version)
      return _tree_gradient(
          model, loss, options, params, data, args, key, balance_share,
          hosted or hosted_lib.Hosted(),
      )
    spec = spec_lib.of_group(model, data, **options)
    params_lib.check(model, params)
    spec_lib.check_key(spec, key)
    if state is None and version is not None:
      raise ValueError("version= belongs to a state=.")
    if state is not None and data.prompt.ndim == 2:
      raise ValueError("state= takes one group; stacked groups have several.")
    checks.leading(args, data.tails.shape[:-1], "one a branch of the group")
    share = spec_lib.check_share(spec, balance_share)
    if hosted is not None:
      return _hosted_gradient(
          spec, loss, params, data, args, state, key, share, hosted
      )
    good = _check(spec, state, params, data, version, allow_stale)
    return _poisoned(good, compiled.value_and_grad(
        spec, loss, params, data, args, _unmarked(state), key, share
    ))

  return run


def plan_tree(
    model, tree, readout, prefix_gradient, schedule,
    sampling=Sampling(), band=Band(), trainable="all", balance=0.0,
) -> tuple[Spec, program_lib.Program]:
  """Builds the spec of a tree's gradient, and the program of the tree.

  The activation policy is chosen for the longest path of pushed runs, whose
  activations "keep" holds, and the largest visit on top of it.

  Args:
    model, readout, prefix_gradient, schedule, sampling, band, trainable,
      balance: as in `value_and_grad`.
    tree: the tree.

  Returns:
    The spec, with its activation policy chosen, and the program.
  """
  spec = Spec(
      model, readout, prefix_gradient, schedule, sampling, band, trainable,
      balance,
  )
  program = program_lib.of_tree(
      tree, prefix_gradient, chunk_size=schedule.chunk_size,
      at_once=schedule.branches_at_once, devices=schedule.layout.devices,
      all_tokens=bool(balance),
  )
  rows = max(run.tokens_RS.size for run in program.started)
  path, held = 0, rows
  if spec.accumulates:
    path = program.capacity
    held = max((run.tokens_RS.size for run in program.visited), default=0)
  return spec.settled(path, rows, held), program



def _check_no_state(state, allow_stale, version):
  if state is not None or allow_stale or version is not None:
    raise ValueError(
        "state=, version= and allow_stale= are for a Group: a Tree's inner "
        "segments are run when it is."
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replay(spec: Spec, allow_stale, params, group, state, version, key):
  del key  # chunks are drawn in the backward pass
  args = params, group, state, version
  return _checked_forward(spec, allow_stale, False, *args)[1]


def _replay_forward(spec, allow_stale, params, group, state, version, key):
  keep = spec.schedule.activations == "keep"
  args = params, group, state, version
  good, outputs, state, kept = _checked_forward(
      spec, allow_stale, keep, *args
  )
  return outputs, (good, params, group, state, key, kept)


def _checked_forward(spec, allow_stale, keep, params, group, state, version):
  # Checked here and not in `replay`: under `jax.grad` the parameters have
  # values only inside of the custom_vjp.
  good = _check(spec, state, params, group, version, allow_stale)
  outputs, state, kept = compiled.forward(
      spec, keep, params, group, _unmarked(state)
  )
  return good, _poisoned(good, outputs), state, kept


def _replay_backward(spec, allow_stale, residuals, d_outputs):
  del allow_stale
  good, *residuals = residuals
  grads = compiled.backward(spec, *residuals, d_outputs)
  return _poisoned(good, grads), None, None, None, None


_replay.defvjp(_replay_forward, _replay_backward)


def _check(spec, state, params, group, version, allow_stale):
  """Checks a state; returns None, or a bool array where jit hides values."""
  if state is None:
    return None
  found = [prefix_lib.check_replayable(spec, state, group)]
  if not allow_stale:
    found.append(prefix_lib.check_version(state, params, version))
  found = [good for good in found if good is not None]
  return functools.reduce(jnp.logical_and, found) if found else None


def _unmarked(state):
  """The checked state as compiled functions take it, or None."""
  return None if state is None else state.unmarked()


def _poisoned(good, tree):
  """Replaces all floats of a tree by NaN if `good` is a false array."""
  def poison(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return jnp.where(good, x, jnp.nan)

  return tree if good is None else jax.tree.map(poison, tree)


def _hosted_gradient(
    spec, loss, params, group, args, state, key, share, hosted
):
  if group.prompt.ndim == 2:
    raise ValueError("hosted= takes one group, not stacked groups.")
  if state is not None:
    raise ValueError("hosted= captures the prefix itself: leave state= out.")
  hosted.check(spec)
  program = program_lib.of_group(spec, group)
  return hosted_lib.gradient(
      spec, params, program, loss, args, key=key, share=share, how=hosted
  )


def _replay_tree(model, params, tree, options, key):
  params_lib.check(model, params)
  token_tree.check(tree, model.config)
  if tree.is_group:
    group, index_GT = _as_group(tree, model.config)
    outputs = replay(model, params, group, key=key, **options)
    return _at_index(outputs, index_GT, tree.tokens.size)
  spec, program = plan_tree(model, tree, **options)
  spec_lib.check_key(spec, key)

  @jax.custom_vjp
  def run(params, key):
    del key  # runs are drawn in the backward pass
    return hosted_lib.outputs(spec, params, program)

  def forward(params, key):
    return run(params, key), (params, key)

  def backward(residuals, d_outputs):
    params, key = residuals
    *_, grads = hosted_lib.gradient(
        spec, params, program, None, (d_outputs,), key=key
    )
    return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), None

  run.defvjp(forward, backward)
  return run(params, key)


def _tree_gradient(
    model, loss, options, params, tree, args, key, balance_share, hosted
):
  params_lib.check(model, params)
  token_tree.check(tree, model.config)
  size = tree.tokens.size
  checks.leading(args, (size,), "one a token of the tree, tree.tokens.size")
  args = jax.tree.map(jnp.asarray, args)
  # The load-balance term counts an empty leaf's sequence; a group would take
  # the empty tail for padding and leave it out.
  empty = not tree.lengths[tree.leaves].all()
  if tree.is_group and not (options["balance"] and empty):
    group, index_GT = _as_group(tree, model.config)
    evaluation, grads = value_and_grad(model, loss, **options)(
        params, group,
        *jax.tree.map(lambda x: token_tree.take(x, index_GT), args),
        key=key, balance_share=balance_share,
    )
    outputs = _at_index(evaluation.outputs, index_GT, size)
    return evaluation._replace(outputs=outputs), grads
  spec, program = plan_tree(model, tree, **options)
  spec_lib.check_key(spec, key)
  hosted.check(spec)
  share = spec_lib.check_share(spec, balance_share)
  return hosted_lib.gradient(
      spec, params, program, loss, args, key=key, share=share, how=hosted
  )


def _as_group(tree, config):
  """A tree of one level as a group, and where each tail token is in it."""
  at = tree.starts[tree.leaves]
  lengths = tree.lengths[tree.leaves]
  group = group_lib.Group.create(
      tree.tokens[: tree.lengths[token_tree.ROOT]],
      [tree.tokens[a : a + n] for a, n in zip(at, lengths, strict=True)],
      config=config,
  )
  steps_GT = np.arange(group.tails.shape[1])[None]
  index_GT = np.where(
      steps_GT < lengths[:, None], at[:, None] + steps_GT, token_tree.NOWHERE
  )
  return group, index_GT


def _at_index(outputs, index_GT, size: int):
  """Moves a group's outputs [G, T, ...] to the tree's tokens, [N, ...]."""
  at = np.where(index_GT < 0, size, index_GT)

  def place(x):
    zeros = jnp.zeros((size, *x.shape[2:]), x.dtype)
    return zeros.at[at].set(x, mode="drop")

  return jax.tree.map(place, outputs)
