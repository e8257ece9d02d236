# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Small models and groups that the tests share, and how gradients compare."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.planning import compare

# head_dim is deliberately not width / num_heads.
BASE = br.ModelConfig(
    vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=48, max_positions=256,
)

ARCHITECTURES = {
    "llama": BASE,
    "tied": dataclasses.replace(BASE, tied_embeddings=True),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, num_kv_heads=1),
    "one query a key": dataclasses.replace(BASE, num_kv_heads=4),
    "one layer": dataclasses.replace(BASE, num_layers=1, num_heads=6),
    "linear": dataclasses.replace(BASE, rope_scaling=br.LinearScaling(4.0)),
    "llama3": dataclasses.replace(
        BASE, rope_scaling=br.Llama3Scaling(8.0, 1.0, 4.0, 16)
    ),
    "yarn": dataclasses.replace(BASE, rope_scaling=br.YarnScaling(4.0, 16)),
    "mistral": dataclasses.replace(
        BASE, layer_pattern=("sliding",), window=4
    ),
    # A whole period, and a layer of the next.
    "window and full": dataclasses.replace(
        BASE, num_layers=3, layer_pattern=("sliding", "full"), window=5
    ),
    "delta": dataclasses.replace(
        BASE, layer_pattern=("delta",), delta=br.GatedDelta(2, 4, 8, 12)
    ),
    "latent": dataclasses.replace(
        BASE, layer_pattern=("latent",),
        latent=br.LatentAttention(12, 8, 4, 10, query_rank=9),
    ),
    "hybrid": dataclasses.replace(
        BASE, layer_pattern=("delta", "full"),
        delta=br.GatedDelta(3, 3, 8, 4, conv_width=3),
    ),
    "gemma3": dataclasses.replace(
        BASE, num_layers=3, layer_pattern=("sliding", "full"), window=5,
        rope_theta=1000.0, rope_theta_local=50.0,
        rope_scaling=br.LinearScaling(4.0), norms_from_one=True, qk_norm=True,
        score_divisor=24, post_norms=True, activation="gelu_tanh",
        scale_embeddings=True, tied_embeddings=True,
    ),
    "qwen3.5": dataclasses.replace(
        BASE, layer_pattern=("delta", "full"), rotary_dim=6, qk_norm=True,
        norms_from_one=True, output_gate=True, delta=br.GatedDelta(2, 4, 8, 4),
    ),
    "deepseek": dataclasses.replace(
        BASE, layer_pattern=("latent",),
        latent=br.LatentAttention(12, 8, 4, 10),
        rope_scaling=br.YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.7),
    ),
    "experts": dataclasses.replace(BASE, experts=br.Experts(4, 2, 24)),
    "expert groups": dataclasses.replace(
        BASE, num_layers=3,
        experts=br.Experts(
            8, 3, 20, shared_width=24, first_dense=1, scores="sigmoid",
            scaling=2.5, correction=True, groups=4, top_groups=2, group_top=2,
        ),
    ),
}


def in_float64(config: br.ModelConfig) -> br.ModelConfig:
  return dataclasses.replace(
      config, param_dtype="float64", compute_dtype="float64"
  )


@functools.cache
def model(config: br.ModelConfig, seed: int = 0):
  """A decoder and random parameters, norms and biases included."""
  decoder = br.Decoder(config)
  with jax.enable_x64(config.param_dtype == "float64"):
    key = jax.random.key(seed)
    params = decoder.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    leaves, treedef = jax.tree.flatten(params)
    leaves = [
        leaf
        + 0.2 * jax.random.normal(jax.random.fold_in(key, i), leaf.shape,
                                  leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return decoder, jax.tree.unflatten(treedef, leaves)


def group(prompt=12, tails=(5, 1, 3, 7), config=BASE, seed=0) -> br.Group:
  """A group of random ids with the given lengths."""
  rng = np.random.default_rng(seed)
  return br.Group.create(
      rng.integers(0, config.vocab_size, prompt),
      [rng.integers(0, config.vocab_size, length) for length in tails],
      config=config,
  )


def weights(of: br.Group, seed=1):
  """Mixed-sign weights for every token of every tail, in the default dtype."""
  shape = of.tails.shape
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def loss(log_probs_GT, weights_GT):
  """Nonlinear in the log-probs, so that cotangents depend on them."""
  return jnp.sum(jnp.sin(log_probs_GT) * weights_GT)


def dense_gradient(decoder, params, of: br.Group, weights_GT):
  """The ground truth: plain attention, ordinary autodiff."""
  return jax.jit(
      jax.grad(lambda p: loss(br.dense_log_probs(decoder, p, of), weights_GT))
  )(params)


def worst(gradient, reference) -> float:
  """Relative error of the worst parameter."""
  return compare.compare(gradient, reference).worst_error
