# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""From losses of tokens to one loss, whichever way the branches are split.

A mean of means depends on how answers fall into micro-batches. So there are two
forms, and neither is a mean of a part:

- `token_weights` settles the weight of every token for all answers at once;
  then the loss of any part is a plain weighted sum, and parts add up.
- `reduce` gives a part's sum and its weight; both add over parts, and the
  quotient of the totals is the loss.

An answer without a trained token (empty, padding, or masked because it was
truncated) leaves numerator and denominator alike.
"""

from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay.rl import checks

Reduction = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class Total(NamedTuple):
  """A sum of losses and what to divide it by; both add over parts."""

  sum: jax.Array
  weight: jax.Array

  def mean(self) -> jax.Array:
    """sum / weight, 0 where nothing was counted."""
    return self.sum / jnp.maximum(self.weight, 1)


def shares(mask_GT, reduction: Reduction, *, max_tokens: int | None = None):
  """How much each token counts in the sum, and the weight of the whole.

  With |yᵢ| trained tokens of answer i, and n answers that have any:

    token_mean       1            of   Σᵢ |yᵢ|
    sequence_mean    1 / |yᵢ|     of   n
    sequence_sum     1            of   n
    constant         1 / L_max    of   n

  Args:
    mask_GT: bool[..., G, T], the tokens that are trained.
    reduction: as above.
    max_tokens: L_max, of "constant" and of no other.

  Returns:
    share_GT, 0 outside the mask, and the weight, a scalar.

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
  """Weights w with loss = Σ w · loss_GT, settled for all answers given.

  Computed once for the whole batch, before it is split: over micro-batches,
  groups and devices the weighted sums then add up to the loss.

  Args:
    mask_GT: bool[..., G, T]; of several groups all at once, unless every group
      is to have a mean of its own.
    reduction: see `shares`.
    max_tokens: see `shares`.

  Returns:
    weights_GT; all 0 if there is nothing to train.

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
  """The sum and the weight of one part; add those of all, then take `mean`.

  Args:
    loss_GT: loss of every token; what lies outside the mask is not read.
    mask_GT: bool[..., G, T].
    reduction: see `shares`.
    max_tokens: see `shares`.

  Returns:
    The total of this part.

  Raises:
    ValueError: see `shares`; a loss of another shape than the mask.
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
