# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix state in the host's memory, on the device one layer at a time.

A state, or its cotangent, is a tree of arrays with a leading layer axis. Where
such an array is in host memory, a layer of a segment brings its own slice to
the device, and puts back the slice of a cotangent that it added to. Whatever is
on the device is left there, and nothing is copied.
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
  """A stack on the device that holds a layer, and where in it.

  Args:
    stack: a state's or a cotangent's arrays of a stack of layers; None for
      none.
    layer: i32 scalar.
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
  """The stack with a layer as it is in what `fetch` gave."""
  if not any(map(_on_host, jax.tree.leaves(stack))):
    return fetched
  return jax.tree.map(
      lambda x, new: lax.dynamic_update_slice_in_dim(
          x, jax.device_put(new, _HOST), layer, axis=0
      ),
      stack, fetched,
  )


def beside(new, x):
  """`new` in the memory that x is in."""
  return jax.device_put(new, _HOST) if _on_host(x) else new


def zeros(shapes):
  """Zeros in host memory that never were on the device.

  Args:
    shapes: tree of `jax.ShapeDtypeStruct`.

  Raises:
    ValueError: the default device has no host memory that it can reach.
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
