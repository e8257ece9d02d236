# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of heads, norms, experts and sums over tails; see bfloat16_checks.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay.models import expert_layers
from branch_replay.models import latent_layers
from branch_replay.models import layers
from branch_replay.ops import experts
from branch_replay.ops import experts_reference
from branch_replay.ops import few_rows
from branch_replay.ops import log_probs
from branch_replay.ops import rope
from branch_replay.rl import divergences
from branch_replay.rollout import law
from branch_replay.training import actor_critic
from tests import bfloat16_numbers as bf
from tests import tiny

# The head.

TOKENS, WIDTH, VOCABULARY = 96, 64, 1000


def head():
  hidden_NM = bf.normal(TOKENS, WIDTH)
  table_VM = bf.normal(VOCABULARY, WIDTH, seed=1)
  targets_N = np.random.default_rng(2).integers(0, VOCABULARY, TOKENS)
  logits_NV = bf.wide(hidden_NM) @ bf.wide(table_VM).T  # ± 30
  lse_N1 = np.logaddexp.reduce(logits_NV, axis=1, keepdims=True)
  right_N = (logits_NV - lse_N1)[np.arange(TOKENS), targets_N]
  return hidden_NM, table_VM, jnp.asarray(targets_N), logits_NV, lse_N1, right_N


@bf.check
def logits_of_the_model():
  config = dataclasses.replace(
      tiny.BASE, param_dtype="bfloat16", compute_dtype="bfloat16"
  )
  decoder, params = tiny.model(config)
  params = params | {"head": {"table": bf.normal(64, 32, scale=6.0)}}

  @jax.jit
  def both(params, tokens):
    of = {"params": params}
    return decoder.apply(of, tokens, method="hidden"), decoder.apply(of, tokens)

  hidden, logits = both(params, jnp.arange(32)[None])
  right = bf.wide(hidden) @ bf.wide(params["head"]["table"]).T  # ± 100
  return bf.worst(logits, right), 1e-2


@bf.check
def logits_of_decoding():
  hidden_NM, table_VM, _, logits_NV, *_ = head()
  return bf.worst(
      jax.jit(few_rows.product)(hidden_NM, table_VM), logits_NV
  ), 1e-3


@bf.check
def log_probs_in_chunks():
  hidden_NM, table_VM, targets_N, *_, right_N = head()
  found_N = jax.jit(
      lambda *x: log_probs.chunked(*x, chunk=64)
  )(hidden_NM, table_VM, targets_N)
  return bf.worst(found_N, right_N), 1e-3


@bf.check
def log_probs_of_the_reference():
  hidden_NM, table_VM, targets_N, *_, right_N = head()
  found_N = jax.jit(log_probs.reference)(hidden_NM, table_VM, targets_N)
  return bf.worst(found_N, right_N), 1e-3


def gradients_of_log_probs():
  hidden_NM, table_VM, targets_N, logits_NV, lse_N1, _ = head()
  hits_NV = np.eye(VOCABULARY)[targets_N]
  # At ± 30 nearly all of a token's probability is one id's: 1/8 of that.
  right_NV = hits_NV - bf.softmax(logits_NV / 8)
  found = jax.jit(jax.grad(
      lambda h, t: jnp.sum(
          log_probs.chunked(h, t, targets_N, temperature=8.0, chunk=8)
      ), argnums=(0, 1),
  ))(hidden_NM, table_VM.astype(jnp.float32))
  return (
      bf.relative(found[0], right_NV @ bf.wide(table_VM) / 8),
      bf.relative(found[1], right_NV.T @ bf.wide(hidden_NM) / 8),
  )


@bf.check
def log_probs_pulled_back_to_hidden_states():
  return gradients_of_log_probs()[0], bf.HALF


@bf.check
def log_probs_pulled_back_to_the_table():
  return gradients_of_log_probs()[1], 0.7 * bf.HALF


@bf.check
def log_probs_pulled_back_near_certainty():
  """p = 0.9933, so 1 − p has two digits less than p."""
  hidden_NM = jnp.ones((1, 1), jnp.bfloat16)
  table_VM = jnp.asarray([[2.5], [-2.5]], jnp.bfloat16)
  found = jax.jit(jax.grad(lambda h: jnp.sum(
      log_probs.chunked(h, table_VM, jnp.zeros(1, jnp.int32))
  )))(hidden_NM)
  return bf.relative(found, np.array([[5 / (1 + np.exp(5.0))]])), 2 * bf.HALF


