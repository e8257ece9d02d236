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
from branch_replay.engine import band as band_lib
from branch_replay.engine import prefix as prefix_lib
from branch_replay.models import decoder
from branch_replay.models import params as params_lib
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.ops.attention import reference as attention_reference


def dense_log_probs(
    model: decoder.Decoder, params, data: group_lib.Group | token_tree.Tree, *,
    temperature: float = 1.0, band: band_lib.Band | None = None,
) -> jax.Array:
  """Computes `log_probs` the slow, plain way, as a reference.

  It runs every sequence whole, with plain attention and ordinary autodiff.

  Args:
    model: the decoder.
    params: its parameters.
    data: one group, or a tree.
    temperature: τ > 0 of softmax(logits / τ).
    band: makes the gradient that of "banded": scores and values of pairs that
      the band leaves out stand under `stop_gradient`. None for the full
      gradient. The log-probs are the same.

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
    inner_GS = (data.paths >= 0) & data.inner[data.paths]
    hidden_GSM = model.apply(
        {"params": params}, tokens_GS, method="hidden",
        attend=_cut(attention_reference.causal, band, inner_GS),
    )
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
  rows_GS = data.rows()
  inner_S = jnp.arange(rows_GS.shape[1]) < data.prompt_length - 1
  hidden_GSM = model.apply(
      {"params": params}, rows_GS, method="hidden",
      attend=_cut(attend, band, jnp.broadcast_to(inner_S, rows_GS.shape)),
  )
  hidden_GTM = lax.dynamic_slice_in_dim(
      hidden_GSM, data.prompt_length - 1, data.tails.shape[1], axis=1
  )
  return jnp.where(data.mask(), of(hidden_GTM, data.tails), 0)


def _cut(attend, band: band_lib.Band | None, inner_GS):
  """`attend` with its backward pass cut to a band, but for windows."""
  if band is None:
    return attend
  lowest_GS = band.lowest(jnp.arange(inner_GS.shape[1]), inner_GS)

  def banded(q_KGRTD, k_KGTD, v_KGTD, window=None):
    if window is not None:
      return attend(q_KGRTD, k_KGTD, v_KGTD, window=window)
    return attend(
        q_KGRTD, k_KGTD, v_KGTD, lowest_GT=lowest_GS, sinks=band.sinks
    )

  return banded
