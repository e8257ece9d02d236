# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay attention by kernels that ship with JAX.

Splash runs the shared suite in Pallas's interpreter. cuDNN has none: what we
write around it runs the suite on a stand-in of what its two passes promise, and
is lowered for CUDA. Sizes are those of a chip divided by sixteen or more, so
that small shapes visit every loop more than once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.ops import attention
from branch_replay.ops.attention import kernel_cudnn
from branch_replay.ops.attention import kernel_splash
from branch_replay.ops.attention import kernels
from branch_replay.ops.attention import loops
from branch_replay.ops.attention import stretches
from branch_replay.planning import compare
from tests import attention_suite as suite
from tests import tiny

SPLASH = kernels.Kernel("splash", interpret=True)
CUDNN = kernels.Kernel("cudnn")


@pytest.fixture
def x64():
  """In place of conftest's: the kernels have no float64."""


@pytest.fixture(scope="module", autouse=True)
def small_sizes():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernel_splash.splash, "NUM_LANES", 8)
    patch.setattr(kernel_cudnn, "unit", lambda: 8)
    patch.setattr(stretches, "STRETCHES", (16, 8))
    patch.setattr(stretches, "BLOCK", 16)
    jax.clear_caches()
    yield
  jax.clear_caches()


def scores(q, k, scale, causal):
  s = jnp.einsum("bntd,bmsd->bnts", q, k).astype(jnp.float32) * scale
  seen = jnp.tri(*s.shape[2:], dtype=bool) if causal else True
  return jnp.where(seen, s, -jnp.inf)


def forward_rule(q, k, v, *rest):
  """What cuDNN's training pass leaves: output and log-sum-exp."""
  nothing, settings = rest[:7], rest[7:]
  s = scores(q, k, settings[0], settings[4].name == "CAUSAL")
  lse = jax.nn.logsumexp(s, axis=-1)
  p = jnp.exp(s - lse[..., None]).astype(q.dtype)
  out = jnp.einsum("bnts,bmsd->bntd", p, v)
  return out, (q, k, v, *nothing, lse, out)


def backward_rule(scale, *rest):
  """What its backward pass computes, from any log-sum-exp and output."""
  *settings, (q, k, v, *_, lse, out), d_out = rest
  s = scores(q, k, scale, settings[3].name == "CAUSAL")
  p = jnp.exp(s - lse[..., None])
  product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
  delta = jnp.sum(product, axis=-1, keepdims=True)
  d_p = jnp.einsum("bntd,bmsd->bnts", d_out, v)
  d_s = (p * (d_p - delta) * scale).astype(q.dtype)
  dq = jnp.einsum("bnts,bmsd->bntd", d_s, k)
  dk = jnp.einsum("bnts,bntd->bsd", d_s, q)[:, None]
  dv = jnp.einsum("bnts,bntd->bsd", p.astype(q.dtype), d_out)[:, None]
  return dq, dk, dv, *(None,) * 7


@pytest.fixture
def stand_in(monkeypatch):
  cudnn = kernel_cudnn.cudnn
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  monkeypatch.setattr(cudnn, "_dot_product_attention_fwd_rule", forward_rule)
  monkeypatch.setattr(cudnn, "_dot_product_attention_bwd_rule", backward_rule)
  fit = kernels._FITS["cudnn"]._replace(
      platform="cpu", dtypes=("bfloat16", "float32"), multiple=1
  )
  monkeypatch.setitem(kernels._FITS, "cudnn", fit)


def by(name):
  return staticmethod(
      functools.partial(attention.replay_attention, implementation=name)
  )


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*float64.*is not available")
class TestSplash(suite.AttentionSuite):
  attend = by("splash")
  dtype = jnp.float32
  tolerance = 2e-6


@pytest.mark.filterwarnings("ignore:.*float64.*is not available")
@pytest.mark.usefixtures("stand_in")
class TestCudnn(suite.AttentionSuite):
  attend = by("cudnn")
  dtype = jnp.float32
  tolerance = 2e-6

  def test_cotangent_of_the_log_sum_exp_reaches_queries_and_keys_alone(self):
    """A row that only the log-sum-exp pulls on sends values 2⁻⁶⁰."""
    case = suite.make(length=19)
    result = self.run(case._replace(d_out=0 * case.d_out))
    for name in ("dv", "dprefix_v"):
      assert 0 < np.abs(result[name]).max() < 1e-15
    self.check(case._replace(d_out=0 * case.d_out, v=0 * case.v))


