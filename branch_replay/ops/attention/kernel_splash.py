# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""JAX's splash attention kernel for TPU, as `stretches` calls it.

Its backward kernels are called directly, because they accept any log-sum-exp
and δ, also those of attention to more keys than they are given; the library's
differentiable function computes its own. The kernels do not scale scores, so
queries are scaled before, in their dtype.
"""

import functools

from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask_info as mask_info,
)
import jax.numpy as jnp

_ALL = mask_info.MaskInfo(None, None, None, None, None)


def unit() -> int:
  """Number that counts of rows and keys must be multiples of."""
  return splash.NUM_LANES


@functools.lru_cache(maxsize=64)
def _causal(rows: int, keys: int, row_block: int, key_block: int, dkv: bool):
  """The lower triangle in blocks, the same for all heads, and its function."""
  process = mask_info.process_mask_dkv if dkv else mask_info.process_mask
  mask = masks.MultiHeadMask([masks.CausalMask((rows, keys))])
  return process(mask, (row_block, key_block), head_shards=1, q_seq_shards=1)


def _mask(causal: bool, q_HND, k_KBD, blocks, dkv=False):
  if not causal:
    return _ALL, None
  return _causal(q_HND.shape[1], k_KBD.shape[1], *blocks, dkv)


def _scaled(q_HND):
  return q_HND * jnp.asarray(q_HND.shape[-1] ** -0.5, q_HND.dtype)


def forward(q_HND, k_KBD, v_KBD, *, causal, blocks, interpret):
  """(out_HND, lse_HN); see `stretches`."""
  info, function = _mask(causal, q_HND, k_KBD, blocks)
  out_HND, (lse_HN,) = splash._splash_attention_forward(
      info, _scaled(q_HND), k_KBD, v_KBD, None, None,
      mask_value=splash.DEFAULT_MASK_VALUE, is_mqa=False,
      block_sizes=splash.BlockSizes(block_q=blocks[0], block_kv=blocks[1]),
      residual_checkpoint_name=None, save_residuals=True,
      mask_function=function, interpret=interpret,
  )
  return out_HND, lse_HN


def backward(
    d_out_HND, q_HND, k_KBD, v_KBD, lse_HN, delta_HN, *, causal, keys, blocks,
    interpret,
):
  """dq_HND, and (dk_KBD, dv_KBD) or None; see `stretches`."""
  scale = q_HND.shape[-1] ** -0.5
  rows, minor = blocks, splash.QKVLayout.HEAD_DIM_MINOR
  arrays = _scaled(q_HND), k_KBD, v_KBD, None, None, lse_HN, d_out_HND, delta_HN
  options = dict(
      bq=rows[0], bkv=rows[1], is_mqa=False, attn_logits_soft_cap=None,
      mask_value=splash.DEFAULT_MASK_VALUE, q_layout=minor, k_layout=minor,
      v_layout=minor, interpret=interpret,
  )
  info, function = _mask(causal, q_HND, k_KBD, blocks)
  dq_HND = splash._splash_attention_bwd_dq(
      *arrays, mask_info=info, mask_function=function, **options
  )
  dq_HND = dq_HND.astype(lse_HN.dtype) * scale
  if not keys:
    return dq_HND, None
  info, function = _mask(causal, q_HND, k_KBD, blocks, dkv=True)
  _, dk_KBD, dv_KBD = splash._splash_attention_bwd_dkv(
      *arrays, mask_info=info, mask_function=function, bkv_compute=rows[1],
      use_fused_bwd_kernel=False, **options,
  )
  return dq_HND, (dk_KBD, dv_KBD)
