# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Training written down by hand, for the package's own to be compared with.

Whole sequences through the plain model, ordinary autodiff, numpy for the rest.
Nothing here calls what it is a reference of: no state, no replay, no `rl`, no
optax.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from tests import tiny


class Answers(NamedTuple):
  """One prompt, its answers and what they earned, as plain lists and arrays."""

  prompt: np.ndarray
  tails: list
  rewards: np.ndarray


@functools.partial(jax.jit, static_argnums=0)
def _read(model, params, tokens_GS, targets_GT, first, temperature):
  hidden_GSM = model.apply({"params": params}, tokens_GS, method="hidden")
  hidden_GTM = hidden_GSM[:, first + jnp.arange(targets_GT.shape[1])]
  table_VM = params["head"]["table"]
  logits_GTV = jnp.einsum("gtm,vm->gtv", hidden_GTM, table_VM) / temperature
  log_probs_GTV = jax.nn.log_softmax(logits_GTV)
  picked_GT1 = jnp.take_along_axis(log_probs_GTV, targets_GT[..., None], 2)
  head = params.get("value_head")
  values_GT = jnp.zeros(targets_GT.shape)
  if head is not None:
    values_GT = hidden_GTM @ head["kernel"] + head["bias"]
  return picked_GT1[..., 0], values_GT


def read(model, params, batch, *, width: int, temperature: float = 1.0):
  """Log-probs and values of the answers' tokens, [N, G, T] both.

  Differentiable in `params`. Both are arbitrary past an answer's end.
  """
  room = max(one.prompt.size for one in batch) + width
  found = []
  for one in batch:
    tokens_GS = np.zeros((len(one.tails), room), np.int32)
    targets_GT = np.zeros((len(one.tails), width), np.int32)
    tokens_GS[:, : one.prompt.size] = one.prompt
    for row, tail in enumerate(one.tails):
      tokens_GS[row, one.prompt.size : one.prompt.size + len(tail)] = tail
      targets_GT[row, : len(tail)] = tail
    found.append(_read(
        model, params, tokens_GS, targets_GT, one.prompt.size - 1, temperature
    ))
  log_probs, values = zip(*found, strict=True)
  return jnp.stack(log_probs), jnp.stack(values)


def mask_of(batch, width: int) -> np.ndarray:
  """bool[N, G, T]."""
  return np.array([
      [np.arange(width) < len(tail) for tail in one.tails] for one in batch
  ])


def group_relative(rewards_NG):
  """GRPO's advantages, by the deviation that divides by n − 1."""
  mean_N1 = rewards_NG.mean(1, keepdims=True)
  deviation_N1 = rewards_NG.std(1, ddof=1, keepdims=True)
  same_N1 = np.ptp(rewards_NG, axis=1, keepdims=True) == 0
  return np.where(same_N1, 0, (rewards_NG - mean_N1) / (deviation_N1 + 1e-6))


def group_centred(rewards_NG):
  """Dr. GRPO's advantages."""
  return rewards_NG - rewards_NG.mean(1, keepdims=True)


def leave_one_out(rewards_NG):
  """RLOO's advantages: less the mean of the others."""
  others_NG = rewards_NG.sum(1, keepdims=True) - rewards_NG
  return rewards_NG - others_NG / (rewards_NG.shape[1] - 1)


def gae(rewards_NG, values_NGT, mask_NGT, *, discount, trace):
  """Advantages and returns, token by token from an answer's end."""
  advantages_NGT = np.zeros(mask_NGT.shape)
  for n, g in np.ndindex(*mask_NGT.shape[:2]):
    length, later, value_after = int(mask_NGT[n, g].sum()), 0.0, 0.0
    for t in reversed(range(length)):
      reward = rewards_NG[n, g] if t == length - 1 else 0.0
      delta = reward + discount * value_after - values_NGT[n, g, t]
      later = delta + discount * trace * later
      advantages_NGT[n, g, t], value_after = later, values_NGT[n, g, t]
  return advantages_NGT, np.where(mask_NGT, advantages_NGT + values_NGT, 0)


def whiten(x_NGT, mask_NGT):
  """Mean 0 and deviation 1 over all tokens of all answers."""
  inside = x_NGT[mask_NGT]
  return (x_NGT - inside.mean()) / (inside.std(ddof=1) + 1e-8)


def surrogate(ratio, advantages, *, low, high, dual):
  """PPO's clipped loss, with the dual clip where the advantage is negative."""
  clipped = jnp.clip(ratio, 1 - low, 1 + high)
  gain = jnp.minimum(ratio * advantages, clipped * advantages)
  bounded = jnp.maximum(gain, dual * advantages)
  return -jnp.where(advantages < 0, bounded, gain)


def k3(log_probs, reference):
  """Schulman's third estimate of KL(π ‖ π_ref)."""
  return jnp.exp(reference - log_probs) - (reference - log_probs) - 1


def token_mean(loss_NGT, mask_NGT):
  return jnp.sum(jnp.where(mask_NGT, loss_NGT, 0)) / mask_NGT.sum()


