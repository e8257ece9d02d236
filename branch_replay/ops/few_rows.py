# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The product of a few rows with a large matrix, as decoding needs it.

The time of one is that of reading the matrix, if nothing else is done with it.
XLA's product on CPU packs its second operand before it multiplies, which for
y = x W is the matrix: it is read, written and read again. In yᵀ = Wᵀ xᵀ the
second operand is the rows.
"""

from jax import lax

from branch_replay import config as config_lib


def product(x_NA, w_BA):
  """x Wᵀ, [N, B] in at least float32, computed as (W xᵀ)ᵀ.

  The barrier keeps XLA from turning it around.
  """
  y_BN = lax.dot_general(
      w_BA, x_NA, (((1,), (1,)), ((), ())),
      preferred_element_type=config_lib.at_least_float32(x_NA.dtype),
  )
  return lax.optimization_barrier(y_BN).T
