# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout: hooks the engine calls wherever data would move between devices.

Here is the layout of one device, where the hooks do nothing; the docstrings say
what each does on several devices, which `sharding.Sharded` implements. There,
tokens are dealt out: device d has tokens d, d + n, d + 2n, … of every stretch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay.ops import attention
from branch_replay.ops.attention import kernels


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout of one device.

  Attributes:
    implementation: which implementation of attention runs on its devices;
      `Schedule.attention` replaces it.
  """

  implementation: kernels.Name = dataclasses.field(
      default="auto", kw_only=True
  )

  @property
  def devices(self) -> int:
    """How many devices the tokens of a segment are dealt to."""
    return 1

  @property
  def platform(self) -> str:
    """The platform of the layout's devices, see `kernels.platform`."""
    return kernels.platform()

  def kernel(self, q_KGRTD) -> kernels.Kernel | None:
    """Chooses the attention kernel for these queries; None for the loops."""
    return kernels.choose(
        self.implementation, self.platform, q_KGRTD.dtype, q_KGRTD.shape[-1]
    )

  def over(self, function, ins, outs, grads_like=None):
    """Wraps a function so that it runs on every device, on that device's share.

    Args:
      function: takes and returns one device's shares.
      ins: how each argument is shared, one word or a tree of them: "params",
        "grads", "mixer" (arrays of a state or its cotangent, by position),
        "stacked" (the same with one more leading axis) or "all", which every
        device has whole.
      outs: how each result is shared, in the same words.
      grads_like: parameters with the structure of the results in "grads".

    Returns:
      A function of whole arguments that returns whole results.
    """
    del ins, outs, grads_like
    return function

  def shardings(self, params):
    """The sharding of each leaf of `params`; None to leave it to jax."""
    del params
    return None

  def gather(self, path: str, params):
    """Gathers this device's share of the parameters at `path` to whole ones.

    For path "", all parameters outside the layers, the vocabulary tables stay
    sharded, as each is larger than several layers: `look_up` reads the
    embedding where its columns are, and the head is gathered chunk by chunk
    with path "head".
    """
    del path
    return params

  def reduce(self, path: str, grads):
    """Sums whole gradients over devices and returns this device's share."""
    del path
    return grads

  def look_up(self, table_VM, tokens_GT, dtype):
    """Looks up this device's tokens in the embedding table, [G, T, M]."""
    return table_VM[tokens_GT].astype(dtype)

  def add_rows(self, table_VM, tokens_GT, rows_GTM):
    """Adds cotangents of embedded tokens to their rows of the table."""
    return table_VM.at[tokens_GT].add(rows_GTM.astype(table_VM.dtype))

  def mine(self, x, axis: int):
    """Takes this device's tokens, every `devices`-th along an axis."""
    del axis
    return x

  def all(self, x, axis: int):
    """Gathers the tokens of all devices, in order along an axis."""
    del axis
    return x

  def sum_mine(self, x, axis: int):
    """Sums over devices and takes this device's tokens of the sum."""
    del axis
    return x

  def sum(self, x):
    """Sums over devices."""
    return x

  def merge(self, out, lse):
    """Merges attention over the keys of all devices, by log-sum-exp.

    `out` [K, G, R, T, D] is attention of all devices' tokens to this device's
    keys, `lse` [K, G, R, T] the log-sum-exp of the scores, −inf without keys.
    Returns both for this device's tokens and the keys of all devices.
    """
    return out, lse

  def to_heads(self, x_GTK):
    """Exchanges this device's tokens for all tokens of this device's heads.

    [G, T / n, K, ...] becomes [G, T, K / n, ...], with zeros added to K if the
    n devices do not divide it.
    """
    return x_GTK

  def to_tokens(self, x_GTK, heads: int):
    """Undoes `to_heads`; `heads` is the number K without padding."""
    del heads
    return x_GTK

  def my_heads(self, x_K):
    """Takes this device's heads along axis 0 of what every device has."""
    return x_K

  def stripe(self) -> attention.Stripe:
    """Which of a segment's tokens this device has: stride and offset."""
    return attention.Stripe()

  def positions(self, start, count: int) -> jax.Array:
    """Positions of this device's share of `count` tokens from `start`."""
    stripe = self.stripe()
    steps = jnp.arange(count // stripe.stride)
    return start + stripe.offset + stripe.stride * steps

  def here(self, length):
    """How many of a prefix's first `length` positions this device has."""
    stripe = self.stripe()
    return (length - stripe.offset + stripe.stride - 1) // stripe.stride
