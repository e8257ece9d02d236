# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages: how much better than expected an answer, or a token, was.

A group whose rewards are all equal is *dead*: nothing can be learnt from it,
and its advantages are exactly 0. Rewards are equal if they differ by at most
four roundings of the largest one, in the dtype they are given in (at least
float32), so that a sum taken in another order does not count as a better
answer.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay import config as config_lib

_ROUNDINGS = 4


def group_relative(
    rewards_G, mask_G=None, *, normalize: bool = True, epsilon: float = 1e-6,
    ddof: int = 1,
) -> jax.Array:
  """Aᵢ = (rᵢ − mean r) / (std r + ε), arXiv 2402.03300, section 4.1.2.

  Args:
    rewards_G: rewards of a group, [..., G].
    mask_G: bool[..., G], false for branches that are padding; None for all
      true.
    normalize: False for rᵢ − mean r, arXiv 2503.20783.
    epsilon: ε ≥ 0.
    ddof: the standard deviation divides by n − ddof, where ddof is 0 or 1.

  Returns:
    [..., G], at least float32; 0 for a dead group, a single branch, or padding.

  Raises:
    ValueError: an ε below 0, or a ddof that is not 0 or 1.

  Example:
    >>> group_relative([1.0, 0.0, 0.0, 1.0], normalize=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
  """
  rewards_G, mask_G = _prepared(rewards_G, mask_G)
  centred_G = _centred(rewards_G, mask_G)
  if normalize:
    centred_G /= _spread(centred_G, mask_G, epsilon, ddof)
  return jnp.where(mask_G & ~_flat(rewards_G, mask_G), centred_G, 0)


def leave_one_out(rewards_G, mask_G=None) -> jax.Array:
  """Aᵢ = rᵢ − mean of the others = n/(n − 1) (rᵢ − mean r), arXiv 2402.14740.

  Args:
    rewards_G: rewards of a group, [..., G].
    mask_G: bool[..., G], false for branches that are padding; None for all
      true.

  Returns:
    [..., G], at least float32; 0 for a dead group, a single branch, or padding.

  Example:
    >>> leave_one_out([3.0, 0.0, 0.0]).tolist()
    [3.0, -1.5, -1.5]
  """
  rewards_G, mask_G = _prepared(rewards_G, mask_G)
  count_G1 = jnp.sum(mask_G, axis=-1, keepdims=True)
  scale_G1 = count_G1 / jnp.maximum(count_G1 - 1, 1)
  result_G = scale_G1 * _centred(rewards_G, mask_G)
  return jnp.where(mask_G & ~_flat(rewards_G, mask_G), result_G, 0)


def is_dead(rewards_G, mask_G=None) -> jax.Array:
  """bool[...]: whether all rewards of a group are equal, see the module.

  A group of one branch, or of none, is dead. Arguments as of `leave_one_out`.
  """
  return _flat(*_prepared(rewards_G, mask_G))[..., 0]


def whiten(values_GT, mask_GT, *, epsilon: float = 1e-8) -> jax.Array:
  """(x − mean x) / (std x + ε) over all entries of the mask together.

  Args:
    values_GT: x, of any shape.
    mask_GT: bool, of the same shape.
    epsilon: ε ≥ 0.

  Returns:
    Like values_GT, at least float32. Entries outside the mask stay as they are,
    and so does a single entry inside; entries that are all equal become 0.

  Raises:
    ValueError: values and mask have different shapes.
  """
  if jnp.shape(values_GT) != jnp.shape(mask_GT):
    raise ValueError(
        f"values of shape {jnp.shape(values_GT)} with a mask of "
        f"{jnp.shape(mask_GT)}: one entry of the mask for each value."
    )
  values_N, mask_N = _prepared(jnp.ravel(values_GT), jnp.ravel(mask_GT))
  centred_N = _centred(values_N, mask_N)
  result_N = centred_N / _spread(centred_N, mask_N, epsilon, ddof=1)
  result_N = jnp.where(_flat(values_N, mask_N), 0, result_N)
  several = jnp.sum(mask_N) > 1
  result_N = jnp.where(mask_N & several, result_N, values_N)
  return result_N.reshape(jnp.shape(values_GT))