@pytest.mark.parametrize("delta", (0.0, 3.0, -1e-9))
@pytest.mark.parametrize("size", (0.0, 1.0, 1e-18, 1e18))
def test_an_output_with_the_given_delta(delta, size):
  rows = jnp.asarray([[3.0, -4.0, 0.0], [1.0, 1.0, -2.0]]) * size
  wanted = jnp.full((1, 2), delta * (size or 1))
  d_out, out = kernel_cudnn.with_delta(rows[None], wanted)
  got = np.sum(np.asarray(d_out, float) * np.asarray(out, float), axis=-1)
  np.testing.assert_allclose(got, wanted, rtol=1e-6)
  if size or not delta:
    np.testing.assert_array_equal(d_out[0], rows)


def arrays(shape, *shapes, seed=0):
  random = np.random.default_rng(seed)
  return [jnp.asarray(random.normal(size=s), "float32")
          for s in (shape, *shapes)]


@pytest.mark.parametrize("offset", (0, 1, 2))
def test_every_third_key_of_a_segment_as_lower_triangles(offset):
  """As on one of three devices; queries before the first key see nothing."""
  stripe = attention.Stripe(3, offset)
  q, d_out, k, v = arrays(*[(2, 2, 2, 33, 8)] * 2, *[(2, 2, 11, 8)] * 2)
  lse, delta = arrays(*[(2, 2, 2, 33)] * 2, seed=1)
  lse = lse.at[:, 1, :, 30:].set(jnp.inf) + 9
  out, found = stretches.segment_forward(SPLASH, q, k, v, stripe)
  right_out, right = loops.segment_forward(q, k, v, stripe)
  np.testing.assert_array_equal(np.isneginf(found), np.isneginf(right))
  assert np.isneginf(found[..., :offset]).all()
  np.testing.assert_allclose(found, right, atol=1e-6)
  np.testing.assert_allclose(out, right_out, atol=1e-6)
  arguments = loops.QueryRows(d_out, q, lse, delta), k, v, stripe
  for got, wanted in zip(
      stretches.segment_backward(SPLASH, *arguments),
      loops.segment_backward(*arguments), strict=True,
  ):
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    assert np.abs(wanted).max() > 1e-4


def calls_of(monkeypatch, function, *arguments):
  """What the kernels of a traced function were called with."""
  calls = []

  def counted(name, of):
    def call(*args, **options):
      keys = args[1 if name == "forward" else 2].shape[1]
      calls.append((name, keys, options["causal"], options.get("keys")))
      return of(*args, **options)

    monkeypatch.setattr(kernel_splash, name, call)

  counted("forward", kernel_splash.forward)
  counted("backward", kernel_splash.backward)
  jax.eval_shape(function, *arguments)
  return calls


def test_the_prefix_goes_by_in_stretches_and_stop_computes_no_key(monkeypatch):
  q, k, v, *prefix = arrays(
      (1, 1, 1, 5, 8), *[(1, 1, 5, 8)] * 2, *[(2, 1, 37, 8)] * 2
  )
  lse = q[..., 0]

  def both(length, accumulator):
    layer = attention.PrefixLayer(tuple(prefix), 1, length)
    attention.forward(q, k, v, layer, kernel=SPLASH)
    return attention.backward_rows(
        attention.QueryRows(q, q, lse, lse), k, v, layer,
        accumulator=accumulator, kernel=SPLASH,
    )

  calls = calls_of(monkeypatch, lambda n: both(n, None), 30)
  assert calls == [
      ("forward", 8, True, None), ("forward", 16, False, None),
      ("forward", 8, False, None), ("backward", 8, True, True),
      ("backward", 16, False, False), ("backward", 8, False, False),
  ]
  calls = calls_of(monkeypatch, lambda n: both(n, tuple(prefix)), 30)
  assert calls[-1] == ("backward", 8, False, True)


def test_layers_with_a_window_run_the_loops(monkeypatch):
  case = suite.make(length=19).astype(jnp.float32)

  def windowed(*args):
    return attention.replay_attention(
        *args, 19, window=4, implementation="splash"
    )

  assert calls_of(monkeypatch, windowed, *case[:5]) == []


