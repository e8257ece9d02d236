# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A block of new tokens of every row, on top of the prefix and of a cache.

Rows stand at different positions. A row of n cached inputs runs its block at
inputs n, n + 1, …, which are written to those slots of the cache and see the
slots up to their own. So a row is rolled back by a smaller n: what lies beyond
is not seen, and overwritten before it is. Inputs past the room of the cache are
not written, never shifted onto others; their outputs are not to be used.

A recurrent layer has no slots: of a block of more than one input it keeps what
came before, and `settle` takes in as many of the inputs as the row did.
"""

import jax
import jax.numpy as jnp

from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import few_rows


def select_rows(cache, index):
  """The cache of some of the rows, in the order of `index`."""
  return jax.tree.map(lambda x: jnp.take(x, index, axis=2), cache)


def slots(starts_N, tokens: int):
  """i32[N, T]: the cache slots of a block of T inputs."""
  return starts_N[:, None] + jnp.arange(tokens, dtype=starts_N.dtype)[None]


def run(
    model: decoder.Decoder, params, state: state_lib.PrefixState, cache,
    starts_N, tokens_NT, *, layers=None,
):
  """Runs a block of every row.

  Args:
    model: the decoder.
    params: its parameters.
    state: the prefix, shared by all rows.
    cache: of `state.caches`, holding inputs 0 … start − 1 of every row.
    starts_N: i32, inputs of each row that are cached.
    tokens_NT: i32, its next inputs.
    layers: its layers one by one, as `segment.decode` takes them, or None.

  Returns:
    hidden_NTM after the final norm, the cache with the block in it, and what
    `settle` makes of both the cache after some of its inputs.
  """
  outer = {"params": segment.outer(params)}
  x_NTM = model.apply(outer, tokens_NT, method="embed_tokens")
  x_NTM, cache, block = segment.decode(
      model.config, params["layers"], x_NTM, state, cache,
      slots(starts_N, tokens_NT.shape[1]), layers,
  )
  return model.apply(outer, x_NTM, method="normalize"), cache, block


def settle(model: decoder.Decoder, params, cache, block, taken_N):
  """The cache after the first `taken_N` inputs of every row's block."""
  return segment.settle(
      model.config, params["layers"], cache, block, taken_N
  )


def head_table(model: decoder.Decoder, params) -> jax.Array:
  """The head's rows of real tokens, [V, M]."""
  outer = {"params": segment.outer(params)}
  return model.apply(outer, method="head_table")[: model.config.vocab_size]


def logits(hidden_NM, table_VM) -> jax.Array:
  """[N, V], at least float32."""
  return few_rows.product(hidden_NM, table_VM.astype(hidden_NM.dtype))
