# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readouts: what is read from the tails' hidden states, chunk by chunk.

A readout is a hashable function (model, params, hidden_NM, targets_N, layout)
-> a pytree of arrays with leading axis N. `params` are those outside the
layers, so a readout may own some (a value head) by a name of its own in the
tree. On several devices they are whole, but for the vocabulary tables, of which
each device has some columns: `ops.log_probs` completes them chunk by chunk.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay.devices import layout as layout_lib
from branch_replay.models import decoder
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.ops.attention import tiling


@dataclasses.dataclass(frozen=True)
class LogProbs:
  """log p(target) under softmax(logits / temperature).

  Attributes:
    temperature: τ > 0; the sampler's, or the ratio of a policy to itself is
      not 1.
  """

  temperature: float = 1.0

  def __post_init__(self):
    checks.number(self.temperature, "temperature", above=0)

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """log p in nats, [N], at least float32."""
    path = model.config.head_path
    return log_probs_lib.chunked(
        hidden_NM,
        params[path]["table"],
        targets_N,
        temperature=self.temperature,
        vocab_size=model.config.vocab_size,
        columns=log_probs_lib.Columns(layout, path),
    )


@dataclasses.dataclass(frozen=True)
class Hidden:
  """Hidden states after the final norm: what a learned drafter reads."""

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """The states, [N, M] in the compute dtype."""
    del model, params, targets_N, layout
    return hidden_NM


def chunked(
    readout, model: decoder.Decoder, params, y_GTM, targets_GT, *,
    tokens: int, layout: layout_lib.Layout = layout_lib.Layout(),
):
  """Final norm and readout of [G, T] positions, `tokens` at a time.

  Differentiable; nothing of a chunk is kept for the backward pass but its
  inputs and log-sum-exps.

  Args:
    readout: see the module.
    model: the decoder.
    params: parameters outside the layers.
    y_GTM: output of the last layer.
    targets_GT: i32 ids.
    tokens: most positions at a time.
    layout: where the parameters live.

  Returns:
    The readout's pytree, each leaf [G, T, ...].
  """
  policy = jax.checkpoint_policies.save_only_these_names(
      log_probs_lib.LOG_SUM_EXP
  )

  @functools.partial(jax.checkpoint, policy=policy)
  def one(params, y_NM, targets_N):
    hidden_NM = model.apply({"params": params}, y_NM, method="normalize")
    return readout(model, params, hidden_NM, targets_N, layout)

  y_NM = y_GTM.reshape(-1, y_GTM.shape[-1])
  targets_N = targets_GT.reshape(-1)
  rows = targets_N.shape[0]
  if rows <= tokens:
    outputs = one(params, y_NM, targets_N)
  else:
    cut = tiling.even(rows, tokens)
    shape = cut.count, cut.size
    outputs = lax.map(
        lambda chunk: one(params, *chunk),
        (
            tiling.pad(y_NM, 0, cut.padded).reshape(*shape, -1),
            tiling.pad(targets_N, 0, cut.padded, value=0).reshape(shape),
        ),
    )
    outputs = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[2:])[:rows], outputs
    )
  return jax.tree.map(
      lambda x: jnp.reshape(x, (*targets_GT.shape, *x.shape[1:])), outputs
  )
