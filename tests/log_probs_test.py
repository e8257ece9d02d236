# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked log-probs equal whole ones, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay.ops import log_probs


def arguments(tokens, width, rows, vocab_size=None, dtype=np.float64, seed=0):
  """(hidden_NM, table_VM, targets_N, cotangent_N), logits of order one."""
  random = np.random.default_rng(seed)
  targets_N = random.integers(0, vocab_size or rows, tokens)
  return (
      jnp.asarray(random.normal(size=(tokens, width)), dtype),
      jnp.asarray(random.normal(size=(rows, width)) / width**0.5, dtype),
      jnp.asarray(targets_N, jnp.int32),
      jnp.asarray(random.normal(size=tokens), dtype),
  )


def with_gradients(function, **options):
  """Jitted: value and gradients for hidden, table and temperature."""

  @jax.jit
  def run(hidden_NM, table_VM, targets_N, cotangent_N, temperature):
    value_N, pull = jax.vjp(
        lambda h, t, tau: function(h, t, targets_N, temperature=tau, **options),
        hidden_NM, table_VM, temperature,
    )
    names = "value", "hidden", "table", "temperature"
    return dict(zip(names, (value_N, *pull(cotangent_N)), strict=True))

  return run


def assert_equal(actual, expected, tolerance):
  for name, right in expected.items():
    error = np.max(np.abs(actual[name] - right)) / np.max(np.abs(right))
    assert error <= tolerance, (name, error)
    assert actual[name].dtype == right.dtype, name


@pytest.mark.parametrize("rows, vocab_size, chunk", (
    (48, None, 16),  # chunks that divide the vocabulary
    (50, None, 16),  # a ragged last one
    (50, None, 64),  # one larger than the vocabulary
    (50, 43, 16),  # padding rows in the table
))
def test_equals_the_reference_for_any_chunk_size(x64, rows, vocab_size, chunk):
  inputs = *arguments(13, 8, rows, vocab_size), jnp.float64(0.6)
  options = dict(vocab_size=vocab_size)
  expected = with_gradients(log_probs.reference, **options)(*inputs)
  actual = with_gradients(log_probs.chunked, chunk=chunk, **options)(*inputs)
  assert_equal(actual, expected, 1e-13)
  assert not actual["table"][vocab_size or rows :].any()


@pytest.mark.parametrize("dtype, tolerance", (
    (jnp.float32, 1e-5), (jnp.float64, 1e-12),
))
def test_chunks_equal_the_whole_in_less_than_a_quarter_of_its_memory(
    x64, dtype, tolerance
):
  """1000 tokens, 5000 ids, chunks of 128, which do not divide them."""
  inputs = *arguments(1000, 16, 5000, dtype=dtype), jnp.asarray(0.6, dtype)
  runs = [
      with_gradients(function, **options).lower(*inputs).compile()
      for function, options in (
          (log_probs.chunked, dict(chunk=128)), (log_probs.reference, {}),
      )
  ]
  chunked, whole = (run(*inputs) for run in runs)
  assert_equal(chunked, whole, tolerance)
  memory = [run.memory_analysis().temp_size_in_bytes for run in runs]
  logits = 1000 * 5000 * jnp.dtype(dtype).itemsize
  assert memory[1] >= logits, "the reference must show what is to be avoided"
  assert memory[0] < memory[1] / 4, memory


def test_each_token_has_a_cotangent_of_its_own(x64):
  """Not the first token's weight for all: one token's moves its row alone."""
  hidden_NM, table_VM, targets_N, cotangent_N = arguments(13, 8, 50)
  one = jnp.zeros_like(cotangent_N).at[5].set(2.0)
  result = with_gradients(log_probs.chunked, chunk=16)(
      hidden_NM, table_VM, targets_N, one, jnp.float64(1.0)
  )
  rows = np.any(result["hidden"] != 0, axis=1)
  np.testing.assert_array_equal(rows, np.arange(13) == 5)
  probs_V = jax.nn.softmax(table_VM @ hidden_NM[5])
  expected = 2 * (table_VM[targets_N[5]] - probs_V @ table_VM)
  np.testing.assert_allclose(result["hidden"][5], expected, rtol=1e-12)


