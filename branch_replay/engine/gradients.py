# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay as differentiable functions of a group or a tree.

  log_probs_GT = br.log_probs(model, params, group)
  gradient = br.value_and_grad(model, loss)

A group is one prompt and G answers to it. In a tree, branches branch again, and
every token that sequences share is run once. A tree of one level is a group and
is run as one.
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
  """Reads tails, or all tokens with loss, differentiably in `params`.

  The gradient of a tree runs the tree forward a second time, and that of a
  group may run its tails again: `value_and_grad`, where the loss allows it,
  runs nothing twice.

  Args:
    model: the decoder.
    params: its parameters; the only differentiable argument.
    data: a group, stacked groups, or a tree. Of stacked groups one is run after
      the other, and the states of all live until the backward pass.
    state: a captured prefix of a group, which is then not run again. In
      "exact" it is still pulled back, and what the state keeps is read.
    readout: see `branch_replay.readout`; what it reads of a token comes from
      the hidden state before it.
    prefix_gradient: "exact" equals the full gradient. "sampled" estimates it,
      without bias, from some chunks of the prefix; of a tree, from some of the
      runs without loss of their own. "stop" holds the captured positions
      constant, which is biased; in a tree each segment holds constant what its
      ancestors left behind, all but the token it starts on. (On n devices a
      segment of a tree starts up to n − 1 tokens earlier, and so does what it
      does not hold constant.) "full" runs every sequence on its own.
    sampling: of "sampled": how many chunks are pulled back, by which law. An
      inner segment of a tree has one run for every chunk.
    key: of "sampled": a PRNG key; the same key draws the same chunks.
    schedule: sizes and policies, which do not change the result.
    allow_stale: accept a state captured under other parameters. Otherwise it
      is an error, as is one of another prompt, and inside `jit`, where there
      are no errors, everything turns into NaN.
    version: u32 the state must be marked with, in place of the fingerprint of
      `params`.

  Returns:
    The readout's pytree. Of a group each leaf is [G, T, ...] and 0 where a tail
    is padding (stacked groups: [groups, G, T, ...]). Of a tree each is
    [N, ...], in the order of `tree.tokens`, and 0 where a token carries no
    loss; `tree.by_leaf` is what each leaf sees of it.

  Raises:
    ValueError: a group or tree that is none, or is not the model's; no token
      with loss; an unknown mode; "sampled" without a key; a state of another
      prompt or captured under other parameters, or one for a tree.
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
  """log p(token | tokens before it) of every token of every tail or sequence.

  Args:
    model: the decoder.
    params: its parameters.
    data: a group, stacked groups, or a tree.
    temperature: of the softmax; the sampler's.
    **options: as in `replay`.

  Returns:
    f32[G, T] of a group, 0 where a tail is padding; of a tree f32[G, S] of its
    G whole sequences, 0 where a token carries no loss or is padding,
    `tree.mask()`.

  Raises:
    ValueError: see `replay`.
  """
  readout = readout_lib.LogProbs(temperature)
  found = replay(model, params, data, readout=readout, **options)
  return data.by_leaf(found) if isinstance(data, token_tree.Tree) else found


def dense_log_probs(
    model: decoder.Decoder, params, data: Data, *, temperature: float = 1.0
) -> jax.Array:
  """The reference of `log_probs`: whole sequences, plain attention, autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    data: one group, or a tree.
    temperature: of the softmax.

  Returns:
    As `log_probs`.

  Raises:
    ValueError: a group or tree that is not the model's; stacked groups.
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
  """One-pass gradient of a loss that is a sum over branches or tokens.

  The loss of each branch is known when it has been run, so its backward pass
  follows at once and nothing is run twice; of stacked groups the state of one
  lives at a time. `jax.grad` of `replay` gives the same for any loss.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar. Of groups, a *sum* over the branches it is
      given: a mean would depend on `branches_at_once`. Of trees, a sum over any
      [R, C] tokens, each taken where it stands in the tree, once for all
      sequences that share it; tokens without loss come with outputs and args of
      0 and must add nothing. (For a loss that is linear in the log-probs,
      `tree.sum_over_leaves` gives the weights of tokens.) One function object
      compiles once; a new lambda compiles again.
    readout: see `branch_replay.readout`.
    prefix_gradient: as in `replay`.
    sampling: as in `replay`.
    schedule: as in `replay`. What inner segments of a tree keep from there to
      back is of one path.
    trainable: "all", or "adapters" for the gradient of low-rank adapters
      alone, see `adapters.add`; the base then costs no weight gradients.
    balance: coefficient of the load-balance term of a mixture of experts, see
      `branch_replay.balance`, whose gradient is added: of a tree over all
      sequences, in which a shared token counts once for each; of stacked groups
      that of the mean of their terms; in "stop" that of what is pulled back
      alone. Unless 0 it costs one more forward pass, of a group's tails or of
      the whole tree, and the result is a `spec.Balanced`, with the share of
      every expert.
    hosted: None compiles a group as a whole. Otherwise its chunks and branches
      are run step by step from Python, with progress shown, see `Hosted`; an
      interrupt raises KeyboardInterrupt between two steps, and nothing that was
      passed in has changed then. Such a function is not to be called under
      `jit`. Trees are always run so.

  Returns:
    A function (params, data, *args, state=None, key=None, allow_stale=False,
    version=None, balance_share=None) -> (`Evaluation`, grads): loss, outputs,
    and in "sampled" which chunks ran. Each of `args` has the leading axes of
    the tails, [G, ...] or [groups, G, ...], or of a tree's tokens, [N, ...].
    Gradients are at least float32 and have the structure of what is trained,
    `adapters.select(params, trainable)`. Who adds up the gradients of N calls
    passes balance_share=1/N, a factor on the load-balance term; None is 1.

  Raises:
    ValueError: by the function: see `replay`; adapters of a model without any.
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
  """The static half of a group's gradient, its activation policy settled.

  Args:
    model, readout, prefix_gradient, schedule, sampling, trainable, balance: as
      in `value_and_grad`.
    group: the group, or its shapes.
    one_pass: whether the backward pass of a visit follows its forward pass at
      once, so that one visit's activations are held at a time.
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
  # Several devices do not keep tails for `replay`, see `compiled.forward`.
  one_pass = one_pass or spec.layout.devices > 1
  return spec.settled(prefix, rows, rows if one_pass else branches * tokens)


