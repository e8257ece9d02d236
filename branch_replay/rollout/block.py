# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A block of new tokens of every row, on top of the prefix and of a cache.

Rows stand at different positions. A row of n cached inputs runs its block at
inputs n, n + 1, …, which are written to those slots of the cache and see the
slots up to their own. So a row is rolled back by a smaller n: what lies beyond
is not seen, and overwritten before it is. Inputs past the room of the cache are
not written, never shifted onto others; their outputs are not to be used.
"""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import attention


def empty_cache(config: config_lib.ModelConfig, rows: int, room: int):
  """Keys and values of the rows' own inputs, pair of [L, K, N, S, D]."""
  shape = (
      config.num_layers, config.num_kv_heads, rows, room, config.head_dim
  )
  return tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(2))


def keep(cache, index):
  """The cache of some of the rows, in the order of `index`."""
  return tuple(jnp.take(x, index, axis=2) for x in cache)


def slots(starts_N, tokens: int):
  """i32[N, T]: the cache slots of a block of T inputs."""
  return starts_N[:, None] + jnp.arange(tokens, dtype=starts_N.dtype)[None]


def write(cache, index, slots_NT, present):
  """The cache with a block's keys and values at its slots of one layer.

  Args:
    cache: pair of [L, K, N, S, D].
    index: i32 scalar, which layer.
    slots_NT: where; slots ≥ S are dropped.
    present: pair of [K, N, T, D].
  """
  rows_N1 = jnp.arange(slots_NT.shape[0])[:, None]
  return tuple(
      old.at[index, :, rows_N1, slots_NT].set(
          new.transpose(1, 2, 0, 3), mode="drop"
      )
      for old, new in zip(cache, present, strict=True)
  )


def run(
    model: decoder.Decoder, params, state: state_lib.PrefixState, cache,
    starts_N, tokens_NT,
):
  """Runs a block of every row.

  Args:
    model: the decoder.
    params: its parameters.
    state: the prefix, shared by all rows.
    cache: of `empty_cache`, holding inputs 0 … start − 1 of every row.
    starts_N: i32, inputs of each row that are cached.
    tokens_NT: i32, its next inputs.

  Returns:
    hidden_NTM after the final norm, and the cache with the block in it.
  """
  config = model.config
  outer = {"params": segment.outer(params)}
  x_NTM = model.apply(outer, tokens_NT, method="embed_tokens")
  slots_NT = slots(starts_N, tokens_NT.shape[1])

  def layer(carry, inputs):
    x_NTM, cache = carry
    index, layer_params = inputs

    def attend(q, k, v):
      new = write(cache, index, slots_NT, (k, v))
      out = attention.decode(
          q, new, index, slots_NT, state.mixer, index, state.length
      )
      return out, new

    x_NTM, cache, _ = segment.layer_forward(
        config, layer_params, x_NTM, state.length + slots_NT, attend
    )
    return (x_NTM, cache), None

  numbered = jnp.arange(config.num_layers), params["layers"]
  (x_NTM, cache), _ = lax.scan(layer, (x_NTM, cache), numbered)
  return model.apply(outer, x_NTM, method="normalize"), cache


def head_table(model: decoder.Decoder, params) -> jax.Array:
  """The head's rows of real tokens, [V, M]."""
  outer = {"params": segment.outer(params)}
  return model.apply(outer, method="head_table")[: model.config.vocab_size]


def logits(hidden_NM, table_VM) -> jax.Array:
  """[N, V], at least float32."""
  return lax.dot_general(
      hidden_NM,
      table_VM.astype(hidden_NM.dtype),
      (((1,), (1,)), ((), ())),
      preferred_element_type=config_lib.at_least_float32(hidden_NM.dtype),
  )
