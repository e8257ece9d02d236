# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of attention and of the delta rule; see bfloat16_checks.py."""

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.ops import attention
from branch_replay.ops import gated_delta
from branch_replay.ops import gated_delta_reference
from branch_replay.ops.attention import loops as attention_loops
from branch_replay.ops.attention import packed as attention_packed
from tests import bfloat16_numbers as bf

# Attention: scores up to ± 20, 700 keys of the prefix and 40 tokens.

PREFIX, OWN, HEADS, REPEATS, SIZE = 700, 40, 2, 3, 16


def attended():
  q = bf.normal(HEADS, 2, REPEATS, OWN, SIZE, scale=2.0)
  k, v = (bf.normal(HEADS, 2, OWN, SIZE, seed=s, scale=2.0) for s in (1, 2))
  pk, pv = (
      bf.normal(1, HEADS, PREFIX, SIZE, seed=s, scale=2.0) for s in (3, 4)
  )
  d_out = bf.normal(*q.shape, seed=5)
  every = [
      np.concatenate(
          [np.broadcast_to(bf.wide(p)[0, :, None], (HEADS, 2, PREFIX, SIZE)),
           bf.wide(own)], axis=2
      )
      for p, own in ((pk, k), (pv, v))
  ]
  scores = np.einsum("kgrtd,kgsd->kgrts", bf.wide(q), every[0]) / SIZE**0.5
  seen = np.arange(PREFIX + OWN)[None] <= PREFIX + np.arange(OWN)[:, None]
  scores = np.where(seen, scores, -np.inf)
  lse = np.logaddexp.reduce(scores, axis=-1)
  probs = np.exp(scores - lse[..., None])
  out = np.einsum("kgrts,kgsd->kgrtd", probs, every[1])
  return (q, k, v, (pk, pv), d_out), every, probs, out, lse


def attention_forward():
  (q, k, v, prefix, _), *_ = attended()
  return jax.jit(lambda q, k, v, prefix: attention.forward(
      q, k, v, attention.PrefixLayer(prefix, 0, PREFIX)
  ))(q, k, v, prefix)


@bf.check
def log_sum_exps_of_attention():
  return bf.worst(attention_forward()[1], attended()[-1]), 1e-4


@bf.check
def outputs_of_attention():
  """Probabilities are rounded as an operand; their sum is not."""
  return bf.relative(attention_forward()[0], attended()[-2]), 0.4 * bf.HALF


@bf.check
def outputs_of_attention_with_equal_keys():
  """701 equal probabilities, each 1 before it is divided by their sum."""
  (q, k, v, _, _), *_ = attended()
  same = jnp.ones((1, HEADS, PREFIX + 1, SIZE), jnp.bfloat16)
  values = jnp.broadcast_to(jnp.bfloat16(1.5), same.shape)
  out, lse = jax.jit(lambda q: attention.forward(
      q, k[:, :, :1] * 0 - 100, v[:, :, :1] * 0,
      attention.PrefixLayer((same, values), 0, PREFIX + 1),
  ))(jnp.ones((HEADS, 2, REPEATS, 1, SIZE), jnp.bfloat16))
  return max(bf.worst(out, 1.5), bf.worst(lse, np.log(PREFIX + 1) + 4.0)), 1e-4


@bf.check
def merges_of_attention():
  random = np.random.default_rng(0)
  out_a, out_b = (random.normal(size=(64, 16)) for _ in range(2))
  lse_a, lse_b = (random.normal(size=64) + 9 for _ in range(2))
  total = np.logaddexp(lse_a, lse_b)
  right = (
      np.exp(lse_a - total)[:, None] * out_a
      + np.exp(lse_b - total)[:, None] * out_b
  )
  out, lse = jax.jit(attention.merge)(*(
      jnp.asarray(x, jnp.float32) for x in (out_a, lse_a, out_b, lse_b)
  ))
  return max(bf.worst(out, right), bf.worst(lse, total)), 1e-5


