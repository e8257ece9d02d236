# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay as differentiable functions: replay, log_probs, a gradient."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import engine
from branch_replay import group as group_lib
from branch_replay import params as params_lib
from branch_replay import passes
from branch_replay import prefix
from branch_replay import readout as readout_lib
from branch_replay import state as state_lib
from branch_replay.chunk_sampling import Sampling
from branch_replay.models import decoder
from branch_replay.ops import attention_reference
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.schedule import Schedule


def replay(
    model: decoder.Decoder,
    params,
    group: group_lib.Group,
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
  """What a readout reads from the tails, differentiable in `params`.

  Args:
    model: the decoder.
    params: its parameters; the only differentiable argument.
    group: prompt and tails; of stacked groups one is run after the other, and
      the states of all live until the backward pass.
    state: a captured prefix, which is then not run again. In `exact` the
      prefix pass still runs, and reads what the state keeps.
    readout: see `branch_replay.readout`.
    prefix_gradient: "exact" equals the full gradient; "sampled" estimates it
      from some chunks of the prefix, without bias; "stop" holds the captured
      positions constant, which is biased; "full" runs every sequence on its
      own.
    sampling: of "sampled": how many chunks, by which law.
    key: of "sampled": a PRNG key; the same key draws the same chunks.
    schedule: sizes and policies, which do not change the result.
    allow_stale: accept a state captured under other parameters. Otherwise it
      is an error, as is one of another prompt, and inside `jit`, where there
      are no errors, everything turns into NaN.
    version: u32 the state must be marked with, in place of the fingerprint of
      `params`.

  Returns:
    The readout's pytree, each leaf [G, T, ...] and 0 where a tail is padding
    (stacked groups: [groups, G, T, ...]).

  Raises:
    ValueError: see `Group.create`; an unknown mode; a state of another prompt
      or captured under other parameters.
  """
  task = make_task(
      model, group, readout, prefix_gradient, schedule, sampling,
      one_pass=False,
  )
  params_lib.check(model, params)
  check_key(task, key)
  if state is None and version is not None:
    raise ValueError("version= belongs to a state=.")
  if group.prompt.ndim == 2:
    if state is not None:
      raise ValueError("state= takes one group; stacked groups have several.")
    places = jnp.arange(group.prompt.shape[0])

    def one(inputs):
      group, place = inputs
      mine = None if key is None else jax.random.fold_in(key, place)
      return _replay(task, allow_stale, params, group, None, None, mine)

    return lax.map(one, (group, places))
  return _replay(task, allow_stale, params, group, state, version, key)


def log_probs(
    model: decoder.Decoder, params, group, *, temperature: float = 1.0,
    **options,
) -> jax.Array:
  """log p(token | prompt, earlier tokens) of every token of every tail.

  Args:
    model: the decoder.
    params: its parameters.
    group: prompt and tails.
    temperature: of the softmax; the sampler's.
    **options: as in `replay`.

  Returns:
    f32[G, T], 0 where a tail is padding.

  Raises:
    ValueError: see `replay`.
  """
  readout = readout_lib.LogProbs(temperature)
  return replay(model, params, group, readout=readout, **options)


def dense_log_probs(
    model: decoder.Decoder, params, group, *, temperature: float = 1.0
) -> jax.Array:
  """The reference of `log_probs`: whole sequences, plain attention, autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    group: prompt and tails, not stacked.
    temperature: of the softmax.

  Returns:
    f32[G, T], 0 where a tail is padding.

  Raises:
    ValueError: see `Group.create`; stacked groups.
  """
  params_lib.check(model, params)
  group_lib.check(group, model.config)
  prefix.check_single(group)
  checks.number(temperature, "temperature", above=0)
  attend = attention_reference.causal
  if group.block is not None:
    attend = functools.partial(
        attend, block=group.block, start=group.prompt_length - 1,
        lengths_G=group.prompt_length - 1 + group.tail_lengths,
    )
  hidden_GSM = model.apply(
      {"params": params}, group.rows(), attend=attend, method="hidden"
  )
  tokens = group.tails.shape[1]
  hidden_GTM = lax.dynamic_slice_in_dim(
      hidden_GSM, group.prompt_length - 1, tokens, axis=1
  )
  result = log_probs_lib.reference(
      hidden_GTM.reshape(-1, model.config.width),
      model.apply({"params": params}, method="head_table"),
      group.tails.reshape(-1),
      temperature=temperature,
      vocab_size=model.config.vocab_size,
  )
  return jnp.where(group.mask(), result.reshape(group.tails.shape), 0)


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
  """One-pass gradient of a loss that is a sum over branches.

  The loss of each branch group is known when it has been run, so its backward
  pass follows at once and no tail is run twice; of stacked groups the state of
  one lives at a time. `jax.grad` of `replay` gives the same for any loss.

  Args:
    model: the decoder.
    loss: (outputs, *args) -> scalar, a *sum* over the branches it is given: a
      mean would depend on `branches_at_once`. One function object compiles
      once; a new lambda compiles again.
    readout: see `branch_replay.readout`.
    prefix_gradient: as in `replay`.
    sampling: as in `replay`.
    schedule: as in `replay`.
    trainable: "all", or "adapters" for the gradient of low-rank adapters
      alone, see `adapters.add`; the base then costs no weight gradients.
    balance: coefficient of the load-balance term of a mixture of experts, see
      `branch_replay.balance`, whose gradient is added; of stacked groups that
      of the mean of their terms; in "stop" that of the tails alone. Unless 0 it
      costs one more forward pass of the tails, and the result is a
      `passes.Balanced`, with the share of every expert.

  Returns:
    A function (params, group, *args, state=None, key=None, allow_stale=False,
    version=None, balance_share=None) -> (`Evaluation`, grads): loss, outputs,
    and in "sampled" which chunks ran. Each of `args` has the leading axes of
    the tails, [G, ...] or [groups, G, ...]. Gradients are at least float32 and
    have the structure of what is trained, `adapters.select(params, trainable)`.
    Who adds up the gradients of N calls passes balance_share=1/N, a factor on
    the load-balance term; None is 1.

  Raises:
    ValueError: by the function: see `replay`; adapters of a model without any.
  """
  params_lib.check_model(model)
  check_loss(loss)

  def run(
      params, group, *args, state=None, key=None, allow_stale=False,
      version=None, balance_share=None,
  ):
    task = make_task(
        model, group, readout, prefix_gradient, schedule, sampling,
        trainable=trainable, balance=balance,
    )
    params_lib.check(model, params)
    check_key(task, key)
    if state is None and version is not None:
      raise ValueError("version= belongs to a state=.")
    if state is not None:
      if group.prompt.ndim == 2:
        raise ValueError("state= takes one group; stacked groups have several.")
    check_args(args, group)
    share = check_share(task, balance_share)
    good = _check(task, state, params, group, version, allow_stale)
    return _poisoned(good, passes.value_and_grad(
        task, loss, params, group, args, _inside(state), key, share
    ))

  return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replay(
    task: engine.Task, allow_stale, params, group, state, version, key
):
  del key  # chunks are drawn in the backward pass
  args = params, group, state, version
  return _checked_forward(task, allow_stale, False, *args)[1]


def _replay_forward(task, allow_stale, params, group, state, version, key):
  keep = task.schedule.activations == "keep"
  args = params, group, state, version
  good, outputs, state, kept = _checked_forward(
      task, allow_stale, keep, *args
  )
  return outputs, (good, params, group, state, key, kept)


def _checked_forward(task, allow_stale, keep, params, group, state, version):
  # Checked here and not in `replay`: under `jax.grad` the parameters have
  # values only inside of the custom_vjp.
  good = _check(task, state, params, group, version, allow_stale)
  outputs, state, kept = passes.forward(
      task, keep, params, group, _inside(state)
  )
  return good, _poisoned(good, outputs), state, kept


def _check(task, state, params, group, version, allow_stale):
  """None, or under jit whether a given state may be replayed."""
  if state is None:
    return None
  found = [prefix.check_replayable(task, state, group)]
  if not allow_stale:
    found.append(prefix.check_version(state, params, version))
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


def _replay_backward(task, allow_stale, residuals, d_outputs):
  del allow_stale
  good, *residuals = residuals
  grads = passes.backward(task, *residuals, d_outputs)
  return _poisoned(good, grads), None, None, None, None


_replay.defvjp(_replay_forward, _replay_backward)


def check_key(task: engine.Task, key):
  """Refuses a key that is none, or that is missing where chunks are drawn."""
  if task.prefix_gradient == "sampled" and key is None:
    raise ValueError("prefix_gradient='sampled' draws chunks: pass key=.")
  if key is not None:
    checks.key(key)


def check_loss(loss):
  """Raises TypeError for what is no function of outputs."""
  checks.function(
      loss, "loss", "It is a function of the outputs and of further arguments."
  )


def check_args(args, group):
  """Raises ValueError for arguments of a loss that are not one a branch."""
  checks.leading(args, group.tails.shape[:-1], "one a branch of the group")


def check_share(task: engine.Task, balance_share) -> float:
  """The factor on the load-balance term.

  Raises:
    ValueError: there is no such term, or the factor is none.
  """
  if balance_share is None:
    return 1.0
  if not task.balance:
    raise ValueError(
        f"balance_share={balance_share} belongs to a load-balance term: say "
        "balance=, or leave it out."
    )
  if group_lib.is_concrete(balance_share):
    checks.number(balance_share, "balance_share", 0)
  return balance_share


def make_task(
    model, group, readout, prefix_gradient, schedule, sampling=Sampling(),
    one_pass=True, trainable="all", balance=0.0,
) -> engine.Task:
  """The static half, with the activation policy settled."""
  params_lib.check_model(model)
  group_lib.check(group, model.config)
  task = engine.Task(
      model, readout, prefix_gradient, schedule, sampling, trainable, balance
  )
  policy = task.policy(group, one_pass=one_pass)
  settled = dataclasses.replace(schedule, activations=policy)
  return dataclasses.replace(task, schedule=settled)
