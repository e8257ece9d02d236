# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of replay attention must do.

Subclass `AttentionSuite` in a test file and name the implementation:

  class TestKernel(attention_suite.AttentionSuite):
    attend = staticmethod(kernel.replay_attention)

Its signature and its meaning are those of
`attention_reference.replay_attention`. Results are compared by name: out, lse,
dq, dk, dv, dprefix_k, dprefix_v. An implementation that has no float64 sets
`dtype` and `tolerance` too.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from branch_replay.ops.attention import reference as attention_reference

ARGUMENTS = ("q", "k", "v", "prefix_k", "prefix_v")
GRADIENTS = tuple(f"d{name}" for name in ARGUMENTS)


class Shape(NamedTuple):
  heads: int = 2
  branches: int = 3
  repeats: int = 2
  tokens: int = 21
  positions: int = 37
  head_dim: int = 8


MAIN = Shape()
RAGGED = (13, 0, 21)  # tail lengths of MAIN; the second branch is empty
SHAPES = {
    "one_token": Shape(tokens=1, repeats=1),
    "no_prefix": Shape(positions=0, repeats=5, tokens=9),
    "one_cached_key": Shape(heads=1, branches=1, positions=1, tokens=8),
    "five_queries_a_key": Shape(heads=1, branches=2, repeats=5, positions=8),
}


class Case(NamedTuple):
  """Arguments and cotangents; `tails` None means all tokens are real."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  prefix_k: np.ndarray
  prefix_v: np.ndarray
  length: np.ndarray
  tails: np.ndarray | None
  d_out: np.ndarray
  d_lse: np.ndarray

  def astype(self, dtype):
    """The same numbers rounded; the log-sum-exp is at least float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    rounded = {
        name: jnp.asarray(getattr(self, name), dtype)
        for name in (*ARGUMENTS, "d_out")
    }
    return self._replace(**rounded, d_lse=jnp.asarray(self.d_lse, wide))


def make(shape=MAIN, length=None, tails=None, seed=0) -> Case:
  """Random arguments; the last positions of the prefix may be unused."""
  random = np.random.default_rng(seed)
  heads, branches, repeats, tokens, positions, head_dim = shape
  q_shape = heads, branches, repeats, tokens, head_dim
  k_shape = heads, branches, tokens, head_dim
  prefix_shape = heads, positions, head_dim
  arrays = [
      random.normal(size=size)
      for size in (q_shape, k_shape, k_shape, prefix_shape, prefix_shape)
  ]
  return Case(
      *arrays,
      length=np.int32(positions if length is None else length),
      tails=None if tails is None else np.array(tails, np.int32),
      d_out=random.normal(size=q_shape),
      d_lse=random.normal(size=q_shape[:-1]),
  )


@functools.cache
def compiled(attend):
  """One jitted function of a case: outputs and all gradients, by name."""

  @jax.jit
  def run(case: Case):
    def outputs(*arguments):
      return attend(*arguments, case.length, lengths_G=case.tails)

    arguments = tuple(getattr(case, name) for name in ARGUMENTS)
    (out, lse), pull = jax.vjp(outputs, *arguments)
    gradients = pull((case.d_out, case.d_lse))
    return {"out": out, "lse": lse} | dict(
        zip(GRADIENTS, gradients, strict=True)
    )

  return run


def run(attend, case: Case):
  return jax.tree.map(np.asarray, compiled(attend)(case))


def errors(actual, expected):
  """Worst error of each result, as a share of its largest entry."""
  worst = {}
  for name, right in expected.items():
    got, right = actual[name].astype(float), right.astype(float)
    nothing = np.isneginf(right)
    np.testing.assert_array_equal(np.isneginf(got), nothing, name)
    difference = np.abs(np.where(nothing, 0, got) - np.where(nothing, 0, right))
    scale = np.max(np.abs(right), initial=0, where=~nothing)
    # NaN compares as false: it must not pass for a small error.
    assert np.all(np.isfinite(difference)), name
    worst[name] = np.max(difference, initial=0) / (scale or 1.0)
  return worst


def assert_close(actual, expected, tolerance):
  worst = errors(actual, expected)
  assert max(worst.values()) <= tolerance, worst


def assert_same_bits(actual, expected, names=None):
  for name in names or expected:
    np.testing.assert_array_equal(actual[name], expected[name], name)