@bf.check
def outputs_of_decoding():
  """All keys in the cache, of the first branch; before it is rounded."""
  (q, *_), every, _, right, _ = attended()
  cache = tuple(jnp.asarray(x[None, :, :1], jnp.bfloat16) for x in every)
  slots = PREFIX + jnp.arange(OWN)[None]
  found, _ = jax.jit(lambda q, cache: attention_loops.cache_forward(
      q, cache, 0, slots
  ))(q[:, :1], cache)
  return bf.relative(found, right[:, :1]), 0.4 * bf.HALF


@bf.check
def outputs_of_packed_attention():
  (q, k, v, prefix, _), _, _, right, _ = attended()
  found = jax.jit(lambda q, k, v, prefix: attention_packed.attend(
      q, k, v, jnp.zeros((2, OWN), jnp.int32), prefix, layer=0,
      prefix_length=PREFIX,
  ))(q, k, v, prefix)
  return bf.relative(found, right), 1.1 * bf.HALF  # returned in bfloat16


def attention_backward():
  (q, k, v, prefix, d_out), every, probs, out, _ = attended()
  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in prefix)

  @jax.jit
  def backward(q, k, v, prefix, d_out, zeros):
    layer = attention.PrefixLayer(prefix, 0, PREFIX)
    out, lse = attention.forward(q, k, v, layer)
    return attention.backward(
        q, k, v, layer, out=out, lse=lse, d_out=d_out, accumulator=zeros
    )

  dq, dk, dv, (dpk, dpv) = backward(q, k, v, prefix, d_out, zeros)
  d_out = bf.wide(d_out)
  d_probs = np.einsum("kgrtd,kgsd->kgrts", d_out, every[1])
  delta = np.sum(d_out * out, axis=-1, keepdims=True)
  d_scores = probs * (d_probs - delta) / SIZE**0.5
  dk_all = np.einsum("kgrts,kgrtd->kgsd", d_scores, bf.wide(q))
  dv_all = np.einsum("kgrts,kgrtd->kgsd", probs, d_out)
  return {
      "queries": (dq, np.einsum("kgrts,kgsd->kgrtd", d_scores, every[0])),
      "keys": (dk, dk_all[:, :, PREFIX:]),
      "values": (dv, dv_all[:, :, PREFIX:]),
      "keys of the prefix": (dpk[0], dk_all[:, :, :PREFIX].sum(axis=1)),
      "values of the prefix": (dpv[0], dv_all[:, :, :PREFIX].sum(axis=1)),
  }


@bf.check
def attention_pulled_back_to_queries():
  return bf.relative(*attention_backward()["queries"]), 1.6 * bf.HALF


@bf.check
def attention_pulled_back_to_keys_and_values():
  found = attention_backward()
  return max(
      bf.relative(*found[name]) for name in found if name != "queries"
  ), bf.HALF


@bf.check
def cotangents_of_the_prefix_over_many_rows():
  """8192 rows send the same to one key."""
  shape = 1, 128, 4, 16, SIZE
  q = jnp.zeros(shape, jnp.bfloat16)
  own = jnp.zeros((1, 128, 16, SIZE), jnp.bfloat16)
  prefix = tuple(jnp.zeros((1, 1, 4, SIZE), jnp.bfloat16) for _ in range(2))
  zeros = tuple(jnp.zeros((1, 1, 4, SIZE), jnp.float32) for _ in range(2))

  @jax.jit
  def backward(prefix, zeros):
    layer = attention.PrefixLayer(prefix, 0, 4)
    out, lse = attention.forward(q, own, own, layer)
    return attention.backward(
        q, own, own, layer, out=out, lse=lse,
        d_out=jnp.full(shape, 1.203125, jnp.bfloat16), accumulator=zeros,
    )[3][1]

  # Token t spreads 1 over 4 + t + 1 keys.
  seen = 5 + np.arange(16)
  probs = bf.wide(jnp.asarray(1 / seen, jnp.bfloat16))
  right = 1.203125 * 128 * 4 * np.sum(probs)
  return bf.worst(backward(prefix, zeros) / right, 1.0), 1e-3