def sequence_mean(loss_NGT, mask_NGT):
  """A mean over tokens within an answer, then over answers."""
  sum_NG = jnp.sum(jnp.where(mask_NGT, loss_NGT, 0), -1)
  return jnp.mean(sum_NG / mask_NGT.sum(-1))


def sequence_sum(loss_NGT, mask_NGT):
  """A sum over tokens, a mean over answers."""
  return jnp.mean(jnp.sum(jnp.where(mask_NGT, loss_NGT, 0), -1))


def pairs(rewards_G):
  """Rows of (better, worse): best and worst, second and second worst, …"""
  order = sorted(range(len(rewards_G)), key=lambda row: -rewards_G[row])
  half = len(order) // 2
  return [
      (a, b) for a, b in zip(order[:half], reversed(order), strict=False)
      if rewards_G[a] > rewards_G[b]
  ]


def leaves(params) -> dict:
  """Float64 arrays by path."""
  return {
      jax.tree_util.keystr(path): np.array(x, np.float64)
      for path, x in jax.tree_util.tree_leaves_with_path(params)
  }


class AdamW:
  """AdamW after clipping by the global norm: the textbook's lines.

  Args:
    params: before the first update.
    rates: learning rate of every update.
    clip: the greatest norm of a gradient.
    decayed: (path) -> bool, what weight decay is for.
  """

  def __init__(
      self, params, rates, *, b1=0.9, b2=0.99, clip, decay=0.0,
      decayed=lambda path: True,
  ):
    self.params, self.count = leaves(params), 0
    self.treedef = jax.tree.structure(params)
    self.m = {path: np.zeros_like(x) for path, x in self.params.items()}
    self.v = {path: np.zeros_like(x) for path, x in self.params.items()}
    self.rates, self.b1, self.b2, self.clip = rates, b1, b2, clip
    self.decay, self.decayed = decay, decayed

  def update(self, grads) -> float:
    """One update; the norm of the gradient before it is clipped."""
    grads, rate = leaves(grads), self.rates[self.count]
    self.count += 1
    norm = np.sqrt(sum(np.sum(g * g) for g in grads.values()))
    for path, g in grads.items():
      g = g * min(1, self.clip / norm)
      self.m[path] = self.b1 * self.m[path] + (1 - self.b1) * g
      self.v[path] = self.b2 * self.v[path] + (1 - self.b2) * g * g
      m = self.m[path] / (1 - self.b1 ** self.count)
      v = self.v[path] / (1 - self.b2 ** self.count)
      decay = self.decay if self.decayed(path) else 0
      self.params[path] = self.params[path] - rate * (
          m / (np.sqrt(v) + 1e-8) + decay * self.params[path]
      )
    return float(norm)

  @property
  def tree(self):
    """The parameters as the model takes them."""
    return jax.tree.unflatten(
        self.treedef, [jnp.asarray(x) for x in self.params.values()]
    )


def assert_moved_alike(found, hand: AdamW, start, tolerance: float):
  """Every parameter is where the hand put it, by how far it was moved."""
  found, start = leaves(found), leaves(start)
  for path, wanted in hand.params.items():
    moved = np.linalg.norm(wanted - start[path])
    error = np.linalg.norm(found[path] - wanted)
    assert error <= tolerance * moved, (path, error, moved)


def sample(model, params, prompt, key, *, branches, most, stop_ids):
  """Answers token by token, each by a full forward pass of its own.

  The token at absolute position p of row b is the argmax of its log-probs plus
  Gumbel noise of the key folded with b, then with p.
  """
  tails, log_probs = ([[] for _ in range(branches)] for _ in range(2))
  for row in range(branches):
    while len(tails[row]) < most and not (
        tails[row] and tails[row][-1] in stop_ids
    ):
      at = prompt.size + len(tails[row])
      ids = np.zeros((1, prompt.size + most), np.int32)
      ids[0, :at] = [*prompt, *tails[row]]
      log_p_V = _next(model, params, ids, at - 1)
      own = jax.random.fold_in(jax.random.fold_in(key, row), at)
      noise_V = jax.random.gumbel(own, log_p_V.shape, log_p_V.dtype)
      token = int(jnp.argmax(log_p_V + noise_V))
      tails[row].append(token)
      log_probs[row].append(float(log_p_V[token]))
  return tails, log_probs


@functools.partial(jax.jit, static_argnums=0)
def _next(model, params, ids, at):
  return jax.nn.log_softmax(model.apply({"params": params}, ids)[0, at])


@functools.cache
def model_in_float64():
  """The decoder of `tiny`, parameters, and others near them.

  Drawn by numpy, which compiles nothing.
  """
  model = br.Decoder(tiny.in_float64(tiny.BASE))
  with jax.enable_x64(True):
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    )["params"]
  random = np.random.default_rng(3)

  def near(centre):
    return jax.tree.map(
        lambda x: jnp.asarray(x + 0.02 * random.normal(size=x.shape)), centre
    )

  def first(path, x):
    if "scale" in jax.tree_util.keystr(path):
      return 1 + 0.2 * random.normal(size=x.shape)
    return random.normal(size=x.shape) / np.sqrt(x.shape[-1])

  with jax.enable_x64(True):
    params = near(jax.tree_util.tree_map_with_path(first, shapes))
    return model, params, near(params)
