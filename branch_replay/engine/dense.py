# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference: log-probs of whole sequences, without replay."""

import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay.data import group as group_lib
from branch_replay.data import token_tree
from branch_replay.engine import prefix as prefix_lib
from branch_replay.models import decoder
from branch_replay.models import params as params_lib
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.ops.attention import reference as attention_reference


def dense_log_probs(
    model: decoder.Decoder, params, data: group_lib.Group | token_tree.Tree, *,
    temperature: float = 1.0,
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
