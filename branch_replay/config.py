# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The one description of a decoder that every module takes whole."""

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """RoPE position interpolation: every frequency divided by `factor`.

  Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595.
  """

  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """RoPE scaling of Llama 3.1: long wavelengths slowed, short ones kept.

  Source: Llama 3 model card and reference code,
  https://arxiv.org/abs/2407.21783.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
  """YaRN: interpolation by parts and a temperature on the rotated vectors.

  `attention_factor` None means the paper's 0.1·ln(factor) + 1; with `mscale`
  and `mscale_all_dim` (DeepSeek) it is the ratio of the two.

  Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071.
  """

  factor: float
  original_max_positions: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Adapter:
  """Low-rank updates of some matrices: x ↦ xW + (α/r)(xA)B.

  Attributes:
    rank: r.
    alpha: α.
    matrices: which matrices of every layer, among `MATRICES`.

  Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
  """

  rank: int
  alpha: float
  matrices: tuple[str, ...] = MATRICES

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"Adapter.rank must be at least 1, not {self.rank}.")
    unknown = set(self.matrices) - set(MATRICES)
    if unknown or not self.matrices:
      raise ValueError(
          f"Adapter.matrices={self.matrices}: name some of "
          f"{', '.join(MATRICES)}."
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Geometry and dtypes of a Llama-like decoder.

  Attributes:
    vocab_size: V, rows of the embedding that are real tokens.
    width: M, the residual stream.
    num_layers: L.
    num_heads: query heads, K·R.
    num_kv_heads: K; query head h reads key-value head h // R.
    head_dim: D, independent of width / num_heads.
    ffn_width: F, the hidden width of the SwiGLU feed-forward.
    max_positions: positions the model may be run on; longer is an error.
    rope_theta: base of the rotary frequencies.
    rope_scaling: published long-context scaling, or None.
    norm_eps: ε inside every RMSNorm.
    qk_norm: RMSNorm on each query and key head before RoPE (Qwen3).
    qkv_bias: bias on the query, key and value projections (Qwen2).
    tied_embeddings: the head is the embedding table.
    adapter: low-rank updates on the matrices of the layers, see `adapters`.
    param_dtype: dtype parameters are stored in.
    compute_dtype: dtype of activations and matrix products. Softmax,
      log-sum-exp, norms and log-probs are at least float32 whatever it is.
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  ffn_width: int
  max_positions: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  qk_norm: bool = False
  qkv_bias: bool = False
  tied_embeddings: bool = False
  adapter: Adapter | None = None
  param_dtype: str = "float32"
  compute_dtype: str = "float32"

  def __post_init__(self):
    for field in (
        "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "ffn_width", "max_positions",
    ):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} must be at least 1: {getattr(self, field)}")
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
          f"num_heads={self.num_heads} is not a multiple of "
          f"num_kv_heads={self.num_kv_heads}."
      )
    if self.head_dim % 2:
      raise ValueError(f"RoPE needs an even head_dim, not {self.head_dim}.")
    if self.rope_scaling is not None and not isinstance(
        self.rope_scaling, RopeScaling
    ):
      raise ValueError(
          f"Unknown RoPE scaling {self.rope_scaling!r}: use LinearScaling, "
          "Llama3Scaling, YarnScaling or None."
      )
    for field in ("param_dtype", "compute_dtype"):
      if not jnp.issubdtype(jnp.dtype(getattr(self, field)), jnp.floating):
        raise ValueError(f"{field} must be a float: {getattr(self, field)}")

  @property
  def head_path(self) -> str:
    """Where the head's table stands among the parameters."""
    return "embed" if self.tied_embeddings else "head"

  @property
  def queries_per_kv(self) -> int:
    """R, query heads that share one key-value head."""
    return self.num_heads // self.num_kv_heads


def at_least_float32(dtype) -> jnp.dtype:
  """The dtype in which softmax, norms and log-probs of `dtype` are taken."""
  return jnp.promote_types(dtype, jnp.float32)