@pytest.mark.exhaustive(but="stop")
@pytest.mark.parametrize("mode, devices", (("exact", 2), ("stop", 1)))
def test_gradients_by_a_kernel_equal_those_by_the_loops(mode, devices):
  decoder, params = tiny.model(tiny.ARCHITECTURES["one layer"])
  group = tiny.group(prompt=60, tails=(5, 1, 3))
  layout = br.Schedule().layout
  if devices > 1:
    layout = sharding.sharded(params, devices)

  def gradient(name):
    schedule = br.Schedule(
        chunk_size=20, activations="recompute", attention=name, layout=layout
    )
    return br.value_and_grad(
        decoder, tiny.loss, prefix_gradient=mode, schedule=schedule
    )(params, group, tiny.weights(group))

  (value, *_), grads = gradient("splash")
  (wanted, *_), reference = gradient("loops")
  np.testing.assert_allclose(value, wanted, atol=1e-5)
  assert 0 < compare.compare(grads, reference).relative_error < 1e-5


def test_what_runs_where():
  choose = kernels.choose
  assert choose("auto", "tpu", "bfloat16", 128) == ("splash", False)
  assert choose("auto", "tpu", "float32", 64) == ("splash", False)
  assert choose("auto", "cuda", "bfloat16", 128) == ("cudnn", False)
  assert choose("splash", "cpu", "float32", 20) == ("splash", True)
  for where, dtype, head_dim in (
      ("cpu", "bfloat16", 128), ("rocm", "bfloat16", 128),
      ("cuda", "float32", 128), ("cuda", "bfloat16", 256),
      ("tpu", "float64", 128), ("tpu", "bfloat16", 576),
  ):
    assert choose("auto", where, dtype, head_dim) is None
    assert choose("loops", where, dtype, head_dim) is None
  assert kernels.platform() == "cpu"


@pytest.mark.parametrize("arguments, message", (
    (("flash", "tpu", "bfloat16", 128), "Unknown attention 'flash'"),
    (("cudnn", "cpu", "bfloat16", 128), "runs on cuda, not on cpu"),
    (("splash", "cuda", "bfloat16", 128), "runs on tpu, not on cuda"),
    (("cudnn", "cuda", "float32", 128), "dtype=float32"),
    (("cudnn", "cuda", "float32", 12), "head_dim=12"),
    (("splash", "tpu", "bfloat16", 100), "head_dim=100"),
    (("splash", "cpu", "float64", 64), "dtype=float64"),
))
def test_a_kernel_that_does_not_fit_says_so(arguments, message):
  with pytest.raises(ValueError, match=message):
    kernels.choose(*arguments)


def test_a_schedule_names_an_implementation_that_exists():
  with pytest.raises(ValueError, match="Unknown attention 'flash'"):
    br.Schedule(attention="flash")


def test_cudnn_is_lowered_for_cuda_with_our_shapes(monkeypatch):
  """H = 4 query heads on 2 key heads, 64 rows and a stretch of 16 keys."""
  cudnn = kernel_cudnn.cudnn
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
  q, k = (jnp.zeros(s, jnp.bfloat16) for s in ((4, 64, 8), (2, 16, 8)))
  lse = jnp.zeros((4, 64), jnp.float32)
  options = dict(causal=False, blocks=None, interpret=False)

  def both(q, k, v, lse, delta):
    return (
        kernel_cudnn.forward(q, k, v, **options),
        kernel_cudnn.backward(q, q, k, v, lse, delta, keys=True, **options),
    )

  shapes = jax.tree.map(lambda x: x.shape, jax.eval_shape(
      both, q, k, k, lse, lse
  ))
  assert shapes == (
      ((4, 64, 8), (4, 64)), ((4, 64, 8), ((2, 16, 8), (2, 16, 8)))
  )
  traced = jax.jit(both).trace(q, k, k, lse, lse)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("__cudnn$fmhaSoftmax(") == 1
  assert text.count("__cudnn$fmhaSoftmaxBackward(") == 1
  assert "tensor<2x2x64x8xbf16>" in text and "tensor<2x1x16x8xbf16>" in text
