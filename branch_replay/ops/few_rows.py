# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The product of few rows with a large matrix, as in decoding.

Its time is that of reading the matrix once. XLA's product on CPU first packs
its second operand, which in y = x W is the matrix: it is read, written and read
again. In yᵀ = Wᵀ xᵀ the second operand is the few rows.
"""

from jax import lax

from branch_replay import config as config_lib


def product(x_NA, w_BA):
  """x Wᵀ, [N, B] in at least float32, computed as (W xᵀ)ᵀ.

  A barrier keeps XLA from turning it back.
  """
  y_BN = lax.dot_general(
      w_BA, x_NA, (((1,), (1,)), ((), ())),
      preferred_element_type=config_lib.at_least_float32(x_NA.dtype),
  )
  return lax.optimization_barrier(y_BN).T
