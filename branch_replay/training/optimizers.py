# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Additions to optax: state dtypes, learning rates, and AdamW with defaults."""

from collections.abc import Callable
import math
from typing import Any
from typing import Literal
from typing import get_args

import jax
import jax.numpy as jnp
import optax


def with_state_dtype(
    optimizer: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """An optimizer whose state is stored in another dtype.

  Updates are computed in at least float32, and the state is rounded once, when
  it is stored. A moving average that decays by 1 − β stands still in a dtype
  whose steps are wider than that: with bfloat16 take β₂ ≤ 0.99, not Adam's
  0.999.

  Args:
    optimizer: any optax transformation.
    dtype: dtype of its floating-point state, e.g. "bfloat16".

  Raises:
    ValueError: not a floating-point dtype, or one of a smaller range than
      float32, in which squares of gradients would overflow or vanish.
  """
  try:
    info = jnp.finfo(dtype)
  except ValueError:
    info = None
  if info is None or info.maxexp < jnp.finfo(jnp.bfloat16).maxexp:
    raise ValueError(
        f"dtype={dtype!r} cannot hold an optimizer's state: use 'bfloat16' or "
        "'float32'."
    )
  def cast(tree, to):
    def one(x):
      if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
      return x.astype(to(x.dtype))

    return jax.tree.map(one, tree)

  def init(params):
    return cast(optimizer.init(params), lambda _: dtype)

  def update(grads, state, params=None):
    wide = cast(state, lambda x: jnp.promote_types(x, jnp.float32))
    updates, state = optimizer.update(grads, wide, params)
    return updates, cast(state, lambda _: dtype)

  return optax.GradientTransformation(init, update)


Decay = Literal["constant", "linear", "cosine"]


def learning_rates(
    learning_rate: float, *, updates: int, warmup: int = 0,
    decay: Decay = "constant",
) -> optax.Schedule:
  """Learning rate by number of updates: a linear rise, then `decay`.

  Args:
    learning_rate: the highest rate.
    updates: updates of the whole run.
    warmup: updates until the highest rate is reached.
    decay: "constant", or "linear" or "cosine" down to a tenth at the end.

  Returns:
    A function from the number of updates done to the rate (an optax schedule).

  Raises:
    ValueError: a rate that is not positive, a warmup longer than the run, or an
      unknown decay.
  """
  if not 0 < learning_rate < math.inf:
    raise ValueError(
        f"learning_rate must be finite and > 0, not {learning_rate}."
    )
  if not 0 <= warmup <= updates:
    raise ValueError(f"warmup={warmup} must lie in 0 to updates={updates}.")
  if decay not in get_args(Decay):
    raise ValueError(
        f"Unknown decay={decay!r}: use one of {', '.join(get_args(Decay))}."
    )
  rest = max(1, updates - warmup)
  falling = {
      "constant": optax.constant_schedule(learning_rate),
      "linear": optax.linear_schedule(learning_rate, learning_rate / 10, rest),
      "cosine": optax.cosine_decay_schedule(learning_rate, rest, alpha=0.1),
  }[decay]
  if not warmup:
    return falling
  # Starts above 0, or the first update would do nothing.
  rising = optax.linear_schedule(learning_rate / warmup, learning_rate, warmup)
  return optax.join_schedules([rising, falling], [warmup])


# Names of the parameters that decay, see `decays`.
_DECAYING = (
    "kernel", "table", "key_up", "value_up", "filter", "adapter_in",
    "adapter_out",
)


def decays(params) -> Any:
  """Which parameters weight decay acts on, as a tree of bools.

  It acts on matrices, the tables of embedding and head, filters of short
  convolutions, and adapters. It does not act on scales of norms, biases, the
  rates of delta layers (A_log and dt_bias, here log_rate and rate_bias) and the
  router's correction, for which 0 is not a smaller value but another model.

  The last key of a parameter's path decides, because layers are stacked and so
  a scale has two axes like a matrix. Unknown names do not decay: name the
  projections of a mixer of your own "kernel" if they should.

  Args:
    params: a nested dict of all parameters or some of them.
  """
  return jax.tree.map_with_path(
      lambda path, _: getattr(path[-1], "key", None) in _DECAYING, params
  )


def adamw(
    learning_rate: optax.Schedule | float, *, b1: float = 0.9, b2: float = 0.99,
    weight_decay: float = 0.0, clip_norm: float | None = 1.0,
    mask: Callable[[Any], Any] = decays,
) -> optax.GradientTransformation:
  """AdamW, after clipping the gradient by its global norm.

  Args:
    learning_rate: a number, or a function of the number of updates done.
    b1: β₁.
    b2: β₂.
    weight_decay: decoupled weight decay, of the parameters in `mask`.
    clip_norm: largest norm of the gradient; None for no clipping.
    mask: function from parameters to a tree of bools: what decays.

  Returns:
    The optimizer.

  Raises:
    ValueError: a number out of its range.
  """
  for name, beta in (("b1", b1), ("b2", b2)):
    if not 0 <= beta < 1:
      raise ValueError(f"{name} must lie in [0, 1), not {beta}.")
  if not 0 <= weight_decay < math.inf:
    raise ValueError(f"weight_decay must be ≥ 0, not {weight_decay}.")
  if clip_norm is not None and not clip_norm > 0:
    raise ValueError(
        f"clip_norm must be > 0, or None for no clipping, not {clip_norm}."
    )
  adam = optax.adamw(
      learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=mask
  )
  if clip_norm is None:
    return adam
  return optax.chain(optax.clip_by_global_norm(clip_norm), adam)
