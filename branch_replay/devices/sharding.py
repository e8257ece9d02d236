# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The layout of several devices; the only file that names a mesh axis.

Tokens are dealt out: position p of a tail, a chunk or the prefix state is on
device p mod n, so every device holds the same share of every stretch and of the
causal attention over it. Queries travel and the prefix stays: each device
gathers the queries of all, attends with them to its own keys, and the outputs
are merged by log-sum-exp on the devices the queries came from. In recurrent
layers each device runs some of the heads for all tokens: inputs travel to the
device of their head, outputs back to that of their token. Parameters are
sharded and gathered layer by layer; gradients are summed and scattered the same
way. Every collective is a line in this file, and none is differentiated
through. In "exact", "sampled" and "stop" no collective carries the prefix; in
"full" there is none, and the whole sequences travel.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from branch_replay import checks
from branch_replay.devices.layout import Layout
from branch_replay.ops import attention
from branch_replay.ops.attention import kernels

_AXIS = "tokens"
_SHARED = {
    "all": (), "mixer": (None, None, _AXIS),
    "stacked": (None, None, None, _AXIS),
}
_LAYERS = "layers/"
# Sharded along their width, so that each device looks up some columns of a row.
_TABLES = ("embed/table", "head/table")


@dataclasses.dataclass(frozen=True)
class Sharded(Layout):
  """Tokens and parameters over all devices of a mesh; made by `sharded`.

  Attributes:
    mesh: the devices, along one axis.
    axes: (name, axis) of each sharded parameter, where the axis is counted
      without the leading L; other parameters are whole on every device.
  """

  mesh: jax.sharding.Mesh
  axes: tuple[tuple[str, int], ...]

  @property
  def devices(self) -> int:
    return self.mesh.size

  @property
  def platform(self) -> str:
    return kernels.platform(self.mesh.devices.flat[0])

  def over(self, function, ins, outs, grads_like=None):
    def run(*args):
      in_specs = tuple(
          PartitionSpec() if arg is None else self._specs(kinds, arg)
          for kinds, arg in zip(ins, args, strict=True)
      )
      return jax.shard_map(
          function, mesh=self.mesh, in_specs=in_specs,
          out_specs=self._specs(outs, grads_like), check_vma=False,
      )(*args)

    return run

  def _specs(self, kinds, params):
    def spec(kind):
      if kind in ("params", "grads"):
        return self.param_specs(params)
      return PartitionSpec(*_SHARED[kind])

    return jax.tree.map(spec, kinds)

  def param_specs(self, params):
    """The `PartitionSpec` of each leaf of a tree of parameters or gradients."""
    axes = dict(self.axes)

    def spec(path, _):
      name = checks.path_name(path)
      if name not in axes:
        return PartitionSpec()
      axis = axes[name] + name.startswith(_LAYERS)
      return PartitionSpec(*(None,) * axis, _AXIS)

    return jax.tree_util.tree_map_with_path(spec, params)

  def place(self, params):
    """Moves each parameter to the devices, each of which holds its share."""
    return jax.device_put(params, self.shardings(params))

  def shardings(self, params):
    return jax.tree.map(
        lambda spec: NamedSharding(self.mesh, spec), self.param_specs(params)
    )

  def _by_name(self, path, tree, sharded, whole):
    axes = dict(self.axes)

    def each(keys, leaf):
      name = "/".join(filter(None, (path, checks.path_name(keys))))
      if not path and name in _TABLES:
        return leaf
      return sharded(leaf, axes[name]) if name in axes else whole(leaf)

    return jax.tree_util.tree_map_with_path(each, tree)

  def gather(self, path: str, params):
    return self._by_name(
        path, params,
        lambda x, axis: lax.all_gather(x, _AXIS, axis=axis, tiled=True),
        lambda x: x,
    )

  def reduce(self, path: str, grads):
    return self._by_name(
        path, grads,
        lambda x, axis: lax.psum_scatter(
            x, _AXIS, scatter_dimension=axis, tiled=True
        ),
        lambda x: lax.psum(x, _AXIS),
    )

  def look_up(self, table_VM, tokens_GT, dtype):
    if "embed/table" not in dict(self.axes):
      return super().look_up(table_VM, tokens_GT, dtype)
    # Look up this device's columns for the tokens of all devices, then exchange
    # them for all columns of this device's tokens.
    columns = table_VM[self.all(tokens_GT, 1)].astype(dtype)
    rows = lax.all_to_all(
        self._deal(columns, 1), _AXIS, split_axis=2, concat_axis=3, tiled=True
    )
    return rows[:, :, 0]

  def add_rows(self, table_VM, tokens_GT, rows_GTM):
    rows_GTM = rows_GTM.astype(table_VM.dtype)
    if "embed/table" not in dict(self.axes):
      added = super().add_rows(jnp.zeros_like(table_VM), tokens_GT, rows_GTM)
      return table_VM + lax.psum(added, _AXIS)
    columns = lax.all_to_all(
        rows_GTM[:, :, None], _AXIS, split_axis=3, concat_axis=2, tiled=True
    )
    columns = columns.reshape(columns.shape[0], -1, columns.shape[-1])
    return table_VM.at[self.all(tokens_GT, 1)].add(columns)

  def mine(self, x, axis: int):
    dealt = self._deal(x, axis)
    index = lax.axis_index(_AXIS)
    return lax.dynamic_index_in_dim(dealt, index, axis + 1, keepdims=False)

  def all(self, x, axis: int):
    dealt = lax.all_gather(x, _AXIS, axis=axis + 1)
    shape = *x.shape[:axis], -1, *x.shape[axis + 1 :]
    return dealt.reshape(shape)

  def sum_mine(self, x, axis: int):
    return lax.psum_scatter(
        self._deal(x, axis), _AXIS, scatter_dimension=axis + 1
    )

  def _deal(self, x, axis: int):
    """Reshapes [..., T, ...] to [..., T / devices, devices, ...]."""
    shape = *x.shape[:axis], -1, self.devices, *x.shape[axis + 1 :]
    return x.reshape(shape)

  def sum(self, x):
    return lax.psum(x, _AXIS)

  def merge(self, out, lse):
    top = lax.pmax(lse, _AXIS)
    top = jnp.where(top == -jnp.inf, 0.0, top)  # no device saw a key
    weight = jnp.exp(lse - top)
    total = self.mine(lax.psum(weight, _AXIS), 3)
    out = self.sum_mine(out * weight[..., None], 3)
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, self.mine(top, 3) + jnp.log(safe))
    return out / safe[..., None], lse

  def to_heads(self, x_GTK):
    x_GTK = self._pad_heads(x_GTK, 2)
    dealt = lax.all_to_all(
        x_GTK[:, :, None], _AXIS, split_axis=3, concat_axis=2, tiled=True
    )
    return dealt.reshape(dealt.shape[0], -1, *dealt.shape[3:])

  def to_tokens(self, x_GTK, heads: int):
    back = lax.all_to_all(
        self._deal(x_GTK, 1), _AXIS, split_axis=2, concat_axis=3, tiled=True
    )
    return back[:, :, 0, :heads]

  def my_heads(self, x_K):
    x_K = self._pad_heads(x_K, 0)
    here = x_K.shape[0] // self.devices
    start = lax.axis_index(_AXIS) * here
    return lax.dynamic_slice_in_dim(x_K, start, here, axis=0)

  def _pad_heads(self, x, axis: int):
    widths = [(0, 0)] * x.ndim
    widths[axis] = 0, -x.shape[axis] % self.devices
    return jnp.pad(x, widths)

  def stripe(self) -> attention.Stripe:
    return attention.Stripe(self.devices, lax.axis_index(_AXIS))