@bf.check
def log_probs_of_drawn_tokens():
  """Of the same logits at temperature 2."""
  *_, logits_NV, _, _ = head()
  tokens_N, found_N = jax.jit(
      lambda z: law.draw(law.Law(2.0), z, jnp.zeros_like(z))
  )(jnp.asarray(logits_NV, jnp.float32))
  scores_NV = logits_NV / 2
  lse_N1 = np.logaddexp.reduce(scores_NV, axis=1, keepdims=True)
  right_N = (scores_NV - lse_N1)[np.arange(TOKENS), tokens_N]
  return bf.worst(found_N, right_N), 1e-5


@bf.check
def entropies():
  """Of logits that come in bfloat16."""
  logits_NV = bf.normal(TOKENS, VOCABULARY)
  found = jax.jit(divergences.entropy)(logits_NV)
  p_NV = bf.softmax(bf.wide(logits_NV))
  return bf.worst(found, -np.sum(p_NV * np.log(p_NV), axis=1)), 1e-4


@bf.check
def values_of_states():
  """w · h + b: 0.01 apart at 20."""
  hidden_NM = bf.normal(TOKENS, WIDTH)
  w_M = np.random.default_rng(1).normal(size=WIDTH) * 3
  head = {"kernel": jnp.asarray(w_M, jnp.float32), "bias": jnp.float32(20)}
  config = dataclasses.replace(tiny.BASE, width=WIDTH)
  params = {
      actor_critic.PATH: head,
      "head": {"table": bf.normal(tiny.BASE.vocab_size, WIDTH)},
  }
  readout = actor_critic.ActorCritic()
  found = jax.jit(lambda h: readout(
      br.Decoder(config), params, h, jnp.zeros(TOKENS, jnp.int32),
      br.Schedule().layout,
  ))(hidden_NM)
  right = bf.wide(hidden_NM) @ bf.wide(head["kernel"]) + 20
  return bf.worst(jax.tree.leaves(found)[1], right), 1e-4


# Norms, biases and factors.


@bf.check
def scales_of_norms():
  x_NM = bf.normal(512, WIDTH)
  norm = layers.RMSNorm(1e-6, "float32", from_one=True)
  found = jax.jit(norm.apply)(
      {"params": {"scale": jnp.full(WIDTH, 0.003)}}, x_NM
  )
  x_NM = bf.wide(x_NM)
  right = 1.003 * x_NM / np.sqrt(np.mean(x_NM**2, axis=1, keepdims=True) + 1e-6)
  return bf.slope(found, right), 3e-4


@bf.check
def gradients_of_scales_of_norms():
  """A sum over 4096 tokens; a bfloat16 that counts them stops at 256."""
  x_NM = jnp.abs(bf.normal(4096, 16)) + 1
  norm = layers.RMSNorm(1e-6, "float32")
  found = jax.jit(jax.grad(lambda scale: jnp.sum(
      norm.apply({"params": {"scale": scale}}, x_NM).astype(jnp.float32)
  )))(jnp.ones(16))
  x_NM = bf.wide(x_NM)
  right = np.sum(
      x_NM / np.sqrt(np.mean(x_NM**2, axis=1, keepdims=True) + 1e-6), axis=0
  )
  return bf.relative(found, right), 1e-4


def linear(params, x_NA, **options):
  config = dataclasses.replace(tiny.BASE, compute_dtype="bfloat16", **options)
  module = layers.Linear(config, 32, bias="bias" in params, name="query")
  return jax.jit(module.apply)({"params": params}, x_NA)


@bf.check
def biases():
  """1.003 on top of nothing much: in bfloat16 it is 1."""
  x_NA = bf.normal(512, 32)
  kernel = np.asarray(bf.normal(32, 32, seed=1, scale=0.1), np.float32)
  found = linear({"kernel": kernel, "bias": jnp.full(32, 1.003)}, x_NA)
  right = bf.wide(x_NA) @ bf.wide(kernel) + 1.003
  return float(abs(np.mean(bf.wide(found) - right))), 4e-4


