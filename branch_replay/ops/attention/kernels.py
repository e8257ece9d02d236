# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of attention.

"loops" is plain XLA (`loops`) and runs everywhere. The others are
kernels that ship with JAX, called by `stretches`:

  splash  TPU, bfloat16 and float32 (`kernel_splash`);
  cudnn   NVIDIA GPUs, bfloat16 (`kernel_cudnn`).

"auto" is the kernel of the platform if it supports the dtype and the width of
the heads, and the loops otherwise.
"""

from typing import Literal
from typing import NamedTuple
from typing import get_args

import jax
import jax.numpy as jnp

Name = Literal["auto", "loops", "splash", "cudnn"]


class Kernel(NamedTuple):
  """A library's kernel; None in its place means the loops.

  Attributes:
    name: "splash" or "cudnn".
    interpret: whether Pallas interprets it, which works on any platform and is
      slow.
  """

  name: str
  interpret: bool = False


class _Fit(NamedTuple):
  """What a kernel supports; head widths are multiples up to a largest one."""

  platform: str
  dtypes: tuple[str, ...]
  multiple: int
  largest: int
  interpreted: bool


_FITS = {
    "splash": _Fit("tpu", ("bfloat16", "float32"), 32, 256, True),
    "cudnn": _Fit("cuda", ("bfloat16",), 8, 128, False),
}


def check_name(name: str):
  """Raises ValueError for an unknown implementation."""
  if name not in get_args(Name):
    raise ValueError(
        f"Unknown attention {name!r}: use one of {', '.join(get_args(Name))}."
    )


def platform(device=None) -> str:
  """"cpu", "tpu", "cuda" or "rocm": of a device, or of the first one."""
  device = jax.devices()[0] if device is None else device
  if device.platform != "gpu":
    return device.platform
  return "rocm" if "rocm" in device.client.platform_version else "cuda"


def choose(name: str, where: str, dtype, head_dim: int) -> Kernel | None:
  """The kernel that a name means on a platform.

  Args:
    name: "auto", "loops", or the name of a kernel. On a CPU a Pallas kernel
      runs in Pallas's interpreter, which is for tests.
    where: a platform, as `platform` returns it.
    dtype: dtype of queries, keys and values.
    head_dim: width of a head.

  Returns:
    The kernel, or None for the loops.

  Raises:
    ValueError: the named kernel does not run on the platform, or does not
      support these arrays.
  """
  check_name(name)
  if name == "loops":
    return None
  if name == "auto":
    for kernel, fit in _FITS.items():
      if fit.platform == where and not _misfits(fit, dtype, head_dim):
        return Kernel(kernel)
    return None
  fit = _FITS[name]
  interpret = where == "cpu" and fit.interpreted
  if fit.platform != where and not interpret:
    raise ValueError(
        f"attention={name!r} runs on {fit.platform}, not on {where}: use "
        "'auto' or 'loops'."
    )
  misfits = _misfits(fit, dtype, head_dim, interpret)
  if misfits:
    raise ValueError(
        f"attention={name!r} does not take {' and '.join(misfits)}: use 'auto' "
        "or 'loops'."
    )
  return Kernel(name, interpret)


def _misfits(fit: _Fit, dtype, head_dim: int, interpret=False) -> list[str]:
  """What a kernel does not support of these arguments, in words."""
  misfits = []
  if jnp.dtype(dtype).name not in fit.dtypes:
    misfits.append(
        f"dtype={jnp.dtype(dtype).name} (but {', '.join(fit.dtypes)})"
    )
  if not interpret and (head_dim % fit.multiple or head_dim > fit.largest):
    misfits.append(
        f"head_dim={head_dim} (but multiples of {fit.multiple} up to "
        f"{fit.largest})"
    )
  return misfits