# The delta rule: 600 tokens, slow decay.

DELTA = dict(heads=1, repeats=2, dim=8, values=4, tokens=600, width=4)


def delta_inputs():
  d, width = DELTA, DELTA["width"]
  channels = 2 * d["dim"] + d["repeats"] * d["values"]
  params = gated_delta.Parameters(*(
      jnp.asarray(x, jnp.float32) for x in (
          np.random.default_rng(1).normal(size=(1, channels, width)),
          np.full((1, d["repeats"]), -3.0), np.full((1, d["repeats"]), -3.0),
      )
  ))
  return (
      params, bf.normal(1, d["tokens"], 1, channels),
      bf.normal(1, d["tokens"], 1, 2 * d["repeats"], seed=2),
      jnp.zeros((1, 1, d["repeats"], d["dim"], d["values"]), jnp.float32),
      jnp.zeros((1, 1, width - 1, channels), jnp.bfloat16),
  )


def delta_rule():
  """Token by token in float64: outputs [T, R, E] and S after the last."""
  d = DELTA
  (taps, log_rate, bias), x, rates, *_ = jax.tree.map(bf.wide, delta_inputs())
  x, rates, width = x[0, :, 0], rates[0, :, 0], d["width"]
  padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
  mixed = sum(
      padded[at : at + d["tokens"]] * taps[0, :, at] for at in range(width)
  )
  mixed = mixed / (1 + np.exp(-mixed))
  q, k, v = np.split(mixed, [d["dim"], 2 * d["dim"]], axis=1)
  q, k = (
      x / np.sqrt(np.sum(x**2, axis=1, keepdims=True) + 1e-6) for x in (q, k)
  )
  v = v.reshape(d["tokens"], d["repeats"], d["values"])
  beta = 1 / (1 + np.exp(-rates[:, : d["repeats"]]))
  speed = np.log1p(np.exp(rates[:, d["repeats"] :] + bias[0]))
  decay = np.exp(-np.exp(log_rate[0]) * speed)
  s, out = np.zeros((d["repeats"], d["dim"], d["values"])), []
  for t in range(d["tokens"]):
    s = decay[t][:, None, None] * s
    held = np.einsum("rde,d->re", s, k[t])
    s = s + np.einsum("d,re->rde", k[t], beta[t][:, None] * (v[t] - held))
    out.append(np.einsum("rde,d->re", s, q[t]) / d["dim"] ** 0.5)
  return np.stack(out), s


def delta_found(name):
  params, channels, rates, matrix, last = delta_inputs()
  key_dim = DELTA["dim"]
  if name == "blocks":
    return jax.jit(lambda *x: gated_delta.mix(*x, key_dim=key_dim))(
        params, channels, rates, matrix, last
    )
  if name == "reference":
    return jax.jit(lambda *x: gated_delta_reference.mix(*x, key_dim=key_dim))(
        params, channels, rates, matrix, last
    )

  def token(carry, inputs):
    out, *carry = gated_delta.step(
        params, *(x[None, None] for x in inputs), *carry, key_dim=key_dim
    )
    return tuple(carry), out[0, 0]

  (matrix, last), out = jax.jit(
      lambda *x: jax.lax.scan(token, (matrix, last), x)
  )(channels[0], rates[0])
  return out[None], matrix, last


def delta_states(name):
  return bf.relative(delta_found(name)[1][0, 0], delta_rule()[1]), 1e-4


def delta_outputs(name):
  return bf.relative(delta_found(name)[0][0, :, 0], delta_rule()[0]), bf.HALF


for _name in ("blocks", "steps", "reference"):
  bf.CHECKS |= {
      f"delta_states_by_{_name}": lambda name=_name: delta_states(name),
      f"delta_outputs_by_{_name}": lambda name=_name: delta_outputs(name),
  }
