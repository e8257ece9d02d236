# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers are optax's; here is what it does not have."""

import jax
import jax.numpy as jnp
import optax


def with_state_dtype(
    optimizer: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """The optimizer with its moments stored in another dtype.

  Updates are computed in at least float32 and rounded once to be stored. A
  moving average that decays by 1 − β stands still in a dtype whose steps are
  wider than that: in bfloat16 take β₂ ≤ 0.99, not Adam's 0.999.

  Args:
    optimizer: any optax transformation.
    dtype: of its floating-point state, e.g. "bfloat16".
  """
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
