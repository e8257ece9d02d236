# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs new tokens of every row, after the prefix and the row's cached tokens.

Rows may be at different positions. A row with n cached inputs runs its T new
inputs as inputs n … n + T − 1. They are written to these slots of the cache and
see all slots up to their own. So a row is rolled back by passing a smaller n:
slots from n on are not seen, and are overwritten before they are. Inputs beyond
the capacity of the cache are not written, and their outputs must not be used.

A recurrent layer has no slots. It keeps its state from before the new inputs,
and `settle` then advances it by as many of them as the row accepted.
"""

import jax
import jax.numpy as jnp

from branch_replay.engine import decoding
from branch_replay.engine import segment
from branch_replay.engine import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import few_rows


def select_rows(cache, index):
  """Selects rows of a cache.

  Args:
    cache: a cache as `state.caches` makes it, with rows on axis 2.
    index: i32, the rows to take, in the order in which they are wanted.
  """
  return jax.tree.map(lambda x: jnp.take(x, index, axis=2), cache)


def slots(starts_N, tokens: int):
  """i32[N, T]: the cache slots of T inputs that start at `starts_N`."""
  return starts_N[:, None] + jnp.arange(tokens, dtype=starts_N.dtype)[None]


def run(
    model: decoder.Decoder, params, state: state_lib.PrefixState, cache,
    starts_N, tokens_NT, *, layers=None,
):
  """Runs T new inputs of every row.

  Args:
    model: the decoder.
    params: its parameters.
    state: captured state of the prefix, which all rows share.
    cache: made by `state.caches`, with inputs 0 … start − 1 of every row.
    starts_N: i32, number of cached inputs of each row.
    tokens_NT: i32, the new inputs of each row.
    layers: the model's layers one by one, as `decoding.decode` takes them, for
      speed on CPU; None to use those in `params`.

  Returns:
    hidden_NTM after the final norm, the cache with the new inputs written, and
    what `settle` needs to accept only some of them.
  """
  outer = {"params": segment.outer(params)}
  x_NTM = model.apply(outer, tokens_NT, method="embed_tokens")
  x_NTM, cache, pending = decoding.decode(
      model.config, params["layers"], x_NTM, state, cache,
      slots(starts_N, tokens_NT.shape[1]), layers,
  )
  return model.apply(outer, x_NTM, method="normalize"), cache, pending


def settle(model: decoder.Decoder, params, cache, pending, taken_N):
  """Advances a cache by the new inputs that each row accepts.

  Args:
    model: the decoder.
    params: its parameters.
    cache: second result of `run`.
    pending: third result of the same call of `run`.
    taken_N: i32, how many of the T new inputs each row accepts, counted from
      the first.

  Returns:
    The cache, for the next call of `run`.
  """
  return decoding.settle(
      model.config, params["layers"], cache, pending, taken_N
  )


def head_table(model: decoder.Decoder, params) -> jax.Array:
  """The output head's rows for real tokens, without padding, [V, M]."""
  outer = {"params": segment.outer(params)}
  return model.apply(outer, method="head_table")[: model.config.vocab_size]


def logits(hidden_NM, table_VM) -> jax.Array:
  """hidden_NM · table_VMᵀ, [N, V], at least float32."""
  return few_rows.product(hidden_NM, table_VM.astype(hidden_NM.dtype))