@pytest.mark.usefixtures("x64")
class AttentionSuite:
  """Subclass it and set `attend`."""

  attend = staticmethod(attention_reference.replay_attention)
  dtype = jnp.float64
  tolerance = 1e-12

  def run(self, case):
    return run(self.attend, case.astype(self.dtype))

  def check(self, case, dtype=None, tolerance=None):
    case = case.astype(dtype or self.dtype)
    expected = run(attention_reference.replay_attention, case)
    assert_close(
        run(self.attend, case), expected, tolerance or self.tolerance
    )

  @pytest.mark.parametrize("length", (0, 1, 8, 19, 33, 37))
  def test_equals_the_reference_for_any_prefix_length(self, length):
    self.check(make(length=length))

  @pytest.mark.parametrize("tails", (RAGGED, (1, 21, 8), (0, 0, 0)))
  @pytest.mark.parametrize("length", (0, 19))
  def test_equals_the_reference_for_any_tail_lengths(self, length, tails):
    self.check(make(length=length, tails=tails))

  @pytest.mark.parametrize("name", SHAPES)
  def test_equals_the_reference_for_any_shape(self, name):
    self.check(make(SHAPES[name]))

  @pytest.mark.parametrize("length", (0, 19, 37))
  def test_equals_the_reference_in_float32(self, length):
    self.check(make(length=length, tails=RAGGED), jnp.float32, 1e-5)

  def test_bfloat16_is_as_close_as_its_inputs_are_rounded(self):
    """Against float64 on the same rounded inputs: only the op's own error.

    A number has 8 significant bits and an error of 2⁻⁹ = 0.002; sums of terms
    so rounded stay within a few times that. The log-sum-exp is float32 and
    sees at most the rounding of scaled queries.
    """
    case = make(length=19, tails=RAGGED).astype(jnp.bfloat16)
    actual = run(self.attend, case)
    expected = run(
        attention_reference.replay_attention, case.astype(jnp.float64)
    )
    assert actual["out"].dtype == jnp.bfloat16
    assert actual["lse"].dtype == jnp.float32
    worst = errors(actual, expected)
    assert worst.pop("lse") < 0.004
    assert max(worst.values()) < 0.015, worst

  def test_results_have_the_dtypes_of_the_reference(self):
    for dtype in (self.dtype, jnp.float32, jnp.bfloat16):
      case = make(length=19, tails=RAGGED).astype(dtype)
      actual, expected = (
          jax.eval_shape(compiled(attend), case)
          for attend in (self.attend, attention_reference.replay_attention)
      )
      assert actual == expected

  def test_no_tail_lengths_means_all_tokens_are_real(self):
    whole = make(length=19, tails=(21, 21, 21))
    actual, expected = (
        self.run(case) for case in (whole._replace(tails=None), whole)
    )
    assert_close(actual, expected, self.tolerance)

  def test_rows_past_their_length_are_empty_and_send_no_gradient(self):
    result = self.run(make(length=19, tails=RAGGED))
    padding_GT = np.arange(21) >= np.array(RAGGED)[:, None]
    for name in ("out", "dq"):
      by_row = np.moveaxis(result[name], 2, 0)  # [R, K, G, T, D]
      assert not by_row[:, :, padding_GT].any(), name
      assert by_row[:, :, ~padding_GT].all(), name
    lse = np.moveaxis(result["lse"], 2, 0)
    assert np.isneginf(lse[:, :, padding_GT]).all()
    assert np.isfinite(lse[:, :, ~padding_GT]).all()
    for name in ("dk", "dv"):
      assert not result[name][:, padding_GT].any(), name
      assert result[name][:, ~padding_GT].all(), name
    for name in GRADIENTS:
      assert np.isfinite(result[name]).all(), name

  def test_padding_of_a_tail_changes_nothing(self):
    case = make(length=19, tails=RAGGED)
    padding = (np.arange(21) >= np.array(RAGGED)[:, None])[None]
    other = case._replace(
        q=np.where(padding[:, :, None, :, None], 1e3, case.q),
        k=np.where(padding[..., None], -1e3, case.k),
        v=np.where(padding[..., None], 1e3, case.v),
    )
    assert_same_bits(self.run(other), self.run(case))

  def test_positions_past_the_prefix_length_change_nothing(self):
    case = make(length=19, tails=RAGGED)
    garbage = case._replace(
        prefix_k=case.prefix_k.copy(), prefix_v=case.prefix_v.copy()
    )
    garbage.prefix_k[:, 19:] = 1e4
    garbage.prefix_v[:, 19:] = -1e4
    actual, expected = (self.run(x) for x in (garbage, case))
    assert_same_bits(actual, expected)
    for name in ("dprefix_k", "dprefix_v"):
      assert not actual[name][:, 19:].any(), name
      assert actual[name][:, :19].all(), name

  def test_another_prefix_or_tail_length_does_not_compile_again(self):
    traces = []

    def counted(*arguments, **options):
      traces.append(1)
      return self.attend(*arguments, **options)

    step = compiled(counted)
    for length, tails in ((0, RAGGED), (19, RAGGED), (37, (21, 1, 0))):
      step(make(length=length, tails=tails).astype(self.dtype))
    assert len(traces) == 1

  def test_siblings_cannot_see_each_other(self):
    """Forward and backward, bit for bit."""
    case = make(length=19, tails=RAGGED)
    other = case._replace(
        **{name: getattr(case, name).copy() for name in ("q", "k", "v")}
    )
    for array in (other.q, other.k, other.v):
      array[:, 2] += 1
    actual, expected = (self.run(x) for x in (other, case))
    for name in ("out", "lse", "dq", "dk", "dv"):
      np.testing.assert_array_equal(
          actual[name][:, :2], expected[name][:, :2], name
      )
      assert (actual[name][:, 2] != expected[name][:, 2]).any(), name

  def test_gradient_is_zero_exactly_where_a_token_cannot_look(self):
    """One row's output depends on the prefix and its own past, all of it."""
    case = make(length=19)
    head, branch, repeat, token = row = 1, 2, 0, 13
    d_out, d_lse = np.zeros_like(case.d_out), np.zeros_like(case.d_lse)
    d_out[row], d_lse[row] = case.d_out[row], case.d_lse[row]
    result = self.run(case._replace(d_out=d_out, d_lse=d_lse))
    visible = {name: np.zeros_like(result[name], bool) for name in GRADIENTS}
    visible["dq"][row] = True
    for name in ("dk", "dv"):
      visible[name][head, branch, : token + 1] = True
    for name in ("dprefix_k", "dprefix_v"):
      visible[name][head, :19] = True
    for name, seen in visible.items():
      np.testing.assert_array_equal(result[name] != 0, seen, name)

  def test_two_queries_on_three_cached_keys_see_four_and_five_keys(self):
    """Equal scores and one-hot values: the output shows who is visible."""
    one_hot = jnp.eye(6, dtype=self.dtype)  # head_dim 6; five keys
    nothing = jnp.zeros((1, 1, 1, 3, 6), self.dtype)
    out, lse = jax.jit(self.attend)(
        nothing[..., :2, :], nothing[0, ..., :2, :], one_hot[None, None, 3:5],
        nothing[0, 0], one_hot[None, :3], 3,
    )
    expected = [[1 / 4] * 4 + [0, 0], [1 / 5] * 5 + [0]]
    np.testing.assert_allclose(out[0, 0, 0], expected, atol=self.tolerance)
    np.testing.assert_allclose(
        lse[0, 0, 0], np.log([4, 5]), rtol=self.tolerance
    )

  def test_very_negative_logits_are_not_taken_for_masked_ones(self):
    case = make(length=19)
    for array in (case.q, case.k, case.prefix_k):
      array[...] = 0
    case.q[..., 0] = -1e5 * np.sqrt(8)  # 1/√D undoes the root
    case.k[..., 0] = case.prefix_k[..., 0] = 1
    result = self.run(case)
    keys_T = 19 + np.arange(1, 22)
    sums = case.prefix_v[:, None, None, :19].sum(3, keepdims=True) + np.cumsum(
        case.v[:, :, None], axis=3
    )
    expected = sums / keys_T[None, None, None, :, None]
    atol = 1e5 * self.tolerance
    np.testing.assert_allclose(
        result["out"] - expected, 0 * result["out"], atol=atol
    )
    log_keys = np.broadcast_to(np.log(keys_T), result["lse"].shape)
    np.testing.assert_allclose(result["lse"] + 1e5, log_keys, atol=atol)
    for name in GRADIENTS:
      assert np.isfinite(result[name]).all(), name

  def test_cotangent_of_the_log_sum_exp_reaches_queries_and_keys_alone(self):
    """∂lse/∂kⱼ = pⱼ q/√D, ∂lse/∂q = Σ pⱼ kⱼ/√D, ∂lse/∂v = 0."""
    case = make(length=19)
    row = 1, 2, 1, 13
    d_lse = np.zeros_like(case.d_lse)
    d_lse[row] = 1
    result = self.run(case._replace(d_out=0 * case.d_out, d_lse=d_lse))
    q_D = case.q[row]
    keys_BD = np.concatenate([case.prefix_k[1, :19], case.k[1, 2, :14]])
    scores_B = keys_BD @ q_D / np.sqrt(8)
    lse = np.log(np.exp(scores_B).sum())
    probs_B = np.exp(scores_B - lse)
    d_keys_BD = np.concatenate(
        [result["dprefix_k"][1, :19], result["dk"][1, 2, :14]]
    )
    for actual, expected in (
        (result["lse"][row], lse),
        (result["dq"][row], probs_B @ keys_BD / np.sqrt(8)),
        (d_keys_BD, np.outer(probs_B, q_D) / np.sqrt(8)),
    ):
      np.testing.assert_allclose(
          actual, expected, rtol=10 * self.tolerance, atol=self.tolerance
      )
    assert not result["dv"].any() and not result["dprefix_v"].any()

  def test_gradient_equals_finite_differences(self):
    case = make(Shape(1, 2, 2, 9, 11, 4), length=9).astype(self.dtype)

    @jax.jit
    def outputs(*arguments):
      return self.attend(*arguments, case.length)

    check_grads(outputs, case[:5], order=1, modes=["rev"])