@bf.check
def factors_of_adapters():
  """A third is off by a fifth of a per cent in bfloat16."""
  x_NA = bf.normal(512, 32)
  params = {
      "kernel": jnp.zeros((32, 32)),
      "adapter_in": bf.normal(32, 3, seed=1).astype(jnp.float32),
      "adapter_out": bf.normal(3, 32, seed=2).astype(jnp.float32),
  }
  found = linear(params, x_NA, adapter=config_lib.Adapter(3, 1.0, ("query",)))
  low_NR = bf.wide(x_NA) @ bf.wide(params["adapter_in"])
  right = low_NR @ bf.wide(params["adapter_out"])
  return bf.slope(found, right / 3), 5e-4


@bf.check
def angles_far_out():
  head_dim, position, theta = 128, 2**22 - 1, 1e6
  ones = np.zeros((1, 1, 1, head_dim))
  ones[..., : head_dim // 2] = 1
  found = jax.jit(lambda x, at: rope.rotate(x, at, theta=theta))(
      jnp.asarray(ones, jnp.bfloat16), jnp.full((1, 1), position)
  )
  inverse_H, _ = rope.frequencies(head_dim, theta, None)
  angle_H = position * bf.wide(inverse_H)
  right = np.concatenate([np.cos(angle_H), np.sin(angle_H)])
  return bf.worst(found[0, 0, 0], right), 0.004


@bf.check
def factors_of_latent_scores():
  """√(16 / 12), and a temperature: the size of all scores."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES["deepseek"], compute_dtype="bfloat16"
  )
  latent, heads = config.latent, config.num_heads
  query = bf.normal(256, heads * latent.query_dim)
  params = {
      "key_up": jnp.broadcast_to(
          jnp.eye(latent.nope_dim, latent.rank),
          (heads, latent.nope_dim, latent.rank),
      ),
      "latent_norm": {"scale": jnp.ones(latent.rank)},
  }
  q, *_ = jax.jit(latent_layers.LatentRotate(config).apply)(
      {"params": params}, query, bf.normal(256, latent.slot),
      jnp.arange(256)[None],
  )
  factor = rope.score_factor(config.rope_scaling) * (
      latent.slot / latent.query_dim
  ) ** 0.5
  size = latent.nope_dim
  right = factor * bf.wide(query).reshape(256, heads, -1)[..., :size]
  found = bf.wide(q)[0, 0].transpose(1, 0, 2)[..., :size]
  return bf.slope(found, right), 4e-4


# Experts.

ROUTED = br.Experts(8, 3, 512, scaling=2.5)


def routed():
  x_NM = bf.normal(64, 256)
  kernel_ME = np.random.default_rng(1).normal(size=(256, 8)).astype(np.float32)
  config = dataclasses.replace(
      tiny.BASE, width=256, experts=ROUTED, compute_dtype="bfloat16"
  )
  logits_NE, _ = jax.jit(expert_layers.Router(config).apply)(
      {"params": {"kernel": kernel_ME}}, x_NM
  )
  return config, logits_NE, bf.wide(x_NM) @ bf.wide(kernel_ME)


@bf.check
def logits_of_the_router():
  _, found, right = routed()
  return bf.worst(found, right), 1e-4


@bf.check
def scores_of_the_router():
  worst_of = 0.0
  for kind in ("softmax", "sigmoid"):
    config, logits_NE, _ = routed()
    kinds = dataclasses.replace(ROUTED, scores=kind)
    found = jax.jit(lambda z, kinds=kinds: experts.scores(kinds, z))(logits_NE)
    z = bf.wide(logits_NE)
    right = bf.softmax(z) if kind == "softmax" else 1 / (1 + np.exp(-z))
    worst_of = max(worst_of, bf.worst(found, right))
  return worst_of, 1e-6


@bf.check
def weights_of_experts():
  _, logits_NE, _ = routed()
  score_NE = bf.softmax(bf.wide(logits_NE))
  choices_Nk = np.argsort(-score_NE, axis=1)[:, :3]
  taken = np.take_along_axis(score_NE, choices_Nk, axis=1)
  found = jax.jit(lambda z, c: experts.weights(ROUTED, z, c))(
      logits_NE, choices_Nk
  )
  right = 2.5 * taken / taken.sum(axis=1, keepdims=True)
  return bf.worst(found, right), 2e-6


@bf.check
def choices_between_near_experts():
  """Scores that are one in bfloat16; the later is the better one."""
  logits_NE = 8 + jnp.arange(8, dtype=jnp.float32)[None] * 1e-3
  found = jax.jit(lambda z: experts.choose(ROUTED, z))(logits_NE)
  return bf.worst(found, np.array([[7, 6, 5]])), 0.5


@bf.check
def outputs_of_experts_weighted():
  """One expert a token, of weight 1.003, which bfloat16 takes for 1."""
  one = br.Experts(4, 1, 256, scaling=1.003)
  config = dataclasses.replace(
      tiny.BASE, width=32, experts=one, compute_dtype="bfloat16"
  )
  down = bf.normal(4, 256, 32, seed=3, scale=0.1).astype(jnp.float32)
  gate_RF, up_RF = bf.normal(512, 256), bf.normal(512, 256, seed=1)
  choices_Nk = jnp.zeros((512, 1), jnp.int32)
  gate = bf.wide(gate_RF)
  hidden = gate / (1 + np.exp(-gate)) * bf.wide(up_RF)
  right = 1.003 * hidden @ bf.wide(down[0])
  found = jax.jit(expert_layers.ExpertContract(config).apply)(
      {"params": {"expert_down": {"kernel": down}}},
      jnp.zeros((1, 512, 32), jnp.bfloat16), choices_Nk,
      jnp.zeros((512, 4)), gate_RF, up_RF,
  )
  return bf.slope(found[0], right), 5e-4


@bf.check
def outputs_of_experts_of_the_reference():
  """The same of two experts, of which one is chosen."""
  x_NM, weights_N1 = bf.normal(512, 16), jnp.full((512, 1), 1.003)
  gate, up = (bf.normal(2, 16, 32, seed=s, scale=0.3) for s in (1, 2))
  down = bf.normal(2, 32, 16, seed=3, scale=0.3)
  found = jax.jit(experts_reference.mix)(
      x_NM, weights_N1, jnp.ones((512, 1), jnp.int32), gate, up, down
  )
  gate, up = (bf.wide(x_NM) @ bf.wide(x[1]) for x in (gate, up))
  right = gate / (1 + np.exp(-gate)) * up @ bf.wide(down[1])
  return bf.slope(found, 1.003 * right), 7e-4


@bf.check
def sums_over_experts():
  """1 and fifteen times 2⁻⁹, none of which counts on its own."""
  rows = experts.order(jnp.arange(16)[None], 16)
  y_RM = jnp.full((16, 4), 2.0**-9, jnp.bfloat16).at[0].set(1)
  found = jax.jit(lambda y: experts.to_tokens(y, rows, 1))(y_RM)
  return bf.worst(found, np.full((1, 4), 1 + 15 * 2.0**-9)), 0.004


# Gradients of many tails.


@bf.check
def gradients_of_64_equal_tails():
  """64 times that of one: every sum of them has the digits for it."""
  config = dataclasses.replace(
      tiny.ARCHITECTURES["qwen3.5"], param_dtype="bfloat16",
      compute_dtype="bfloat16", qkv_bias=True,
  )
  decoder, params = tiny.model(config)
  prompt, tails = np.arange(12) * 5 % 64, [[3, 17, 40, 8]] * 64
  group = br.Group.create(prompt, tails, config=config)
  gradient = br.value_and_grad(
      decoder,
      lambda found_GT, weights_G: jnp.sum(found_GT * weights_G[:, None]),
      schedule=br.Schedule(chunk_size=8, branches_at_once=1),
  )
  _, every = gradient(params, group, jnp.ones(64))
  _, first = gradient(params, group, 64 * jnp.eye(64)[0])
  return max(
      bf.relative(a, bf.wide(b)) for a, b in zip(
          jax.tree.leaves(every), jax.tree.leaves(first), strict=True
      )
  ), 1e-3
