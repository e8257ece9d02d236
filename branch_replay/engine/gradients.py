# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay as differentiable functions of a group or a tree.

  log_probs_GT = br.log_probs(model, params, group)
  gradient = br.value_and_grad(model, loss)

A group is one prompt and G answers to it. In a tree, branches branch again, and
every token that several sequences share is run once. A tree of one level is run
as a group.
"""

import dataclasses
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
from branch_replay.engine import state as state_lib
from branch_replay.engine.estimators import Sampling
from branch_replay.engine.schedule import Schedule
from branch_replay.engine.spec import Spec
from branch_replay.models import decoder
from branch_replay.models import params as params_lib
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.ops.attention import reference as attention_reference

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
    prefix_gradient: "exact" equals the full gradient. "sampled" estimates it
      without bias from some chunks of the prefix (for a tree: from some of the
      runs that have no loss of their own). "stop" treats the captured positions
      as constants, which is biased; in a tree each segment treats what its
      ancestors left behind as constant, except the token it starts on. (On n
      devices a segment of a tree starts up to n − 1 tokens earlier, and so does
      what it does not hold constant.) "full" runs every sequence on its own.
    sampling: how many chunks prefix_gradient="sampled" pulls back and by which
      law it chooses them. An inner segment of a tree has one run per chunk.
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
      sampling=sampling,
  )
  if isinstance(data, token_tree.Tree):
    _check_no_state(state, allow_stale, version)
    return _replay_tree(model, params, data, options, key)
  spec = make_spec(model, data, one_pass=False, **options)
  params_lib.check(model, params)
  check_key(spec, key)
  if state is None and version is not None:
    raise ValueError("version= belongs to a state=.")
  if data.prompt.ndim == 2:
    if state is not None:
      raise ValueError("state= takes one group; stacked groups have several.")
    places = jnp.arange(data.prompt.shape[0])

    def one(inputs):
      group, place = inputs
      mine = None if key is None else jax.random.fold_in(key, place)
      return _replay(spec, allow_stale, params, group, None, None, mine)

    return lax.map(one, (data, places))
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


def dense_log_probs(
    model: decoder.Decoder, params, data: Data, *, temperature: float = 1.0
) -> jax.Array:
  """Computes `log_probs` the slow, plain way, as a reference.

  It runs every sequence whole, with plain attention and ordinary autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    data: one group, or a tree.
    temperature: τ > 0 of softmax(logits / τ).

  Returns:
    As `log_probs`.

  Raises:
    ValueError: ids or lengths that the model does not have; stacked groups.
  """
  params_lib.check(model, params)
  checks.number(temperature, "temperature", above=0)

  def of(hidden_GTM, targets_GT):
    flat_N = log_probs_lib.reference(
        hidden_GTM.reshape(-1, model.config.width),
        model.apply({"params": params}, method="head_table"),
        targets_GT.reshape(-1),
        temperature=temperature,
        vocab_size=model.config.vocab_size,
    )
    return flat_N.reshape(targets_GT.shape)

  if isinstance(data, token_tree.Tree):
    token_tree.check(data, model.config)
    tokens_GS = jnp.asarray(data.sequences())
    hidden_GSM = model.apply({"params": params}, tokens_GS, method="hidden")
    found_GS = of(hidden_GSM[:, :-1], tokens_GS[:, 1:])
    return jnp.where(data.mask(), jnp.pad(found_GS, ((0, 0), (1, 0))), 0)
  group_lib.check(data, model.config)
  prefix_lib.check_single(data)
  attend = attention_reference.causal
  if data.block is not None:
    attend = functools.partial(
        attend, block=data.block, start=data.prompt_length - 1,
        lengths_G=data.prompt_length - 1 + data.tail_lengths,
    )
  hidden_GSM = model.apply(
      {"params": params}, data.rows(), attend=attend, method="hidden"
  )
  hidden_GTM = lax.dynamic_slice_in_dim(
      hidden_GSM, data.prompt_length - 1, data.tails.shape[1], axis=1
  )
  return jnp.where(data.mask(), of(hidden_GTM, data.tails), 0)


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
      sampling=sampling, trainable=trainable, balance=balance,
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
    spec = make_spec(model, data, **options)
    params_lib.check(model, params)
    check_key(spec, key)
    if state is None and version is not None:
      raise ValueError("version= belongs to a state=.")
    if state is not None and data.prompt.ndim == 2:
      raise ValueError("state= takes one group; stacked groups have several.")
    checks.leading(args, data.tails.shape[:-1], "one a branch of the group")
    share = check_share(spec, balance_share)
    if hosted is not None:
      return _hosted_gradient(
          spec, loss, params, data, args, state, key, share, hosted
      )
    good = _check(spec, state, params, data, version, allow_stale)
    return _poisoned(good, compiled.value_and_grad(
        spec, loss, params, data, args, _inside(state), key, share
    ))

  return run


def make_spec(
    model, group, readout, prefix_gradient, schedule,
    sampling=Sampling(), *, one_pass=True, trainable="all",
    balance=0.0,
) -> Spec:
  """Builds the spec of a group's gradient and chooses its activation policy.

  Args:
    model, readout, prefix_gradient, schedule, sampling, trainable, balance: as
      in `value_and_grad`.
    group: the group, or its shapes.
    one_pass: whether each visit's backward pass follows its forward pass at
      once, so that the activations of only one visit are held at a time.
  """
  params_lib.check_model(model)
  group_lib.check(group, model.config)
  spec = Spec(
      model, readout, prefix_gradient, schedule, sampling, trainable, balance
  )
  branches, tokens = group.tails.shape[-2:]
  prefix = group.prompt.shape[-1] - 1
  if spec.whole:
    tokens, prefix = prefix + tokens, 0
  elif not spec.accumulates:
    prefix = 0
  rows = spec.at_once(branches) * tokens
  # On several devices `compiled.forward` keeps no activations of tails.
  one_pass = one_pass or spec.layout.devices > 1
  return spec.settled(prefix, rows, rows if one_pass else branches * tokens)


def plan_tree(
    model, tree, readout, prefix_gradient, schedule,
    sampling=Sampling(), trainable="all", balance=0.0,
) -> tuple[Spec, program_lib.Program]:
  """Builds the spec of a tree's gradient, and the program of the tree.

  Args:
    model, readout, prefix_gradient, schedule, sampling, trainable, balance: as
      in `value_and_grad`.
    tree: the tree.

  Returns:
    The spec, with its activation policy chosen, and the program.
  """
  spec = Spec(
      model, readout, prefix_gradient, schedule, sampling, trainable, balance
  )
  program = program_lib.of_tree(
      tree, prefix_gradient, chunk_size=schedule.chunk_size,
      at_once=schedule.branches_at_once, devices=schedule.layout.devices,
      whole=bool(balance),
  )
  rows = max(run.tokens_RS.size for run in program.started)
  path = program.capacity if spec.accumulates else 0
  return spec.settled(path, rows, rows), program


def check_key(spec: Spec, key):
  """Checks a PRNG key; in "sampled", which draws chunks, it must be there."""
  if spec.prefix_gradient == "sampled" and key is None:
    raise ValueError("prefix_gradient='sampled' draws chunks: pass key=.")
  if key is not None:
    checks.key(key)


def check_share(spec: Spec, balance_share) -> float:
  """Returns the factor on the load-balance term, 1 for None.

  Raises:
    TypeError: the factor is no number.
    ValueError: it is negative, or the spec has no load-balance term.
  """
  if balance_share is None:
    return 1.0
  if not spec.balance:
    raise ValueError(
        f"balance_share={balance_share} belongs to a load-balance term: say "
        "balance=, or leave it out."
    )
  if group_lib.is_concrete(balance_share):
    checks.number(balance_share, "balance_share", 0)
  return balance_share


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
      spec, keep, params, group, _inside(state)
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


def _inside(state):
  """The checked state without `model`, which computations do not take."""
  return None if state is None else dataclasses.replace(state, model=None)


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
    group, places_GT = _as_group(tree, model.config)
    outputs = replay(model, params, group, key=key, **options)
    return _at_places(outputs, places_GT, tree.tokens.size)
  spec, program = plan_tree(model, tree, **options)
  check_key(spec, key)

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
    group, places_GT = _as_group(tree, model.config)
    evaluation, grads = value_and_grad(model, loss, **options)(
        params, group,
        *jax.tree.map(lambda x: token_tree.take(x, places_GT), args),
        key=key, balance_share=balance_share,
    )
    outputs = _at_places(evaluation.outputs, places_GT, size)
    return evaluation._replace(outputs=outputs), grads
  spec, program = plan_tree(model, tree, **options)
  check_key(spec, key)
  hosted.check(spec)
  share = check_share(spec, balance_share)
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
  places_GT = np.where(
      steps_GT < lengths[:, None], at[:, None] + steps_GT, token_tree.NOWHERE
  )
  return group, places_GT


def _at_places(outputs, places_GT, size: int):
  """Moves a group's outputs [G, T, ...] to the tree's tokens, [N, ...]."""
  at = np.where(places_GT < 0, size, places_GT)

  def place(x):
    zeros = jnp.zeros((size, *x.shape[2:]), x.dtype)
    return zeros.at[at].set(x, mode="drop")

  return jax.tree.map(place, outputs)
