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
  return _linear(config, tokens) + _attention(config, tokens, prefix)


def _linear(config, tokens):
  return 2 * layer_parameters(config) * tokens


def _attention(config, tokens, prefix):
  d = config.num_layers * config.num_heads * config.head_dim
  return 4 * d * tokens * prefix + 2 * d * tokens**2


def _backward(config, tokens, prefix, trainable):
  """2F; of a frozen base only the cotangents of activations."""
  weights = 2 if trainable == "all" else 1
  linear = weights * _linear(config, tokens)
  return linear + 2 * _attention(config, tokens, prefix)


def gradient(
    config: config_lib.ModelConfig,
    *,
    prefix: int,
    branches: int,
    tail: int,
    mode: str,
    policy: str,
    share: float = 1.0,
    trainable: str = "all",
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
    trainable: "all" or "adapters", whose own products are not counted.

  Returns:
    Floating-point operations, head included.
  """
  again = policy == "recompute_layers"
  head_passes = 4 if trainable == "all" else 3
  head = head_passes * 2 * config.vocab_size * config.width * branches * tail

  def there_and_back(tokens, before, forwards):
    there = forwards * forward(config, tokens, before)
    return there + _backward(config, tokens, before, trainable)

  if mode == "full":
    return branches * there_and_back(prefix + tail, 0, 1 + again) + head
  tails = branches * there_and_back(tail, prefix, 1 + again)
  forwards = {"keep": 0, "recompute": 1, "recompute_layers": 2}[policy]
  popped = {"stop": 0, "exact": 1, "sampled": share}[mode]
  prefix_pass = popped * there_and_back(prefix, 0, forwards)
  return round(forward(config, prefix, 0) + prefix_pass) + tails + head
