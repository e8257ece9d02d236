# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout: where parameters and tokens live, as hooks the engine calls.

This is the layout of one device, on which every hook is the identity and which
says what each is for. `sharding.Sharded` is the one of several devices.
"""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay.ops import attention
from branch_replay.ops.attention import kernels


@dataclasses.dataclass(frozen=True)
class Layout:
  """Everything on one device.

  Attributes:
    implementation: of attention on its devices; that of `Schedule` replaces
      it.
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
    """Of the devices that the tokens are dealt to, see `kernels.platform`."""
    return kernels.platform()

  def kernel(self, q_KGRTD) -> kernels.Kernel | None:
    """What attends with such queries; None for the loops."""
    return kernels.choose(
        self.implementation, self.platform, q_KGRTD.dtype, q_KGRTD.shape[-1]
    )

  def over(self, function, ins, outs, grads_like=None):
    """`function`, run on every device's share of its arguments.

    Args:
      function: of shares, to shares.
      ins: kinds of its arguments, each a kind or a tree of kinds: "params",
        "grads", "mixer" (arrays of a state or its cotangent), "stacked" (with
        one more axis before) or "all", which every device has whole.
      outs: kinds of its results.
      grads_like: the parameters that "grads" are like.
    """
    del ins, outs, grads_like
    return function

  def shardings(self, params):
    """Where each leaf of a tree of parameters is; None where jax decides."""
    del params
    return None

  def gather(self, path: str, params):
    """This device's share of the parameters at `path` ↦ all of them.

    Not of the vocabulary tables among all that lie outside the layers, path
    "": each is larger than several layers. The embedding is looked up where
    its columns are, and the head gathered chunk by chunk, path "head".
    """
    del path
    return params

  def reduce(self, path: str, grads):
    """Their whole gradient ↦ this device's share of the sum over devices."""
    del path
    return grads

  def look_up(self, table_VM, tokens_GT, dtype):
    """Rows of the embedding for this device's tokens, [G, T, M]."""
    return table_VM[tokens_GT].astype(dtype)

  def add_rows(self, table_VM, tokens_GT, rows_GTM):
    """Adds cotangents of embedded tokens to their rows of the table."""
    return table_VM.at[tokens_GT].add(rows_GTM.astype(table_VM.dtype))

  def mine(self, x, axis: int):
    """This device's tokens: every `devices`-th along an axis."""
    del axis
    return x

  def all(self, x, axis: int):
    """The tokens of all devices, in order along an axis."""
    del axis
    return x

  def sum_mine(self, x, axis: int):
    """Sum over devices, of which this one gets its tokens."""
    del axis
    return x

  def sum(self, x):
    """Sum over devices."""
    return x

  def merge(self, out, lse):
    """Attention of all tokens to this device's keys ↦ this device's tokens'
    attention to all keys."""
    return out, lse

  def to_heads(self, x_GTK):
    """This device's tokens of all heads ↦ all tokens of this device's heads.

    Heads that the devices do not divide are padded with zeros.
    """
    return x_GTK

  def to_tokens(self, x_GTK, heads: int):
    """Undoes `to_heads` of so many heads."""
    del heads
    return x_GTK

  def my_heads(self, x_K):
    """This device's heads of what all have."""
    return x_K

  def stripe(self) -> attention.Stripe:
    """Which keys of a segment are here."""
    return attention.Stripe()

  def positions(self, start, count: int) -> jax.Array:
    """Positions of this device's share of `count` tokens from `start`."""
    stripe = self.stripe()
    steps = jnp.arange(count // stripe.stride)
    return start + stripe.offset + stripe.stride * steps

  def here(self, length):
    """How many of the first `length` positions of a prefix are here."""
    stripe = self.stripe()
    return (length - stripe.offset + stripe.stride - 1) // stripe.stride
