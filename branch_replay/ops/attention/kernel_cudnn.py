# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""cuDNN's flash attention for NVIDIA GPUs, as `stretches` calls it.

Its backward pass takes an output and a log-sum-exp, which may be those of
attention to more keys than it is given. It uses the output only to compute
δ = Σ d_out · out, so it is given an output that yields the wanted δ. It always
computes the cotangents of the keys.
"""

from jax._src.cudnn import fused_attention_stablehlo as cudnn
import jax.numpy as jnp

_SEED, _DROPOUT, _NO_BIAS, _NO_WINDOW = 42, 0.0, (False, False), None
_LAYOUT = cudnn.AttentionLayout.BNTH.value
_TINY = 2.0**-60  # a bfloat16 whose square does not underflow in float32


def unit() -> int:
  """Number that counts of rows and keys must be multiples of."""
  return 64


def _settings(q_HND, causal: bool):
  """The static arguments at the end of cuDNN's forward and backward rules."""
  mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
  return (
      q_HND.shape[-1] ** -0.5, _SEED, _DROPOUT, _NO_BIAS, mask, _LAYOUT,
      _NO_WINDOW, cudnn.check_cudnn_version(), False,
  )


def _grouped(x_HND, heads: int):
  """[K·R, ...] as [K, R, ...]: key heads become batch entries."""
  return x_HND.reshape(heads, -1, *x_HND.shape[1:])


def _arguments(q_HND, k_KBD, v_KBD):
  nothing = (jnp.zeros(0, q_HND.dtype),) * 7  # bias, lengths, offsets, pages
  q = _grouped(q_HND, k_KBD.shape[0])
  return q, k_KBD[:, None], v_KBD[:, None], *nothing


def forward(q_HND, k_KBD, v_KBD, *, causal, blocks, interpret):
  """(out_HND, lse_HN); see `stretches`."""
  del blocks, interpret
  _, residuals = cudnn._dot_product_attention_fwd_rule(
      *_arguments(q_HND, k_KBD, v_KBD), *_settings(q_HND, causal)
  )
  *_, lse, out = residuals
  return out.reshape(q_HND.shape), lse.reshape(q_HND.shape[:2])


def backward(
    d_out_HND, q_HND, k_KBD, v_KBD, lse_HN, delta_HN, *, causal, keys, blocks,
    interpret,
):
  """dq_HND, and (dk_KBD, dv_KBD) or None; see `stretches`."""
  del blocks, interpret
  heads = k_KBD.shape[0]
  d_out_HND, out_HND = with_delta(d_out_HND, delta_HN)
  arguments = _arguments(q_HND, k_KBD, v_KBD)
  dq, dk, dv, *_ = cudnn._dot_product_attention_bwd_rule(
      *_settings(q_HND, causal),
      (*arguments, _grouped(lse_HN, heads), _grouped(out_HND, heads)),
      _grouped(d_out_HND, heads),
  )
  dq_HND = dq.reshape(q_HND.shape)
  return dq_HND, (dk[:, 0], dv[:, 0]) if keys else None


def with_delta(d_out_HND, delta_HN):
  """(d_out, out) with Σ d_out · out = δ, namely out = δ d_out / ‖d_out‖².

  A row of zeros has no such output. If its δ is not zero, which happens if only
  the log-sum-exp has a cotangent, d_out becomes a row of one 2⁻⁶⁰ and zeros.
  """
  first_D = jnp.arange(d_out_HND.shape[-1]) == 0
  tiny_D = jnp.where(first_D, _TINY, 0).astype(d_out_HND.dtype)
  nothing_HN = ~jnp.any(d_out_HND, axis=-1)
  d_out_HND = jnp.where(
      (nothing_HN & (delta_HN != 0))[..., None], tiny_D[None, None], d_out_HND
  )
  wide_HND = d_out_HND.astype(delta_HN.dtype)
  top_HN = jnp.max(jnp.abs(wide_HND), axis=-1)
  top_HN = jnp.where(top_HN == 0, 1.0, top_HN)  # δ is 0 there
  unit_HND = wide_HND / top_HN[..., None]
  size_HN = jnp.maximum(jnp.sum(unit_HND * unit_HND, axis=-1), 1.0)
  out_HND = unit_HND * (delta_HN / top_HN / size_HN)[..., None]
  return d_out_HND, out_HND.astype(d_out_HND.dtype)
