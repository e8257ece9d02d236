# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, with the same messages everywhere.

A check raises TypeError for a value of the wrong type and ValueError for a
value out of range. The message has the argument's `name` and the value given.
"""

from collections.abc import Mapping
import math
import numbers
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np


def integer(value, name: str, least: int | None = None) -> None:
  """Checks that a value is a whole number, and at least `least`."""
  whole = isinstance(value, (numbers.Integral, np.integer))
  if not whole or isinstance(value, (bool, np.bool_)):
    raise TypeError(
        f"{name} must be a whole number, not {value!r} of type "
        f"{type(value).__name__}."
    )
  if least is not None and value < least:
    raise ValueError(f"{name} must be at least {least}, not {value}.")


def number(
    value, name: str, least: float | None = None, most: float | None = None, *,
    above: float | None = None, below: float | None = None,
) -> None:
  """Checks that a value is a finite real number within a range.

  Args:
    value: the value given. Arrays are refused, as `jit` may hide their values.
    name: name of the argument, for the message.
    least: smallest value that is accepted, or None.
    most: largest value that is accepted, or None.
    above: bound that the value must exceed, or None.
    below: bound that the value must stay below, or None.
  """
  if not isinstance(value, (numbers.Real, np.number)) or isinstance(
      value, (bool, np.bool_)
  ):
    raise TypeError(
        f"{name} must be a number, not {value!r} of type "
        f"{type(value).__name__}."
    )
  if not math.isfinite(value):
    raise ValueError(f"{name} must be finite, not {value}.")
  for bound, words, fails in (
      (least, "≥", lambda: value < least),
      (most, "≤", lambda: value > most),
      (above, ">", lambda: value <= above),
      (below, "<", lambda: value >= below),
  ):
    if bound is not None and fails():
      raise ValueError(f"{name} must be {words} {bound}, not {value}.")


def flag(value, name: str) -> None:
  """Checks that a value is True or False."""
  if not isinstance(value, (bool, np.bool_)):
    raise TypeError(
        f"{name} must be True or False, not {value!r} of type "
        f"{type(value).__name__}."
    )


def instance(value, name: str, kind: type | tuple, hint: str = "") -> None:
  """Checks that a value has a type; `hint` is added to the message."""
  if not isinstance(value, kind):
    kinds = kind if isinstance(kind, tuple) else (kind,)
    wanted = " or ".join(x.__name__ for x in kinds)
    raise TypeError(
        f"{name} must be {'an' if wanted[0] in 'AEIOU' else 'a'} {wanted}, not "
        f"{_shown(value)}.{' ' if hint else ''}{hint}"
    )


def function(value, name: str, hint: str = "") -> None:
  """Checks that a value can be called; `hint` is added to the message."""
  if not callable(value):
    raise TypeError(
        f"{name} must be a function, not {_shown(value)}."
        f"{' ' if hint else ''}{hint}"
    )


def float_dtype(value, name: str) -> np.dtype:
  """Returns a float dtype by name; anything else raises ValueError."""
  try:
    dtype = jnp.dtype(value)
  except TypeError as error:
    raise ValueError(
        f"{name}={value!r} is no dtype: use 'float32', 'bfloat16', 'float16' "
        "or 'float64'."
    ) from error
  if value is None or not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{name} must be a float dtype, not {value!r}.")
  return dtype


def path(value, name: str) -> pathlib.Path:
  """Returns a str or path-like value as a `pathlib.Path`."""
  instance(value, name, (str, os.PathLike))
  return pathlib.Path(value)


def numbers_of(value, name: str):
  """Returns numbers as an array of at least one axis."""
  array = value if isinstance(value, jax.Array) else np.asarray(value)
  if array.dtype != jnp.bfloat16 and array.dtype.kind not in "buif":
    raise TypeError(f"{name} must be numbers, not {_shown(value)}.")
  if not array.ndim:
    raise ValueError(f"{name} must be one for every branch, not {value!r}.")
  return jnp.asarray(array)


def key(value, name: str = "key") -> None:
  """Checks that a value is one PRNG key of jax."""
  typed = hasattr(value, "dtype") and jnp.issubdtype(
      value.dtype, jax.dtypes.prng_key
  )
  raw = hasattr(value, "dtype") and value.dtype == jnp.uint32
  if not (typed and np.shape(value) == ()) and not (
      raw and np.shape(value) in ((2,), (4,))
  ):
    raise TypeError(
        f"{name} must be one PRNG key, as jax.random.key(0) makes them, not "
        f"{_shown(value)}."
    )


def version(value, name: str = "version") -> None:
  """Checks that a value is one u32, which can mark a state."""
  if isinstance(value, jax.Array):
    if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
      raise TypeError(
          f"{name} must be one whole number, not {_shown(value)}."
      )
    return
  if isinstance(value, np.ndarray) and not value.shape:
    value = value.item()
  integer(value, name, 0)
  if value >= 1 << 32:
    raise ValueError(f"{name} must be less than 2³², not {value}.")


def leading(args, wanted: tuple[int, ...], of: str) -> None:
  """Checks that all arrays among a loss's arguments have these leading axes.

  Args:
    args: the arguments, a pytree of arrays.
    wanted: sizes of the leading axes that each must have.
    of: what these axes count, for the message.
  """
  for x in jax.tree.leaves(args):
    if np.shape(x)[: len(wanted)] != wanted:
      raise ValueError(
          f"An argument of the loss has shape {np.shape(x)}: its leading axes "
          f"must be {wanted}, {of}. What is the same for all is no argument: "
          "make it part of the loss, functools.partial(loss, ...)."
      )


def _shown(value) -> str:
  """Describes a value in a message: its type, and its shape or its repr."""
  kind = type(value).__name__
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return f"a {kind} {value.dtype}{list(np.shape(value))}"
  text = repr(value)
  return f"{text if len(text) < 60 else text[:57] + '...'} of type {kind}"


def params_tree(params) -> None:
  """Checks that a value is a dict of parameters, of any model."""
  if not isinstance(params, Mapping):
    hint = " Pass its .params." if isinstance(
        getattr(params, "params", None), Mapping
    ) else ""
    raise TypeError(
        "params must be the dict that Decoder.init(...)['params'] is, not a "
        f"{type(params).__name__}.{hint}"
    )
  if "params" in params and "layers" not in params:
    raise ValueError(
        "params is what Decoder.init returned as a whole: pass its 'params', "
        "variables['params']."
    )


def path_name(path) -> str:
  """Formats a key path of jax as "layers/project/key/kernel"."""
  return jax.tree_util.keystr(path, simple=True, separator="/")
