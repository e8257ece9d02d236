# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a prefix state in the host's memory, one layer at a time on the device.

A state, or its cotangent, is a tree of arrays with a leading layer axis. If an
array is in host memory, each layer copies its own slice to the device, and
copies the slice of the cotangent back after adding to it. Arrays that are on
the device already are used there, without a copy.
"""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_KIND = "pinned_host"


def _on_host(x) -> bool:
  return jax.typeof(x).memory_space == _HOST


def fetch(stack, layer):
  """Brings one layer of a stack to the device.

  Args:
    stack: arrays [L, ...] of a state or its cotangent; None for none.
    layer: i32 scalar, which layer.

  Returns:
    Arrays on the device, and the layer's index in them: a slice of one layer
    and 0, or the whole stack and `layer` if it is on the device already.
  """
  if not any(map(_on_host, jax.tree.leaves(stack))):
    return stack, layer
  return jax.tree.map(
      lambda x: jax.device_put(
          lax.dynamic_slice_in_dim(x, layer, 1, axis=0), _DEVICE
      ),
      stack,
  ), jnp.int32(0)


def put_back(stack, layer, fetched):
  """Writes a layer that `fetch` brought, and its caller changed, back."""
  if not any(map(_on_host, jax.tree.leaves(stack))):
    return fetched
  return jax.tree.map(
      lambda x, new: lax.dynamic_update_slice_in_dim(
          x, jax.device_put(new, _HOST), layer, axis=0
      ),
      stack, fetched,
  )


def beside(new, x):
  """Moves `new` to the memory (host or device) that x is in."""
  return jax.device_put(new, _HOST) if _on_host(x) else new


def zeros(shapes):
  """Makes zeros in host memory, without allocating them on the device.

  Args:
    shapes: tree of `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: the default device cannot reach pinned host memory.
  """
  device = jax.devices()[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if _KIND not in kinds:
    raise ValueError(
        f"offload=True needs memory of the kind {_KIND!r}, and a "
        f"{device.device_kind} has only {', '.join(kinds)}: leave the state on "
        "the device."
    )
  where = jax.sharding.SingleDeviceSharding(device, memory_kind=_KIND)
  return jax.tree.map(
      lambda x: jax.device_put(np.zeros(x.shape, x.dtype), where), shapes
  )
