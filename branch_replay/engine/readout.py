# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readouts: functions from hidden states to log-probs, values or other outputs.

A readout is a hashable function

  (model, params, hidden_NM, targets_N, layout) -> pytree of arrays [N, ...]

where hidden_NM are hidden states after the final norm and targets_N the ids
that they predict. `params` are the parameters outside the layers; a readout may
own some of them (a value head, say) under a name of its own. On several devices
they are whole, except that each device has only some columns of the vocabulary
tables; `ops.log_probs` gathers those chunk by chunk.
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
  """Readout of log p(target) under softmax(logits / τ).

  Attributes:
    temperature: τ > 0. It must be that of the sampler, or the ratio of a policy
      to itself is not 1.
  """

  temperature: float = 1.0

  def __post_init__(self):
    checks.number(self.temperature, "temperature", above=0)

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """Returns log p in nats, [N], at least float32."""
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
  """Readout of the hidden states, which learned drafters train on."""

  def __call__(
      self, model: decoder.Decoder, params, hidden_NM, targets_N, layout
  ):
    """Returns the states, [N, M] in the compute dtype."""
    del model, params, targets_N, layout
    return hidden_NM


def chunked(
    readout, model: decoder.Decoder, params, y_GTM, targets_GT, *,
    tokens: int, layout: layout_lib.Layout = layout_lib.Layout(),
):
  """Applies final norm and readout to [G, T] positions, a chunk at a time.

  It is differentiable. For the backward pass a chunk keeps only its inputs and
  log-sum-exps.

  Args:
    readout: a readout, see the module.
    model: the decoder.
    params: parameters outside the layers.
    y_GTM: output of the last layer.
    targets_GT: i32, the ids that the positions predict.
    tokens: most positions of a chunk.
    layout: on which devices parameters and tokens are.

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