def sharded(params, devices=None) -> Sharded:
  """Makes a layout over this process's devices, or over those given.

  Each parameter is sharded along its largest axis that the number of devices
  divides, vocabulary tables along their width; a parameter without such an axis
  is whole on every device.

  Args:
    params: the parameters, or their shapes.
    devices: how many devices; None for all there are; or a list of them.

  Returns:
    The layout, for `Schedule(layout=...)`.

  Raises:
    ValueError: there are fewer devices than asked for.
  """
  checks.params_tree(params)
  several = isinstance(devices, (list, tuple, np.ndarray))
  if not several and devices is not None:
    checks.integer(devices, "devices, where it is no list of them,")
  if not several:
    there = jax.devices()
    devices = len(there) if devices is None else devices
  else:
    there, devices = list(devices), len(devices)
  if not 1 <= devices <= len(there):
    raise ValueError(
        f"{devices} devices asked for, {len(there)} there. On CPU set "
        "jax.config.update('jax_num_cpu_devices', n) before any array exists."
    )
  mesh = jax.make_mesh(
      (devices,), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,),
      devices=there[:devices],
  )
  axes = []
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  for path, leaf in leaves:
    name = checks.path_name(path)
    shape = leaf.shape[name.startswith(_LAYERS) :]
    fitting = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if name in _TABLES:
      fitting = [axis for axis in fitting if axis == 1]
    if fitting:
      axes.append((name, max(fitting, key=lambda axis: shape[axis])))
  return Sharded(mesh, tuple(axes))
