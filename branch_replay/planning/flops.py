# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the floating-point operations of a gradient, by mode and policy.

A causal forward pass of T tokens on a prefix of P positions costs

  F(T | P) = 2NT + 4LdTP + 2LdT²,

with N the weights of all layers that a token meets (of experts only those it is
sent to), L layers, and d = heads · head_dim. In layers with a window a query
sees at most W keys; the gated delta rule costs 6DE for each token and value
head, whatever P is. A backward pass costs 2F. The head costs 2VM for each tail
token forward, twice that backward, and 2VM more because logits are computed
again. Padding, norms and softmax are not counted.
"""

from branch_replay import config as config_lib
from branch_replay.engine import band as band_lib
from branch_replay.mixers import kinds
from branch_replay.models import pattern


def layer_parameters(config: config_lib.ModelConfig) -> int:
  """Counts N, the matrix weights that a token meets in all layers."""
  def feed_forward(experts):
    if not experts:
      return 3 * config.width * config.ffn_width
    mixture = config.experts
    rows = mixture.top_k * mixture.width + mixture.shared_width
    logits = mixture.count + mixture.shared_gate
    return config.width * (3 * rows + logits)

  return sum(
      part.count
      * (kinds.of(config, kind).weights() + feed_forward(part.experts))
      for part in pattern.parts(config) for kind in part.kinds
  )


def forward(config: config_lib.ModelConfig, tokens: int, prefix: int) -> int:
  """F(T | P), with T `tokens` and P `prefix`, in floating-point operations."""
  return _linear(config, tokens) + _mixing(config, tokens, prefix)


def _linear(config, tokens):
  return 2 * layer_parameters(config) * tokens


def _mixing(config, tokens, prefix):
  """Attention, and reading and writing the matrices of recurrent layers."""
  return sum(
      part.count * kinds.of(config, kind).operations(tokens, prefix)
      for part in pattern.parts(config) for kind in part.kinds
  )


def _attending(config, tokens):
  """The part of `_mixing` whose outputs a state can keep."""
  return sum(
      part.count * kinds.of(config, kind).operations(tokens, 0)
      for part in pattern.parts(config) for kind in part.kinds
      if kinds.of(config, kind).attends
  )


def _banded(config, tokens, band):
  """`_mixing` without a prefix, for a pass that is cut to a band."""
  return sum(
      part.count
      * kinds.of(config, kind).banded_operations(
          tokens, band.window, band.sinks
      )
      for part in pattern.parts(config) for kind in part.kinds
  )


def _backward(config, tokens, prefix, trainable):
  """2F; less for a frozen base, which needs no weight gradients."""
  weights = 2 if trainable == "all" else 1
  linear = weights * _linear(config, tokens)
  return linear + 2 * _mixing(config, tokens, prefix)


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
    band: band_lib.Band = band_lib.Band(),
    keep_attention: bool = False,
) -> int:
  """Counts the operations of one `value_and_grad` of one group.

  Args:
    config: geometry of the model.
    prefix: P, positions of the prefix: the prompt less one token.
    branches: G, tails of the group.
    tail: T, tokens that are run for a tail.
    mode: "full", "exact", "banded", "sampled" or "stop".
    policy: activation policy, see `schedule.Schedule.activations`.
    share: expected share of the prefix's chunks that "sampled" pulls back.
    trainable: "all" or "adapters"; the adapters' own products are not counted.
    band: how far "banded" reaches.
    keep_attention: see `schedule.Schedule`.

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
  popped = {"stop": 0, "exact": 1, "banded": 1, "sampled": share}[mode]
  prefix_pass = there_and_back(prefix, 0, forwards)
  if keep_attention:
    prefix_pass -= forwards * _attending(config, prefix)
  if mode == "banded":
    whole, cut = _mixing(config, prefix, 0), _banded(config, prefix, band)
    prefix_pass -= 2 * (whole - cut)
  prefix_pass *= popped
  return round(forward(config, prefix, 0) + prefix_pass) + tails + head


def runs(
    config: config_lib.ModelConfig, shapes, *, mode: str, policy: str,
    trainable: str = "all",
) -> int:
  """Counts the operations of one `value_and_grad` of a tree, run by run.

  Args:
    config: geometry of the model.
    shapes: (rows, tokens, prefix, pushed, read) of each run of its program:
      rows of so many tokens on so many positions, whether the run is pushed
      (part of an inner segment), and whether it has outputs.
    mode: "full", "exact", "banded" or "stop". Of a banded tree attention is
      counted as in "exact".
    policy, trainable: as in `gradient`.

  Returns:
    Floating-point operations, head included.
  """
  again = policy == "recompute_layers"
  popped = {"keep": 0, "recompute": 1, "recompute_layers": 2}[policy]
  head_passes = 4 if trainable == "all" else 3
  total = 0
  for rows, tokens, prefix, pushed, read in shapes:
    forwards, pulled = 1 + again, True
    if pushed and mode in ("exact", "banded"):
      forwards = 1 + popped
    elif pushed and not read:  # "stop" pulls nothing back through it
      forwards, pulled = 1, False
    there = forwards * forward(config, tokens, prefix)
    back = pulled * _backward(config, tokens, prefix, trainable)
    head = read * head_passes * 2 * config.vocab_size * config.width * tokens
    total += rows * (there + back + head)
  return total
