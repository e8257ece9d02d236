# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens without an array of [tokens, vocabulary]."""

import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from branch_replay import config as config_lib

# Name of the residual the engine keeps when it recomputes a readout: N numbers
# that save one pass over the vocabulary.
LOG_SUM_EXP = "log_sum_exp"

# ids; float32 logits of 512 tokens are then 4 MiB, which fits in a cache.
_CHUNK = 2048


class Columns(NamedTuple):
  """How to gather the head's columns if each device has some of them.

  Attributes:
    layout: the layout, whose `gather` and `reduce` are used; see
      `branch_replay.layout`.
    path: path of the table among the parameters.
  """

  layout: Any
  path: str

  def gather(self, table_BM):
    return self.layout.gather(self.path, {"table": table_BM})["table"]

  def reduce(self, d_table_BM):
    return self.layout.reduce(self.path, {"table": d_table_BM})["table"]


def reference(
    hidden_NM, table_VM, targets_N, *, temperature=1.0, vocab_size=None
):
  """Readable `chunked`: whole logits, log_softmax, ordinary autodiff."""
  dtype = config_lib.at_least_float32(hidden_NM.dtype)
  logits_NV = jnp.einsum(
      "nm,vm->nv",
      hidden_NM,
      table_VM[:vocab_size].astype(hidden_NM.dtype),
      preferred_element_type=dtype,
  )
  log_probs_NV = jax.nn.log_softmax(logits_NV / temperature, axis=-1)
  return jnp.take_along_axis(log_probs_NV, targets_N[:, None], axis=1)[:, 0]


