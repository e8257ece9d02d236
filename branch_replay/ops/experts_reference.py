# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Readable mixture of experts: every expert runs on every token.

y = Σ_e w_e (silu(x G_e) ∘ x U_e) D_e, with w_e = 0 for experts not chosen.
"""

import jax
import jax.numpy as jnp


def mix(x_NM, weights_Nk, choices_Nk, gate_EMF, up_EMF, down_EFM):
  """y, [N, M]; see the module.

  Args:
    x_NM: tokens.
    weights_Nk: weights of the chosen experts.
    choices_Nk: i32, the chosen experts.
    gate_EMF: G.
    up_EMF: U.
    down_EFM: D.
  """
  tokens, experts = x_NM.shape[0], gate_EMF.shape[0]
  weights_NE = jnp.zeros((tokens, experts), weights_Nk.dtype).at[
      jnp.arange(tokens)[:, None], choices_Nk
  ].set(weights_Nk)
  gate_NEF = jnp.einsum("nm,emf->nef", x_NM, gate_EMF)
  up_NEF = jnp.einsum("nm,emf->nef", x_NM, up_EMF)
  out_NEM = jnp.einsum("nef,efm->nem", jax.nn.silu(gate_NEF) * up_NEF, down_EFM)
  dtype = weights_NE.dtype
  y_NM = jnp.einsum("nem,ne->nm", out_NEM.astype(dtype), weights_NE)
  return y_NM.astype(x_NM.dtype)
