# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention by a library's kernel, one stretch of the prefix at a time.

The kernels of libraries have static sizes and know no prefix length. So the
prefix is cut in stretches of fixed sizes, long ones and then short ones, in
loops whose trip counts follow the length. The rest, less than a short stretch,
is left to `loops`. Outputs are merged by log-sum-exp. The backward
pass gives the merged log-sum-exp and δ to the kernel for every stretch, and
adds the cotangents to the accumulator in place. The only mask a kernel gets is
the causal one of the segment.

A kernel is a module of three functions, with query heads H = K·R and float32
lse_HN and delta_HN:

  unit()          number that counts of rows and keys must be multiples of;
  forward(q_HND, k_KBD, v_KBD, *, causal, blocks, interpret)
                  softmax(q kᵀ/√D) v and its log-sum-exp;
  backward(d_out_HND, q_HND, k_KBD, v_KBD, lse_HN, delta_HN, *, causal, keys,
           blocks, interpret)
                  dq_HND, and (dk_KBD, dv_KBD), or None if not `keys`.
"""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.ops.attention import kernel_cudnn
from branch_replay.ops.attention import kernel_splash
from branch_replay.ops.attention import kernels
from branch_replay.ops.attention import loops
from branch_replay.ops.attention import tiling

# Sizes of the long and the short stretches; not measured. Each stretch costs a
# pass over the float32 outputs.
STRETCHES = 4096, 512
BLOCK = 512  # of rows and of keys

_MODULES = {"splash": kernel_splash, "cudnn": kernel_cudnn}
_WIDE = jnp.float32


def _rows(kernel: kernels.Kernel, rows: int) -> tiling.Even:
  """Rows in equal blocks with the least padding."""
  return tiling.even(rows, BLOCK, _MODULES[kernel.name].unit())


def _block(size: int, unit: int) -> int:
  """The largest block that divides a number of keys."""
  count = -(-size // BLOCK)
  while size % count or size // count % unit:
    count += 1
  return size // count


def _stretches(kernel: kernels.Kernel, capacity: int) -> list[int]:
  unit = _MODULES[kernel.name].unit()
  sizes = [min(size, capacity) // unit * unit for size in STRETCHES]
  return sorted({size for size in sizes if size}, reverse=True)


def _forward(kernel, q_HND, k_KBD, v_KBD, causal=False):
  module, rows = _MODULES[kernel.name], _rows(kernel, q_HND.shape[1])
  out, lse = module.forward(
      q_HND, k_KBD, v_KBD, causal=causal, interpret=kernel.interpret,
      blocks=(rows.size, _block(k_KBD.shape[1], module.unit())),
  )
  return out.astype(_WIDE), lse


def _backward(
    kernel, queries: loops.QueryRows, k, v, *, keys, causal=False
):
  d_out, q, lse, delta = queries
  module, rows = _MODULES[kernel.name], _rows(kernel, q.shape[1])
  dq, d_keys = module.backward(
      d_out.astype(q.dtype), q, k, v, lse, delta, causal=causal, keys=keys,
      blocks=(rows.size, _block(k.shape[1], module.unit())),
      interpret=kernel.interpret,
  )
  return dq.astype(_WIDE), jax.tree.map(lambda x: x.astype(_WIDE), d_keys)


def _visit_stretches(kernel, prefix, prefix_length, visit, carry):
  """(carry after visit(start, size, carry) of each, first position left over).
  """
  start = jnp.int32(0)
  for size in _stretches(kernel, prefix[0].shape[2]):
    count = (prefix_length - start) // size

    def one(j, carry, start=start, size=size):
      return visit(start + j * size, size, carry)

    carry = lax.fori_loop(0, count, one, carry)
    start = start + count * size
  return carry, start


def _rest(kernel, prefix, start):
  """(first, size) of a range that holds the positions left over.

  The range is cut out, because the loops would want the whole state, or its
  cotangent, in another memory order than the kernels, and XLA would copy it
  back and forth.
  """
  capacity = prefix[0].shape[2]
  size = (_stretches(kernel, capacity) or [capacity])[-1]
  return jnp.minimum(start, capacity - size), size


def prefix_forward(kernel, q_KND, prefix, layer, prefix_length):
  """As `loops.prefix_forward`, without windows."""
  heads, count, head_dim = q_KND.shape
  rows = _rows(kernel, count)
  padded_KND = tiling.pad(q_KND, 1, rows.padded)

  def visit(start, size, carry):
    k_KBD, v_KBD = (
        tiling.read_stretch(x, layer, start, size) for x in prefix
    )
    return loops.merge(*carry, *_forward(kernel, padded_KND, k_KBD, v_KBD))

  nothing = (
      jnp.zeros((heads, rows.padded, head_dim), _WIDE),
      jnp.full((heads, rows.padded), -jnp.inf, _WIDE),
  )
  (out, lse), start = _visit_stretches(
      kernel, prefix, prefix_length, visit, nothing
  )
  first, size = _rest(kernel, prefix, start)
  rest = loops.prefix_forward(
      q_KND,
      tuple(tiling.read_stretch(x, layer, first, size)[None] for x in prefix),
      0, prefix_length - first, jnp.broadcast_to(start - first, (count,)),
  )
  return loops.merge(out[:, :count], lse[:, :count], *rest)


def prefix_backward(
    kernel, queries: loops.QueryRows, prefix, layer, prefix_length, accumulator
):
  """As `loops.prefix_backward`, without windows."""
  heads, count, head_dim = queries.q.shape
  rows = _rows(kernel, count)
  padded = queries.padded(1, rows.padded)

  def visit(start, size, carry):
    dq_KND, accumulator = carry
    k_KBD, v_KBD = (
        tiling.read_stretch(x, layer, start, size) for x in prefix
    )
    dq, d_keys = _backward(
        kernel, padded, k_KBD, v_KBD, keys=accumulator is not None
    )
    if accumulator is not None:
      accumulator = tuple(
          tiling.add_stretch(x, layer, start, window)
          for x, window in zip(accumulator, d_keys, strict=True)
      )
    return dq_KND + dq, accumulator

  nothing = jnp.zeros((heads, rows.padded, head_dim), _WIDE), accumulator
  (dq_KND, accumulator), start = _visit_stretches(
      kernel, prefix, prefix_length, visit, nothing
  )
  first, size = _rest(kernel, prefix, start)
  zeros = None
  if accumulator is not None:
    zeros = (jnp.zeros((1, heads, size, head_dim), _WIDE),) * 2
  rest, d_rest = loops.prefix_backward(
      queries,
      tuple(tiling.read_stretch(x, layer, first, size)[None] for x in prefix),
      0, prefix_length - first, zeros,
      jnp.broadcast_to(start - first, (count,)),
  )
  if accumulator is not None:
    accumulator = tuple(
        tiling.add_stretch(x, layer, first, window[0])
        for x, window in zip(accumulator, d_rest, strict=True)
    )
  return dq_KND[:, :count] + rest, accumulator


class _Square:
  """The scores of a segment as lower triangles, one for each head.

  If all keys are on this device there is one triangle. If every n-th is, key j
  at position j·n + offset, then the query at a·n + b sees key j for j ≤ a, or
  for j ≤ a − 1 if b < offset. So the n queries of each a become n heads, and
  those with b < offset are moved one row up, so that their row 0 sees nothing.
  """

  def __init__(self, kernel, q_KGRTD, stripe):
    self.heads, self.branches, self.repeats, tokens, _ = q_KGRTD.shape
    self.stride = stripe.stride
    self.count = tokens // self.stride
    self.rows = _rows(kernel, self.count)
    late_n = jnp.arange(self.stride) < stripe.offset
    self._up_Hn = jnp.broadcast_to(
        late_n, (self.heads * self.branches * self.repeats, self.stride)
    ).reshape(-1)

  def _where_up(self, x_HN, moved, otherwise):
    up = self._up_Hn.reshape(-1, *(1,) * (x_HN.ndim - 1))
    return jnp.where(jnp.broadcast_to(up, x_HN.shape), moved, otherwise)

  def fold(self, x_KGRT, empty=0.0):
    """[K, G, R, T, ...] as heads and rows; `empty` in rows without a query."""
    rest = x_KGRT.shape[4:]
    shape = *x_KGRT.shape[:3], self.count, self.stride, *rest
    x_HN = jnp.moveaxis(x_KGRT.reshape(shape), 4, 3)
    x_HN = x_HN.reshape(-1, self.count, *rest)
    if self.stride > 1:
      last = jnp.full_like(x_HN[:, :1], empty)
      moved = jnp.concatenate([x_HN[:, 1:], last], axis=1)
      x_HN = self._where_up(x_HN, moved, x_HN)
    return tiling.pad(x_HN, 1, self.rows.padded, value=empty)

  def unfold(self, x_HN, empty=0.0):
    """The inverse of `fold`; `empty` where a query has no row."""
    rest, x_HN = x_HN.shape[2:], x_HN[:, : self.count]
    if self.stride > 1:
      first = jnp.full_like(x_HN[:, :1], empty)
      moved = jnp.concatenate([first, x_HN[:, :-1]], axis=1)
      x_HN = self._where_up(x_HN, moved, x_HN)
    shape = self.heads, self.branches, self.repeats, self.stride, self.count
    x_KGRT = jnp.moveaxis(x_HN.reshape(*shape, *rest), 3, 4)
    return x_KGRT.reshape(*shape[:3], -1, *rest)

  def keys(self, x_KGSD):
    """[K, G, S, D] as heads and padded keys."""
    flat = x_KGSD.reshape(-1, *x_KGSD.shape[2:])
    return tiling.pad(flat, 1, self.rows.padded)

  def unkeys(self, x_HSD):
    """The inverse of `keys`."""
    shape = self.heads, self.branches, self.count, x_HSD.shape[-1]
    return x_HSD[:, : self.count].reshape(shape)


def segment_forward(kernel, q_KGRTD, k_KGSD, v_KGSD, stripe):
  """As `loops.segment_forward`, without windows."""
  square = _Square(kernel, q_KGRTD, stripe)
  out, lse = _forward(
      kernel, square.fold(q_KGRTD), square.keys(k_KGSD), square.keys(v_KGSD),
      causal=True,
  )
  return square.unfold(out), square.unfold(lse, -jnp.inf)


def segment_backward(
    kernel, queries: loops.QueryRows, k_KGSD, v_KGSD, stripe
):
  """As `loops.segment_backward`, without windows."""
  square = _Square(kernel, queries.q, stripe)
  folded = loops.QueryRows(
      square.fold(queries.d_out), square.fold(queries.q),
      square.fold(queries.lse, jnp.inf), square.fold(queries.delta),
  )
  dq, (dk, dv) = _backward(
      kernel, folded, square.keys(k_KGSD), square.keys(v_KGSD), keys=True,
      causal=True,
  )
  return square.unfold(dq), square.unkeys(dk), square.unkeys(dv)
