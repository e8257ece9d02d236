# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Analytic work of a group's gradient, by mode and policy.

  F(T | P) = 2NT + 4LdTP + 2LdT²

is the forward pass of T tokens on a prefix of P: N parameters of the layers,
L layers, d = heads · head_dim, causal. A backward pass is 2F. The head costs
2VM a tail token forward, twice that backward, and once more because logits are
computed again. Padding, norms and softmax are not counted.
"""

from branch_replay import config as config_lib


def layer_parameters(config: config_lib.ModelConfig) -> int:
  """N, weights of the matrices of all layers."""
  heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  return config.num_layers * config.width * (heads + 3 * config.ffn_width)


def forward(config: config_lib.ModelConfig, tokens: int, prefix: int) -> int:
  """F(T | P) in floating-point operations."""
  d = config.num_layers * config.num_heads * config.head_dim
  linear = 2 * layer_parameters(config) * tokens
  return linear + 4 * d * tokens * prefix + 2 * d * tokens**2


def gradient(
    config: config_lib.ModelConfig,
    *,
    prefix: int,
    branches: int,
    tail: int,
    mode: str,
    policy: str,
    share: float = 1.0,
) -> int:
  """Operations of one `value_and_grad` of one group.

  Args:
    config: geometry.
    prefix: P, positions that are captured: the prompt less one token.
    branches: G.
    tail: T, tokens of a tail, its boundary token included.
    mode: "full", "exact", "sampled" or "stop".
    policy: what is kept, see `schedule.Schedule.activations`.
    share: of "sampled", the expected share of the prefix's chunks that run.

  Returns:
    Floating-point operations, head included.
  """
  again = policy == "recompute_layers"
  head = 4 * 2 * config.vocab_size * config.width * branches * tail
  if mode == "full":
    return branches * (3 + again) * forward(config, prefix + tail, 0) + head
  tails = branches * (3 + again) * forward(config, tail, prefix)
  prefix_pass = {"keep": 2, "recompute": 3, "recompute_layers": 4}[policy]
  popped = {"stop": 0, "exact": 1, "sampled": share}[mode]
  passes = 1 + popped * prefix_pass
  return round(passes * forward(config, prefix, 0)) + tails + head
