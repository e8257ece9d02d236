# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder of one sequence, without a line of the package's but for RoPE.

Nothing is shared, cut or run twice: whole sequences, plain softmax, one token
of the recurrence after the other, every expert on every token, and autodiff.

What a position leaves behind (keys, values, latents, a recurrence's matrix)
may be seen through `weighted`: the same value, its cotangent multiplied. With a
weight of 0 before a place that is "stop"; with 1/q or 0 a chunk "sampled".
"""

from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.ops import rope


class Row(NamedTuple):
  """One sequence.

  Attributes:
    tokens: i32[S] what it runs on.
    targets: i32[S] what follows each.
    seen: bool[S, S], which keys (axis 1) a query may see; windows are taken
      off later.
    segments: i32[S], within which nothing is weighted.
    weights: [S], the factor on the cotangent of what a position leaves behind,
      as seen from later segments.
    real: bool[S], tokens that are no padding.
  """

  tokens: Any
  targets: Any
  seen: Any
  segments: Any
  weights: Any
  real: Any


class Result(NamedTuple):
  """Of one row.

  Attributes:
    log_probs: [S] of the targets.
    chosen: [L, S, E], how often a token chose an expert; of layers with
      experts.
    probabilities: [L, S, E].
  """

  log_probs: Any
  chosen: Any
  probabilities: Any


@jax.custom_vjp
def weighted(x, weight):
  """x, whose cotangent is multiplied by a weight."""
  del weight
  return x


weighted.defvjp(
    lambda x, weight: (x, weight),
    lambda weight, d: (d * weight, jnp.zeros_like(weight)),
)


def layers(config, params):
  """(kind, whether it has experts, parameters) of every layer."""
  experts = config.experts is not None
  dense = config.experts.first_dense if experts else 0
  period, tree = len(config.layer_pattern), params["layers"]
  found = []
  for layer in range(config.num_layers):
    kind = config.layer_pattern[layer % period]
    count, left = divmod(config.num_layers - dense, period)
    if period == 1 and not dense:
      stack, at = tree, layer
    elif layer < dense:
      stack, at = tree["dense"][str(layer)], 0
    elif layer - dense < count * period:
      turn, place = divmod(layer - dense, period)
      stack, at = tree["periods"][str(place)], turn
    else:
      stack, at = tree["rest"][str(layer - config.num_layers + left)], 0
    of_layer = jax.tree.map(lambda x, at=at: x[at], stack)
    found.append((kind, experts and layer >= dense, of_layer))
  return found


def norm(config, parameter, x):
  return scaled_norm(config, parameter + int(config.norms_from_one), x)


def scaled_norm(config, scale, x):
  mean = jnp.mean(x * x, axis=-1, keepdims=True)
  shape = (1,) * (x.ndim - 1) + scale.shape
  return x / jnp.sqrt(mean + config.norm_eps) * scale.reshape(shape)


def linear(config, params, x):
  y = x @ params["kernel"]
  if "bias" in params:
    y += params["bias"][None]
  if "adapter_in" in params:
    ratio = config.adapter.alpha / config.adapter.rank
    y += ratio * (x @ params["adapter_in"] @ params["adapter_out"])
  return y


def attend(q, k, v, k_before, v_before, seen, same, divisor=None):
  """[S, N, E] of queries and keys [S, N, D] and values [S, N, E]."""
  scale = (divisor or q.shape[-1]) ** -0.5
  own = jnp.einsum("snd,tnd->nst", q, k)
  before = jnp.einsum("snd,tnd->nst", q, k_before)
  scores = scale * jnp.where(same[None], own, before)
  scores = jnp.where(seen[None], scores, -jnp.inf)
  p = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
  p /= p.sum(axis=-1, keepdims=True)
  return jnp.einsum("nst,tne->sne", jnp.where(same[None], p, 0), v) + (
      jnp.einsum("nst,tne->sne", jnp.where(same[None], 0, p), v_before)
  )


def rotated(x, theta, scaling, dim=None):
  """[S, N, D] at positions 0…S−1."""
  positions = jnp.arange(x.shape[0])[None]
  return rope.rotate(x[None], positions, theta=theta, scaling=scaling, dim=dim)[
      0
  ]


def attention(config, kind, params, x, row, same):
  """Of a full or a sliding layer, [S, M]."""
  tokens, project = x.shape[0], params["project"]
  normed = norm(config, project["norm"]["scale"], x)
  q, k, v = (
      linear(config, project[name], normed).reshape(
          tokens, -1, config.head_dim
      ) for name in ("query", "key", "value")
  )
  if config.qk_norm:
    q = norm(config, params["rotate"]["query_norm"]["scale"], q)
    k = norm(config, params["rotate"]["key_norm"]["scale"], k)
  theta, scaling = config.rope_theta, config.rope_scaling
  seen = row.seen
  if kind == "sliding":
    if config.rope_theta_local is not None:
      theta, scaling = config.rope_theta_local, None
    at = jnp.arange(tokens)
    seen &= at[:, None] - at[None] < config.window
  q = rotated(q, theta, scaling, config.rotary_dim)
  k = rotated(k, theta, scaling, config.rotary_dim)
  each = config.num_heads // config.num_kv_heads
  weight = row.weights[:, None, None]
  k, v, k_before, v_before = (
      jnp.repeat(a, each, axis=1)
      for a in (k, v, weighted(k, weight), weighted(v, weight))
  )
  out = attend(
      q, k, v, k_before, v_before, seen, same, config.score_divisor
  ).reshape(tokens, -1)
  if config.output_gate:
    out *= jax.nn.sigmoid(linear(config, project["output_gate"], normed))
  return linear(config, params["join"]["output"], out)


def latent_attention(config, params, x, row, same):
  latent, tokens = config.latent, x.shape[0]
  project, rotate = params["project"], params["rotate"]
  normed = norm(config, project["norm"]["scale"], x)
  query = linear(config, project["query"], normed)
  if latent.query_rank:
    query = norm(config, rotate["query_norm"]["scale"], query)
    query = linear(config, rotate["query_up"], query)
  query = query.reshape(tokens, config.num_heads, latent.query_dim)
  theta, scaling = config.rope_theta, config.rope_scaling
  turned = rotated(query[..., latent.nope_dim :], theta, scaling)
  q = jnp.concatenate([query[..., : latent.nope_dim], turned], axis=-1)
  q *= rope.score_factor(scaling)
  slots = linear(config, project["latent"], normed)
  c = norm(config, rotate["latent_norm"]["scale"], slots[:, : latent.rank])
  r = rotated(slots[:, None, latent.rank :], theta, scaling)[:, 0]

  def expanded(c, r):
    key = jnp.einsum("tc,ndc->tnd", c, rotate["key_up"])
    shared = jnp.broadcast_to(r[:, None], (*key.shape[:2], r.shape[-1]))
    values = jnp.einsum("tc,nce->tne", c, params["join"]["value_up"])
    return jnp.concatenate([key, shared], axis=-1), values

  weight = row.weights[:, None]
  k, v = expanded(c, r)
  k_before, v_before = expanded(weighted(c, weight), weighted(r, weight))
  out = attend(q, k, v, k_before, v_before, row.seen, same)
  return linear(config, params["join"]["output"], out.reshape(tokens, -1))


def delta_rule(config, params, x, row):
  """Token by token; the carry is weighted where a segment ends."""
  delta, tokens = config.delta, x.shape[0]
  keys, each = delta.key_heads, delta.value_heads // delta.key_heads
  dim, recur = delta.key_dim, params["recur"]
  normed = norm(config, params["project"]["norm"]["scale"], x)
  channels, rates, gate = (
      linear(config, params["project"][name], normed)
      for name in ("channels", "rates", "output_gate")
  )
  channels = channels.reshape(tokens, keys, -1)
  rates = rates.reshape(tokens, keys, 2, each)
  starts = jnp.concatenate(
      [jnp.zeros(1, bool), row.segments[1:] != row.segments[:-1]]
  )
  before = jnp.concatenate([row.weights[:1], row.weights[:-1]])

  def unit(x):
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

  def token(carry, inputs):
    channel, rate, start, weight = inputs
    factor = jnp.where(start, weight, 1.0)
    matrix, last = (weighted(c, factor) for c in carry)
    window = jnp.concatenate([last, channel[None]])  # [W, K, X]
    mixed = jax.nn.silu(jnp.einsum("wkx,kxw->kx", window, recur["filter"]))
    q = unit(mixed[:, :dim]) / dim**0.5
    k = unit(mixed[:, dim : 2 * dim])
    v = mixed[:, 2 * dim :].reshape(keys, each, -1)
    beta = jax.nn.sigmoid(rate[:, 0])
    speed = jax.nn.softplus(rate[:, 1] + recur["rate_bias"])
    alpha = jnp.exp(-jnp.exp(recur["log_rate"]) * speed)
    matrix = alpha[..., None, None] * matrix  # [K, R, D, E]
    error = v - jnp.einsum("krde,kd->kre", matrix, k)
    matrix += jnp.einsum("kd,kre->krde", k, beta[..., None] * error)
    return (matrix, window[1:]), jnp.einsum("krde,kd->kre", matrix, q)

  nothing = (
      jnp.zeros((keys, each, dim, delta.value_dim), x.dtype),
      jnp.zeros((delta.conv_width - 1, *channels.shape[1:]), x.dtype),
  )
  _, out = lax.scan(token, nothing, (channels, rates, starts, before))
  out = scaled_norm(config, params["join"]["norm"]["scale"], out)
  out = out.reshape(tokens, -1) * jax.nn.silu(gate)
  return linear(config, params["join"]["output"], out)


def scores_of(experts, logits):
  if experts.scores == "sigmoid":
    return jax.nn.sigmoid(logits)
  return jax.nn.softmax(logits, axis=-1)


def choose(experts, scores):
  """bool[S, E]: the experts of every token, by sorting."""
  size = experts.count // experts.groups
  if experts.groups > 1:
    of_groups = scores.reshape(-1, experts.groups, size)
    best = jnp.sort(of_groups, axis=-1)[..., -experts.group_top :].sum(-1)
    least = jnp.sort(best, axis=-1)[:, -experts.top_groups][:, None]
    open_ = jnp.repeat(best >= least, size, axis=1)
    scores = jnp.where(open_, scores, -jnp.inf)
  least = jnp.sort(scores, axis=-1)[:, -experts.top_k][:, None]
  return scores >= least


def mixture(config, params, h):
  """What a layer of experts adds, its choices, its probabilities."""
  experts, expand = config.experts, params["expand"]
  normed = norm(config, expand["norm"]["scale"], h)
  scores = scores_of(experts, normed @ expand["router"]["kernel"])
  ranked = scores
  if experts.correction:
    ranked = scores + expand["router"]["correction"][None]
  chosen = choose(experts, lax.stop_gradient(ranked))
  weights = jnp.where(chosen, scores, 0)
  if experts.normalised:
    weights /= weights.sum(axis=1, keepdims=True)
  gate = jnp.einsum("sm,emf->sef", normed, expand["expert_gate"]["kernel"])
  up = jnp.einsum("sm,emf->sef", normed, expand["expert_up"]["kernel"])
  y = jnp.einsum(
      "sef,efm,se->sm", jax.nn.silu(gate) * up,
      params["contract"]["expert_down"]["kernel"], experts.scaling * weights,
  )
  if experts.shared_width:
    inner = jax.nn.silu(linear(config, expand["shared_gate"], normed))
    inner *= linear(config, expand["shared_up"], normed)
    if experts.shared_gate:
      inner *= jax.nn.sigmoid(linear(config, expand["shared_scale"], normed))
    y += linear(config, params["contract"]["shared_down"], inner)
  share = scores / scores.sum(axis=1, keepdims=True)
  return y, chosen, share


def feed_forward(config, params, h):
  expand, contract = params["expand"], params["contract"]
  normed = norm(config, expand["norm"]["scale"], h)
  gate = linear(config, expand["gate"], normed)
  if config.activation == "gelu_tanh":
    cube = 0.044715 * gate**3
    gate *= 0.5 * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (gate + cube)))
  else:
    gate *= jax.nn.sigmoid(gate)
  up = linear(config, expand["up"], normed)
  y = linear(config, contract["down"], gate * up)
  if config.post_norms:
    y = norm(config, contract["post_norm"]["scale"], y)
  return y


def run(config, params, row: Row, temperature=1.0) -> Result:
  """Log-probs of every token's target, and what its routers did."""
  x = params["embed"]["table"][row.tokens]
  if config.scale_embeddings:
    x *= config.width**0.5
  same = row.segments[:, None] == row.segments[None]
  chosen, probabilities = [], []
  for kind, experts, of_layer in layers(config, params):
    if kind == "delta":
      y = delta_rule(config, of_layer, x, row)
    elif kind == "latent":
      y = latent_attention(config, of_layer, x, row, same)
    else:
      y = attention(config, kind, of_layer, x, row, same)
    if config.post_norms:
      y = norm(config, of_layer["join"]["post_norm"]["scale"], y)
    h = x + y
    if experts:
      y, of_token, p = mixture(config, of_layer, h)
      chosen.append(of_token)
      probabilities.append(p)
    else:
      y = feed_forward(config, of_layer, h)
    x = h + y
  hidden = norm(config, params["final_norm"]["scale"], x)
  table = params["embed" if config.tied_embeddings else "head"]["table"]
  logits = hidden @ table.T / temperature
  picked = jnp.take_along_axis(logits, row.targets[:, None], axis=1)[:, 0]
  log_probs = picked - jax.nn.logsumexp(logits, axis=1)
  stacked = (jnp.stack(chosen), jnp.stack(probabilities)) if chosen else (
      None, None
  )
  return Result(log_probs, *stacked)


def balance_term(experts, results: Result, rows: Row):
  """B of one group's sequences, [R, …] each; see `branch_replay.balance`."""
  real = rows.real[:, None, :, None]
  count = rows.real.sum()
  p = weighted(results.probabilities, rows.weights[:, None, :, None])
  share = (results.chosen & real).sum(axis=(0, 2)) / (experts.top_k * count)
  mean = jnp.where(real, p, 0).sum(axis=(0, 2)) / count
  return experts.count * jnp.sum(share * mean) / share.shape[0]
