# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The witness's only view of `branch_replay`: public names, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay.devices import sharding
from branch_replay.engine import readout
from branch_replay.models import adapters
from branch_replay.planning import flops as flops_lib
from branch_replay.training import step as step_lib

NESTED = dict(
    delta=br.GatedDelta, latent=br.LatentAttention, experts=br.Experts,
    adapter=config_lib.Adapter,
)
SCALINGS = dict(
    linear=br.LinearScaling, llama3=br.Llama3Scaling, yarn=br.YarnScaling
)


def model_of(fields: dict):
  """The decoder of a config that is written as plain values."""
  fields = dict(fields)
  for name, make in NESTED.items():
    if name in fields:
      fields[name] = make(**fields[name])
  if "rope_scaling" in fields:
    scaling = dict(fields["rope_scaling"])
    fields["rope_scaling"] = SCALINGS[scaling.pop("kind")](**scaling)
  return br.Decoder(br.ModelConfig(**fields))


def shapes_of(model):
  """Shapes of a model's parameters."""
  return jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]


def path_of(keys) -> str:
  """A parameter's name, by which it is filled, projected and compared."""
  return "/".join(key.key for key in keys)


def trained_of(params, trainable: str):
  return adapters.select(params, trainable)


def group_of(model, prompt, tails, *, inputs=None, block=None):
  return br.Group.create(
      prompt, tails, config=model.config, tail_inputs=inputs, block=block
  )


def stack_of(groups):
  return br.stack(groups)


def tree_of(model, sequences, trained):
  return br.Tree.from_sequences(
      sequences, config=model.config, trained=trained
  )


def output_shape(data):
  """Of the log-probs: of a tree's tokens, or of the tails."""
  return data.tokens.shape if isinstance(data, br.Tree) else data.tails.shape


def loss(log_probs, weights):
  """A sum over tokens, nonlinear in the log-probs."""
  return jnp.sum(jnp.sin(log_probs) * weights)


def options_of(case, params):
  """Of `value_and_grad` and `replay`."""
  schedule = dict(case.schedule)
  if case.devices > 1:
    schedule["layout"] = sharding.sharded(params, case.devices)
  options = dict(
      prefix_gradient=case.mode, schedule=br.Schedule(**schedule),
      readout=readout.LogProbs(case.temperature),
  )
  if case.mode == "sampled":
    options["sampling"] = br.Sampling(**case.sampling)
  return options


def gradient_function(case, model, params):
  """(params, data, weights) -> (loss, log-probs, gradient) of a case."""
  options = options_of(case, params)
  layout = options["schedule"].layout
  more = {}
  if case.mode == "sampled":
    more["key"] = jax.random.key(case.number)
  if case.driver == "autodiff":
    def of_params(params, data, weights):
      outputs = br.replay(model, params, data, **options, **more)
      return loss(outputs, weights), outputs

    def by_autodiff(params, data, weights):
      (value, outputs), grads = jax.value_and_grad(of_params, has_aux=True)(
          params, data, weights
      )
      return value, outputs, grads

    return by_autodiff
  options |= dict(trainable=case.trainable, balance=case.balance)
  if case.driver == "host":
    function = br.value_and_grad(model, loss, hosted=br.Hosted(), **options)
  else:
    function = br.value_and_grad(model, loss, **options)

  def one_pass(params, data, weights):
    if case.devices > 1:
      params = layout.place(params)
    evaluation, grads = function(params, data, weights, **more)
    return evaluation.loss, evaluation.outputs, grads

  return one_pass


def compiled_step(model, optimizer, *, prompt, branches, tail, **options):
  """A compiled training step, its layout's devices included.

  Args:
    model: the decoder.
    optimizer: of optax.
    prompt, branches, tail: shapes.
    **options: `devices`, `mode`, and fields of `br.Schedule`.
  """
  params = shapes_of(model)
  devices, mode = options.pop("devices"), options.pop("mode")
  if devices > 1:
    options["layout"] = sharding.sharded(params, devices)
  schedule = br.Schedule(**options)
  step = step_lib.make_step(
      model, loss, optimizer, schedule=schedule, prefix_gradient=mode
  )

  def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  group = br.Group(
      integers(prompt), integers(), integers(branches, tail),
      integers(branches),
  )
  state = jax.eval_shape(
      functools.partial(step_lib.create, optimizer=optimizer), params
  )
  where = step_lib.shardings(
      params, optimizer, trainable="all", layout=schedule.layout
  )
  if where is not None:
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding
        ), state, where,
    )
  weights = jax.ShapeDtypeStruct((branches, tail), jnp.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  return step.lower(state, group, (weights,), key).compile()


def operations(model, *, prompt, branches, tail, mode, activations) -> float:
  """The project's own count of a gradient's operations."""
  return float(flops_lib.gradient(
      model.config, prefix=prompt - 1, branches=branches, tail=tail, mode=mode,
      policy=activations,
  ))


def named(tree) -> dict:
  """Leaves of a tree of parameters by `path_of`, in float64."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_of(keys): np.asarray(leaf, np.float64) for keys, leaf in leaves}
