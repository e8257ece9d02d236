# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""From losses of tokens to one loss that does not depend on the split.

A mean of means depends on how answers are divided into micro-batches. So there
are two forms, and neither takes the mean of a part:

- `token_weights` computes the weight of every token for all answers at once.
  The loss of a part is then a weighted sum, and parts add up.
- `reduce` returns a part's sum and its weight. Both add up over parts, and the
  loss is the quotient of the totals.

An answer without a trained token (empty, padding, or masked because it was
truncated) counts neither in the sum nor in the weight.
"""

from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay.rl import checks

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class Total(NamedTuple):
  """A sum of losses and its weight; both add up over parts."""

  sum: jax.Array
  weight: jax.Array

  def mean(self) -> jax.Array:
    """sum / weight; 0 if nothing was counted."""
    return self.sum / jnp.maximum(self.weight, 1)


def shares(mask_GT, reduction: Reduction, *, max_tokens: int | None = None):
  """The factor of each token's loss in the sum, and the weight of the whole.

  With |yᵢ| trained tokens of answer i, and n answers that have any:

    reduction        factor       weight
    token_mean       1            Σᵢ |yᵢ|
    sequence_mean    1 / |yᵢ|     n
    sequence_sum     1            n
    constant         1 / L_max    n

  Args:
    mask_GT: bool[..., G, T], the tokens that are trained.
    reduction: one of the above.
    max_tokens: L_max, for "constant" only.

  Returns:
    share_GT, the factors, 0 outside the mask, and the weight, a scalar.

  Raises:
    ValueError: an unknown reduction, or max_tokens missing or out of place.
  """
  check_reduction(reduction, max_tokens)
  checks.check_mask(mask_GT)
  share_GT = mask_GT.astype(jnp.result_type(float))
  length_G1 = jnp.sum(mask_GT, axis=-1, keepdims=True)
  if reduction == "sequence_mean":
    share_GT /= jnp.maximum(length_G1, 1)
  if reduction == "constant":
    share_GT /= max_tokens
  counted = mask_GT if reduction == "token_mean" else length_G1 > 0
  return share_GT, jnp.sum(counted).astype(share_GT.dtype)


def token_weights(
    mask_GT, reduction: Reduction, *, max_tokens: int | None = None
) -> jax.Array:
  """Weights w with loss = Σ w · loss_GT, computed for all answers at once.

  Compute them for the whole batch before it is split: the weighted sums of
  micro-batches, groups and devices then add up to the loss.

  Args:
    mask_GT: bool[..., G, T]. Pass several groups together, unless every group
      is to have a mean of its own.
    reduction: see `shares`.
    max_tokens: see `shares`.

  Returns:
    weights_GT; all 0 if no token is trained.

  Raises:
    ValueError: see `shares`.

  Example:
    >>> mask_GT = jnp.array([[True, True], [True, False]])
    >>> token_weights(mask_GT, "sequence_mean").tolist()
    [[0.25, 0.25], [0.5, 0.0]]
  """
  share_GT, weight = shares(mask_GT, reduction, max_tokens=max_tokens)
  return share_GT / jnp.maximum(weight, 1)


def reduce(
    loss_GT, mask_GT, reduction: Reduction, *, max_tokens: int | None = None
) -> Total:
  """The sum and the weight of one part; add those of all parts, then `mean`.

  Args:
    loss_GT: loss of every token; entries outside the mask are not read.
    mask_GT: bool[..., G, T].
    reduction: see `shares`.
    max_tokens: see `shares`.

  Returns:
    The total of this part.

  Raises:
    ValueError: see `shares`; also if loss and mask differ in shape.
  """
  checks.check_mask(mask_GT, loss=loss_GT)
  share_GT, weight = shares(mask_GT, reduction, max_tokens=max_tokens)
  return Total(jnp.sum(share_GT * jnp.where(mask_GT, loss_GT, 0)), weight)


def check_reduction(reduction: Reduction, max_tokens: int | None):
  """Raises ValueError for an unknown reduction or a misplaced L_max."""
  checks.check_choice("reduction", reduction, Reduction)
  if (reduction == "constant") != (max_tokens is not None):
    raise ValueError(
        f"max_tokens={max_tokens} with reduction={reduction!r}: the longest "
        "answer there can be goes with 'constant', and only with it."
    )
  if max_tokens is not None and max_tokens < 1:
    raise ValueError(f"max_tokens must be at least 1, not {max_tokens}.")
