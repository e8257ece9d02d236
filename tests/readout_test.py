# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readouts go chunk by chunk, and chunks do not show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import segment
from tests import tiny

CONFIG = tiny.in_float64(tiny.BASE)
SHAPE = 3, 8  # G, T: 24 positions


@dataclasses.dataclass(frozen=True)
class LogProbAndEntropy:
  """A pytree of two: log p(target), and −Σ p log p of the whole law."""

  def __call__(self, model, params, hidden_NM, targets_N, layout):
    del layout
    table_VM = model.apply({"params": params}, method="head_table")
    log_probs_NV = jax.nn.log_softmax(hidden_NM @ table_VM.T)
    return {
        "log_prob": jnp.take_along_axis(
            log_probs_NV, targets_N[:, None], axis=1
        )[:, 0],
        "entropy": -jnp.sum(jnp.exp(log_probs_NV) * log_probs_NV, axis=1),
    }


@dataclasses.dataclass(frozen=True)
class Value:
  """A linear value head, with a parameter of its own in the tree."""

  def __call__(self, model, params, hidden_NM, targets_N, layout):
    del model, targets_N, layout
    return hidden_NM @ params["value"]["kernel"]


READOUTS = {
    "log_probs": br.LogProbs(0.6),
    "entropy": LogProbAndEntropy(),
    "value": Value(),
    "hidden": readout_lib.Hidden(),
}


def setting():
  """Model, parameters with a value head, and positions to read."""
  decoder, params = tiny.model(CONFIG)
  random = np.random.default_rng(0)
  head = {"kernel": jnp.asarray(random.normal(size=CONFIG.width))}
  y_GTM = jnp.asarray(random.normal(size=(*SHAPE, CONFIG.width)))
  targets_GT = jnp.asarray(random.integers(0, 64, SHAPE), jnp.int32)
  return decoder, params | {"value": head}, y_GTM, targets_GT


def weighted(outputs, seed=1):
  """A loss with another weight for every entry of every output."""
  random = np.random.default_rng(seed)
  return sum(
      jnp.sum(jnp.sin(x) * random.normal(size=x.shape))
      for x in jax.tree.leaves(outputs)
  )


def with_gradients(readout, tokens):
  decoder, params, y_GTM, targets_GT = setting()

  def loss(params, y_GTM):
    outputs = readout_lib.chunked(
        readout, decoder, params, y_GTM, targets_GT, tokens=tokens
    )
    return weighted(outputs), outputs

  outer = segment.outer(params)
  gradients, outputs = jax.jit(
      jax.grad(loss, argnums=(0, 1), has_aux=True)
  )(outer, y_GTM)
  return outputs, gradients


@pytest.mark.parametrize("name", READOUTS)
def test_chunks_change_neither_values_nor_gradients(x64, name):
  """5 divides nothing, 8 divides 24, 24 and 100 are one chunk."""
  readout = READOUTS[name]
  whole = with_gradients(readout, 24)
  for tokens in (5, 8, 100) if name == "entropy" else (5,):
    jax.tree.map(
        lambda got, right: np.testing.assert_allclose(
            got, right, rtol=1e-10, atol=1e-12
        ),
        with_gradients(readout, tokens), whole,
    )


def test_outputs_keep_branches_tokens_and_what_a_readout_adds(x64):
  decoder, params, y_GTM, targets_GT = setting()
  for name, shape in (
      ("log_probs", SHAPE), ("value", SHAPE), ("hidden", (*SHAPE, 32)),
  ):
    outputs = jax.eval_shape(
        lambda name=name: readout_lib.chunked(
            READOUTS[name], decoder, segment.outer(params), y_GTM, targets_GT,
            tokens=5,
        )
    )
    assert outputs.shape == shape, name


def test_log_probs_are_the_log_softmax_of_the_normed_hidden_states(x64):
  decoder, params, y_GTM, targets_GT = setting()
  outputs = readout_lib.chunked(
      br.LogProbs(0.6), decoder, segment.outer(params), y_GTM, targets_GT,
      tokens=5,
  )
  norm_GT1 = jnp.sqrt(jnp.mean(y_GTM**2, -1, keepdims=True) + CONFIG.norm_eps)
  hidden_GTM = y_GTM / norm_GT1 * params["final_norm"]["scale"][None, None]
  logits_GTV = hidden_GTM @ params["head"]["table"].T / 0.6
  expected = jnp.take_along_axis(
      jax.nn.log_softmax(logits_GTV), targets_GT[..., None], axis=-1
  )[..., 0]
  np.testing.assert_allclose(outputs, expected, rtol=1e-12)


def test_a_value_head_in_the_tree_is_trained_through_replay(x64):
  """Its own gradient, and that of the layers below it, equal dense ones."""
  decoder, params, _, _ = setting()
  group = tiny.group(prompt=6, tails=(5, 0, 3))

  def loss(values_GT):
    return weighted(jnp.where(group.mask(), values_GT, 0))

  def replayed(params):
    return loss(
        br.replay(
            decoder, params, group, readout=Value(),
            schedule=br.Schedule(readout_tokens=7),
        )
    )

  def dense(params):
    # Linen wants the parameters of its modules alone.
    own = {k: x for k, x in params.items() if k != "value"}
    hidden_GSM = decoder.apply(
        {"params": own}, group.sequences(), method="hidden"
    )
    return loss((hidden_GSM @ params["value"]["kernel"])[:, 5:13])

  gradient, expected = (jax.jit(jax.grad(f))(params) for f in (replayed, dense))
  assert np.any(gradient["value"]["kernel"])
  assert tiny.worst(gradient, expected) <= 1e-11


def test_a_token_is_scored_by_its_own_hidden_state_alone(x64):
  decoder, params, y_GTM, targets_GT = setting()
  outer = segment.outer(params)

  def one(y_GTM):
    outputs = readout_lib.chunked(
        br.LogProbs(), decoder, outer, y_GTM, targets_GT, tokens=5
    )
    return outputs[1, 6]

  moved_GT = jnp.any(jax.jit(jax.grad(one))(y_GTM) != 0, axis=-1)
  assert np.argwhere(moved_GT).tolist() == [[1, 6]]


@pytest.mark.parametrize("temperature", (0, 0.0, -1.0, float("nan")))
def test_a_temperature_that_is_not_positive_is_an_error(temperature):
  with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
    br.LogProbs(temperature)