def test_bfloat16_inputs_are_scored_in_float32(x64):
  """Logits in bfloat16 would be off by 0.01 and more."""
  hidden_NM, table_VM, targets_N, _ = arguments(64, 32, 500)
  hidden_NM, table_VM = (
      (4 * x).astype(jnp.bfloat16) for x in (hidden_NM, table_VM)
  )
  wide = hidden_NM.astype(jnp.float64), table_VM.astype(jnp.float64)
  expected = log_probs.reference(*wide, targets_N, temperature=0.6)
  for function in (log_probs.chunked, log_probs.reference):
    actual = function(hidden_NM, table_VM, targets_N, temperature=0.6)
    assert actual.dtype == jnp.float32
    assert np.max(np.abs(actual - expected)) <= 1e-3
  logits_NV = jnp.einsum("nm,vm->nv", hidden_NM, table_VM)  # in bfloat16
  narrow = jax.nn.log_softmax(logits_NV / 0.6)[jnp.arange(64), targets_N]
  assert np.max(np.abs(narrow - expected)) > 0.01


def test_gradients_have_the_dtypes_of_what_they_are_of():
  hidden_NM, table_VM, targets_N, _ = arguments(6, 8, 20, dtype=np.float32)
  hidden_NM = hidden_NM.astype(jnp.bfloat16)
  gradients = jax.grad(
      lambda *x: jnp.sum(log_probs.chunked(*x, targets_N)), argnums=(0, 1)
  )(hidden_NM, table_VM)
  assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("function", (log_probs.chunked, log_probs.reference))
def test_padding_rows_of_the_table_stay_out_of_the_normaliser(function):
  """Logits −5 four times and four padding rows of logit 0."""
  table_VM = jnp.asarray([[-5.0]] * 4 + [[0.0]] * 4)
  result = function(
      jnp.ones((4, 1)), table_VM, jnp.arange(4), vocab_size=4
  )
  np.testing.assert_allclose(result, [-1.386294] * 4, atol=1e-6)
  counted = function(jnp.ones((1, 1)), table_VM, jnp.arange(1))
  np.testing.assert_allclose(counted, [-6.393010], atol=1e-6)


@pytest.mark.parametrize("function", (log_probs.chunked, log_probs.reference))
@pytest.mark.parametrize("temperature", (0.6, np.float64(0.6), jnp.array(0.6)))
def test_temperature_divides_the_logits(function, temperature):
  result = function(
      jnp.ones((1, 1)), jnp.asarray([[2.0], [1.0], [0.0]]), jnp.arange(1),
      temperature=temperature,
  )
  np.testing.assert_allclose(result, [-0.202573], atol=1e-6)


def test_a_whole_number_is_a_temperature_too():
  hidden_NM, table_VM, targets_N, _ = arguments(6, 8, 20, dtype=np.float32)
  of_int, of_float = (
      jax.grad(
          lambda h, tau=tau: jnp.sum(
              log_probs.chunked(h, table_VM, targets_N, temperature=tau)
          )
      )(hidden_NM)
      for tau in (2, 2.0)
  )
  np.testing.assert_array_equal(of_int, of_float)


def test_a_wide_temperature_does_not_widen_narrow_logits(x64):
  hidden_NM, table_VM, targets_N, _ = arguments(6, 8, 20, dtype=np.float32)
  result = log_probs.chunked(
      hidden_NM, table_VM, targets_N, temperature=np.float64(0.5)
  )
  assert result.dtype == jnp.float32


def test_an_id_outside_the_vocabulary_is_nan_and_no_other_row_is():
  hidden_NM, table_VM, _, _ = arguments(5, 8, 20, dtype=np.float32)
  targets_N = jnp.asarray([-1, 0, 16, 17, 20])
  result = log_probs.chunked(
      hidden_NM, table_VM, targets_N, vocab_size=17, chunk=8
  )
  np.testing.assert_array_equal(
      np.isnan(result), [True, False, False, True, True]
  )


def test_probabilities_of_all_ids_sum_to_one_for_huge_logits_too(x64):
  for scale in (1.0, 1e4):
    hidden_NM, table_VM, _, _ = arguments(1, 8, 50)
    scores_V = log_probs.chunked(
        jnp.tile(scale * hidden_NM, (50, 1)), table_VM, jnp.arange(50), chunk=16
    )
    np.testing.assert_allclose(jnp.sum(jnp.exp(scores_V)), 1, rtol=1e-11)


@pytest.mark.parametrize("vocab_size", (0, -1, 21))
def test_a_vocabulary_the_table_does_not_hold_is_an_error(vocab_size):
  hidden_NM, table_VM, targets_N, _ = arguments(5, 8, 20, dtype=np.float32)
  with pytest.raises(ValueError, match=f"{vocab_size}.*20 rows"):
    log_probs.chunked(hidden_NM, table_VM, targets_N, vocab_size=vocab_size)