def gae(
    rewards_GT, values_GT, mask_GT, *, discount: float, trace: float,
    bootstrap_G=None,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation, arXiv 1506.02438, equation 16.

    δₜ = rₜ + γ Vₜ₊₁ − Vₜ,   Aₜ = δₜ + γλ Aₜ₊₁,   Rₜ = Aₜ + Vₜ

  t + 1 is the next token inside the mask. Tokens outside it (padding, or text
  that was not sampled) are skipped: their rewards and values are not read.

  Args:
    rewards_GT: r of every token; a reward of the whole answer is on its last.
    values_GT: V before every token.
    mask_GT: bool[..., G, T].
    discount: γ in [0, 1].
    trace: λ in [0, 1].
    bootstrap_G: V after the last token, for answers that were truncated; None
      for 0, which is right for answers that ended.

  Returns:
    (advantages_GT, returns_GT), 0 outside the mask.

  Raises:
    ValueError: shapes differ, or γ or λ is outside [0, 1].
  """
  for name, value in (("discount", discount), ("trace", trace)):
    if not 0 <= value <= 1:
      raise ValueError(f"{name} must lie in [0, 1], not {value}.")
  shape = jnp.shape(mask_GT)
  if bootstrap_G is None:
    bootstrap_G = jnp.zeros(shape[:-1])
  for name, array, wanted in (
      ("rewards", rewards_GT, shape), ("values", values_GT, shape),
      ("bootstrap", bootstrap_G, shape[:-1]),
  ):
    if jnp.shape(array) != wanted:
      raise ValueError(
          f"{name} has shape {jnp.shape(array)}, not {wanted} as the mask says."
      )
  dtype = config_lib.at_least_float32(
      jnp.result_type(rewards_GT, values_GT, bootstrap_G)
  )
  rewards_GT, values_GT, bootstrap_G = (
      jnp.asarray(x, dtype) for x in (rewards_GT, values_GT, bootstrap_G)
  )

  def back(carry, inputs):
    next_value_G, next_advantage_G = carry
    reward_G, value_G, mask_G = inputs
    delta_G = reward_G + discount * next_value_G - value_G
    advantage_G = delta_G + discount * trace * next_advantage_G
    carry = (
        jnp.where(mask_G, value_G, next_value_G),
        jnp.where(mask_G, advantage_G, next_advantage_G),
    )
    return carry, jnp.where(mask_G, advantage_G, 0)

  by_time = tuple(
      jnp.moveaxis(jnp.asarray(x), -1, 0)
      for x in (rewards_GT, values_GT, mask_GT)
  )
  start = bootstrap_G, jnp.zeros(shape[:-1], dtype)
  _, advantages_TG = lax.scan(back, start, by_time, reverse=True)
  advantages_GT = jnp.moveaxis(advantages_TG, 0, -1)
  return advantages_GT, jnp.where(mask_GT, advantages_GT + values_GT, 0)


def check_rewards(rewards_G, shape: tuple[int, ...]) -> np.ndarray:
  """Rewards as an array, after checking that they are finite numbers.

  Not for use under `jit`.

  Args:
    rewards_G: what a reward function returned.
    shape: shape they must have, (G,) or (groups, G).

  Returns:
    The rewards, float32 or float64.

  Raises:
    ValueError: another shape, values that are not numbers, NaN or infinity.
  """
  rewards_G = np.asarray(rewards_G)
  if rewards_G.shape != tuple(shape):
    raise ValueError(
        f"rewards have shape {rewards_G.shape}, not {tuple(shape)}: one for "
        "every branch."
    )
  if rewards_G.dtype.kind not in "buif":
    raise ValueError(f"rewards must be numbers, not {rewards_G.dtype}.")
  bad = np.argwhere(~np.isfinite(rewards_G))
  if bad.size:
    first = tuple(bad[0].tolist())
    raise ValueError(
        f"{len(bad)} rewards are not finite, the first one at {first}: "
        f"{rewards_G[first]}. A reward that failed has to be replaced or its "
        "answer masked before advantages are taken."
    )
  dtype = rewards_G.dtype if rewards_G.dtype == np.float64 else np.float32
  return rewards_G.astype(dtype)


def _prepared(rewards_G, mask_G):
  """At least float32, and a mask."""
  rewards_G = checks.numbers_of(rewards_G, "rewards")
  rewards_G = rewards_G.astype(config_lib.at_least_float32(rewards_G.dtype))
  _check_finite(rewards_G, mask_G)
  if mask_G is None:
    return rewards_G, jnp.ones(rewards_G.shape, bool)
  if jnp.shape(mask_G) != rewards_G.shape:
    raise ValueError(
        f"rewards of shape {rewards_G.shape} with a mask of "
        f"{jnp.shape(mask_G)}: one entry of the mask for each reward."
    )
  return rewards_G, jnp.asarray(mask_G)


def _check_finite(rewards_G, mask_G):
  """Raises ValueError for NaN or infinity inside the mask.

  Under `jit` values are unknown and nothing is checked; call `check_rewards`
  before.
  """
  if isinstance(rewards_G, jax.core.Tracer) or isinstance(
      mask_G, jax.core.Tracer
  ):
    return
  bad = ~np.isfinite(np.asarray(rewards_G))
  if mask_G is not None and np.shape(mask_G) == bad.shape:
    bad &= np.asarray(mask_G)
  if bad.any():
    raise ValueError(
        f"{bad.sum()} rewards are not finite: replace them, or leave their "
        "branches out by the mask."
    )


def _extremes(x_G, mask_G):
  """The smallest and the largest of the masked entries, [..., 1]."""
  return (
      jnp.min(jnp.where(mask_G, x_G, jnp.inf), axis=-1, keepdims=True),
      jnp.max(jnp.where(mask_G, x_G, -jnp.inf), axis=-1, keepdims=True),
  )


def _flat(x_G, mask_G):
  """[..., 1]: whether the masked entries are equal, see the module."""
  low_G1, high_G1 = _extremes(x_G, mask_G)
  largest_G1 = jnp.maximum(jnp.abs(low_G1), jnp.abs(high_G1))
  rounding = _ROUNDINGS * jnp.finfo(x_G.dtype).eps
  return high_G1 - low_G1 <= rounding * largest_G1


def _centred(x_G, mask_G):
  """x − mean x, 0 outside of the mask."""
  low_G1, _ = _extremes(x_G, mask_G)
  # The difference of values close together is exact.
  above_G = jnp.where(mask_G, x_G - low_G1, 0)
  count_G1 = jnp.maximum(jnp.sum(mask_G, axis=-1, keepdims=True), 1)
  mean_G1 = jnp.sum(above_G, axis=-1, keepdims=True) / count_G1
  return jnp.where(mask_G, above_G - mean_G1, 0)


def _spread(centred_G, mask_G, epsilon, ddof):
  """std + ε, [..., 1]."""
  if not epsilon >= 0 or ddof not in (0, 1):
    raise ValueError(
        f"epsilon={epsilon} must be ≥ 0 and ddof={ddof} must be 0 or 1."
    )
  count_G1 = jnp.maximum(jnp.sum(mask_G, axis=-1, keepdims=True) - ddof, 1)
  square_G1 = jnp.sum(jnp.square(centred_G), axis=-1, keepdims=True) / count_G1
  return jnp.sqrt(square_G1) + epsilon