def chunked(
    hidden_NM, table_VM, targets_N, *, temperature=1.0, vocab_size=None,
    chunk=_CHUNK, columns: Columns | None = None,
):
  """log p(target) = zₜ/τ − log Σᵥ exp(zᵥ/τ), with z = hidden · tableᵀ.

  The vocabulary is processed in chunks, forward and backward. The backward pass
  computes the logits again from the saved log-sum-exp; every token has its own
  cotangent.

  Args:
    hidden_NM: hidden states after the final norm.
    table_VM: the head, or this device's columns of it.
    targets_N: i32 ids. For an id outside [0, vocab_size) the result is NaN.
    temperature: τ > 0, the temperature the tokens were sampled at.
    vocab_size: number of rows of the table that are real tokens; the others are
      padding and ignored. None for all.
    chunk: ids in a chunk; it need not divide the vocabulary.
    columns: how to gather the table's columns; None if all are here.

  Returns:
    log_probs_N, at least float32.

  Raises:
    ValueError: vocab_size is larger than the table, or not positive.
  """
  chex.assert_rank([hidden_NM, table_VM, targets_N], [2, 2, 1])
  vocab_size = table_VM.shape[0] if vocab_size is None else vocab_size
  if not 0 < vocab_size <= table_VM.shape[0]:
    raise ValueError(
        f"vocab_size={vocab_size} of a table of {table_VM.shape[0]} rows."
    )
  return _chunked(
      hidden_NM, table_VM, targets_N, temperature, (vocab_size, chunk, columns)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(hidden_NM, table_VM, targets_N, temperature, sizes):
  return _forward(hidden_NM, table_VM, targets_N, temperature, sizes)[0]


def _chunk_logits(hidden_NM, table_BM, temperature):
  dtype = config_lib.at_least_float32(hidden_NM.dtype)
  logits_NB = lax.dot_general(
      hidden_NM,
      table_BM,
      (((1,), (1,)), ((), ())),
      preferred_element_type=dtype,
  )
  return logits_NB / jnp.asarray(temperature, dtype)


def _over_chunks(body, carry, table_VM, dtype, sizes):
  """Folds body(carry, start, table_BM) over the vocabulary."""
  vocab_size, chunk, columns = sizes
  chunk = min(chunk, vocab_size)
  whole = vocab_size // chunk

  def whole_BM(start, size):
    table_BM = lax.dynamic_slice_in_dim(table_VM, start, size)
    table_BM = table_BM.astype(dtype)
    return columns.gather(table_BM) if columns else table_BM

  def visit(i, carry):
    return body(carry, i * chunk, whole_BM(i * chunk, chunk))

  carry = lax.fori_loop(0, whole, visit, carry)
  if vocab_size % chunk:
    start = whole * chunk
    carry = body(carry, start, whole_BM(start, vocab_size % chunk))
  return carry


def _forward(hidden_NM, table_VM, targets_N, temperature, sizes):
  dtype = config_lib.at_least_float32(hidden_NM.dtype)
  rows = hidden_NM.shape[:1]

  def visit(carry, start, table_BM):
    top_N, total_N, chosen_N = carry
    logits_NB = _chunk_logits(hidden_NM, table_BM, temperature)
    new_top_N = jnp.maximum(top_N, jnp.max(logits_NB, axis=-1))
    total_N = total_N * jnp.exp(top_N - new_top_N) + jnp.sum(
        jnp.exp(logits_NB - new_top_N[:, None]), axis=-1
    )
    local_N = targets_N - start
    here_N = (local_N >= 0) & (local_N < table_BM.shape[0])
    picked_N = jnp.take_along_axis(
        logits_NB, jnp.where(here_N, local_N, 0)[:, None], axis=1
    )[:, 0]
    return new_top_N, total_N, jnp.where(here_N, picked_N, chosen_N)

  start = (
      jnp.full(rows, -jnp.inf, dtype),
      jnp.zeros(rows, dtype),
      jnp.full(rows, jnp.nan, dtype),
  )
  top_N, total_N, chosen_N = _over_chunks(
      visit, start, table_VM, hidden_NM.dtype, sizes
  )
  lse_N = checkpoint_name(top_N + jnp.log(total_N), LOG_SUM_EXP)
  residuals = hidden_NM, table_VM, targets_N, temperature, lse_N
  return chosen_N - lse_N, residuals


def _backward(sizes, residuals, d_log_probs_N):
  hidden_NM, table_VM, targets_N, temperature, lse_N = residuals
  dtype, columns = lse_N.dtype, sizes[-1]
  divisor = jnp.asarray(temperature, dtype)

  def visit(carry, start, table_BM):
    d_hidden_NM, d_table_VM, d_temperature = carry
    logits_NB = _chunk_logits(hidden_NM, table_BM, temperature)
    ids_B = start + jnp.arange(table_BM.shape[0])
    hit_NB = ids_B[None, :] == targets_N[:, None]
    probs_NB = jnp.exp(logits_NB - lse_N[:, None])
    d_logits_NB = (hit_NB - probs_NB) * d_log_probs_N[:, None]
    # z/τ: ∂/∂τ = −(z/τ)/τ.
    d_temperature -= jnp.sum(d_logits_NB * logits_NB) / divisor
    d_logits_NB = (d_logits_NB / divisor).astype(hidden_NM.dtype)
    d_hidden_NM += jnp.dot(
        d_logits_NB,
        table_BM,
        preferred_element_type=dtype,
    )
    d_table_BM = lax.dot_general(
        d_logits_NB,
        hidden_NM,
        (((0,), (0,)), ((), ())),
        preferred_element_type=dtype,
    )
    d_table_BM = d_table_BM.astype(d_table_VM.dtype)
    if columns:
      d_table_BM = columns.reduce(d_table_BM)
    d_table_VM = lax.dynamic_update_slice(d_table_VM, d_table_BM, (start, 0))
    return d_hidden_NM, d_table_VM, d_temperature

  start = (
      jnp.zeros(hidden_NM.shape, dtype),
      jnp.zeros(table_VM.shape, table_VM.dtype),
      jnp.zeros((), dtype),
  )
  d_hidden_NM, d_table_VM, d_temperature = _over_chunks(
      visit, start, table_VM, hidden_NM.dtype, sizes
  )
  return (
      d_hidden_NM.astype(hidden_NM.dtype),
      d_table_VM,
      None,
      d_temperature.astype(jnp.result_type(temperature)),
  )


_chunked.defvjp(_forward, _backward)