def plan_tree(
    model, tree, readout, prefix_gradient, schedule,
    sampling=Sampling(), trainable="all", balance=0.0,
) -> tuple[Spec, program_lib.Program]:
  """The static half of a tree's gradient, and the program of the tree."""
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
  """Refuses a key that is none, or that is missing where chunks are drawn."""
  if spec.prefix_gradient == "sampled" and key is None:
    raise ValueError("prefix_gradient='sampled' draws chunks: pass key=.")
  if key is not None:
    checks.key(key)


def check_share(spec: Spec, balance_share) -> float:
  """The factor on the load-balance term.

  Raises:
    ValueError: there is no such term, or the factor is none.
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
  """None, or under jit whether a given state may be replayed."""
  if state is None:
    return None
  found = [prefix_lib.check_replayable(spec, state, group)]
  if not allow_stale:
    found.append(prefix_lib.check_version(state, params, version))
  found = [good for good in found if good is not None]
  return functools.reduce(jnp.logical_and, found) if found else None


def _inside(state):
  """The state as a computation takes it, once it has been checked."""
  return None if state is None else dataclasses.replace(state, model=None)


def _poisoned(good, tree):
  """The tree, or NaN in all its floats where `good` is false."""
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
  # An empty tail of a group is padding; here it is a sequence, and counts.
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
