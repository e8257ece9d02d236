# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""ModelConfig, the geometry and dtypes of a decoder, taken whole by modules."""

import dataclasses
import math
import numbers

import jax.numpy as jnp

from branch_replay import checks


def is_number(value) -> bool:
  """Whether a value is a finite real number; bools are not."""
  return (
      isinstance(value, numbers.Real)
      and not isinstance(value, bool)
      and math.isfinite(value)
  )


def _check_scaling(scaling, *positive: str):
  """Raises ValueError unless these fields of a RoPE scaling are above 0."""
  for field in positive:
    value = getattr(scaling, field)
    if not is_number(value) or value <= 0:
      raise ValueError(
          f"{type(scaling).__name__}.{field} must be a finite number above 0, "
          f"not {value!r}."
      )


@dataclasses.dataclass(frozen=True)
class LinearScaling:
  """RoPE position interpolation: every frequency divided by `factor`.

  Raises ValueError unless the factor is a finite number above 0.

  Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595.
  """

  factor: float

  def __post_init__(self):
    _check_scaling(self, "factor")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
  """RoPE scaling of Llama 3.1: slows long wavelengths, keeps short ones.

  Wavelengths over original_max_positions / low_freq_factor are divided in
  frequency by `factor`, those under original_max_positions / high_freq_factor
  are kept, and those between are interpolated.

  Raises ValueError unless all fields are finite numbers above 0 and
  `low_freq_factor` is below `high_freq_factor`.

  Source: Llama 3 model card and reference code,
  https://arxiv.org/abs/2407.21783.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int

  def __post_init__(self):
    _check_scaling(
        self, "factor", "low_freq_factor", "high_freq_factor",
        "original_max_positions",
    )
    if self.low_freq_factor >= self.high_freq_factor:
      raise ValueError(
          f"Llama3Scaling.low_freq_factor={self.low_freq_factor} must be below "
          f"high_freq_factor={self.high_freq_factor}."
      )


@dataclasses.dataclass(frozen=True)
class YarnScaling:
  """YaRN RoPE scaling: interpolates frequencies by parts, and scales vectors.

  Frequencies of more than `beta_fast` turns within `original_max_positions` are
  kept, those of less than `beta_slow` divided by `factor`, others blended; with
  `truncate` the two bounds are rounded outward to whole frequencies.

  Rotated queries and keys are multiplied by `attention_factor`; None means the
  paper's 0.1·ln(factor) + 1. If `mscale` = m and `mscale_all_dim` = a are set
  (DeepSeek), None means (0.1·m·ln(factor) + 1) / (0.1·a·ln(factor) + 1), and
  latent layers multiply their scores by (0.1·a·ln(factor) + 1)².

  Raises ValueError for fields that are not finite numbers above 0 (an `mscale`
  may be 0, which means None), `beta_fast` below `beta_slow`, or a `truncate`
  that is not a bool.

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

  def __post_init__(self):
    _check_scaling(
        self, "factor", "original_max_positions", "beta_fast", "beta_slow"
    )
    if self.attention_factor is not None:
      _check_scaling(self, "attention_factor")
    for field in ("mscale", "mscale_all_dim"):
      value = getattr(self, field)
      if value is not None and not (is_number(value) and value == 0):
        _check_scaling(self, field)
    if self.beta_fast < self.beta_slow:
      raise ValueError(
          f"YarnScaling.beta_fast={self.beta_fast} must not be below "
          f"beta_slow={self.beta_slow}."
      )
    if not isinstance(self.truncate, bool):
      raise ValueError(
          f"YarnScaling.truncate must be True or False, not {self.truncate!r}."
      )


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


# Kinds of layers, each with the field of `ModelConfig` that must be set for it,
# and must be None if no layer needs it.
KINDS = {
    "full": None, "sliding": "window", "latent": "latent", "delta": "delta",
}
# A name, or a subclass of `mixers.Mixer`.
Kind = str | type
ACTIVATIONS = ("silu", "gelu_tanh")


# Attributes that a mixer class in a pattern must have, besides the abstract
# methods of `mixers.Mixer`.
_OF_MIXER = (
    "positional", "recurrent", "stage", "takes", "geometry", "project", "mix",
    "join",
)


def _check_kind(kind):
  """Raises ValueError for an entry `layer_pattern` may not have."""
  if isinstance(kind, str) and kind in KINDS:
    return
  if not isinstance(kind, type):
    raise ValueError(
        f"layer_pattern has {kind!r}: use some of {', '.join(KINDS)}, or "
        "subclasses of mixers.Mixer."
    )
  missing = [name for name in _OF_MIXER if not hasattr(kind, name)]
  missing += sorted(
      set(getattr(kind, "__abstractmethods__", ())) - set(missing)
  )
  if missing:
    raise ValueError(
        f"The mixer {kind.__qualname__} in layer_pattern lacks "
        f"{', '.join(missing)}: make it a subclass of mixers.Mixer that has "
        "them."
    )
  if kind.geometry not in KINDS.values():
    raise ValueError(
        f"The mixer {kind.__qualname__} has geometry={kind.geometry!r}: use "
        "'window', 'delta', 'latent' or None."
    )


def _geometry(kind: Kind) -> str | None:
  """The field of `ModelConfig` that a kind of layer needs, or None."""
  return KINDS[kind] if isinstance(kind, str) else kind.geometry


MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class Adapter:
  """Low-rank adapters on some matrices W of each layer: x ↦ xW + (α/r)(xA)B.

  Attributes:
    rank: r, the number of columns of A and rows of B.
    alpha: α > 0; None for 2r.
    matrices: names of the matrices that have adapters, among `MATRICES`.

  Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
  """

  rank: int
  alpha: float | None = None
  matrices: tuple[str, ...] = MATRICES

  def __post_init__(self):
    if self.rank < 1:
      raise ValueError(f"Adapter.rank must be at least 1, not {self.rank}.")
    if self.alpha is None:
      object.__setattr__(self, "alpha", 2.0 * self.rank)
    if not 0 < self.alpha < math.inf:
      raise ValueError(
          f"Adapter.alpha={self.alpha}: it must be finite and above 0, or the "
          "adapter does nothing and gets no gradient. None takes 2 · rank."
      )
    unknown = set(self.matrices) - set(MATRICES)
    if unknown or not self.matrices:
      raise ValueError(
          f"Adapter.matrices={self.matrices}: name some of "
          f"{', '.join(MATRICES)}."
      )


@dataclasses.dataclass(frozen=True)
class GatedDelta:
  """Geometry of gated delta layers.

  Attributes:
    key_heads: K, the number of query heads and of key heads.
    value_heads: K·R, the number of value heads; value head h reads key head
      h // R.
    key_dim: D, the size of a query or key head.
    value_dim: E, the size of a value head.
    conv_width: W, tokens that the short convolution sees, at least 2.

  Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464.
  """

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  conv_width: int = 4

  def __post_init__(self):
    for field, least in dict(
        key_heads=1, value_heads=1, key_dim=1, value_dim=1, conv_width=2
    ).items():
      checks.integer(getattr(self, field), f"GatedDelta.{field}", least)
    if self.value_heads % self.key_heads:
      raise ValueError(
          f"GatedDelta.value_heads={self.value_heads} is not a multiple of "
          f"key_heads={self.key_heads}."
      )

  @property
  def channels(self) -> int:
    """X, channels of the convolution for each key head: 2D + R·E."""
    repeats = self.value_heads // self.key_heads
    return 2 * self.key_dim + repeats * self.value_dim


@dataclasses.dataclass(frozen=True)
class LatentAttention:
  """Geometry of latent attention layers (MLA), beside `num_heads`.

  Attributes:
    rank: C, the size of a position's latent vector, from which the keys and
      values of all heads are projected.
    nope_dim: D_n, numbers of a query or key head that are not rotated.
    rope_dim: D_r, numbers that are rotated; all heads share this part of the
      key. Even.
    value_dim: the size of a value head.
    query_rank: the size of a latent vector from which queries are projected;
      None to project them from the residual stream.
    norm_eps: ε inside the RMSNorms of latent vectors; None for that of the
      model's other norms.

  Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
  """

  rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  query_rank: int | None = None
  norm_eps: float | None = None

  def __post_init__(self):
    for field in ("rank", "nope_dim", "rope_dim", "value_dim", "query_rank"):
      value = getattr(self, field)
      if value is not None or field != "query_rank":
        checks.integer(value, f"LatentAttention.{field}", 1)
    if self.norm_eps is not None:
      checks.number(self.norm_eps, "LatentAttention.norm_eps", 0)
    if self.rope_dim % 2:
      raise ValueError(
          f"RoPE needs an even LatentAttention.rope_dim, not {self.rope_dim}."
      )

  @property
  def query_dim(self) -> int:
    """The size of a query head: D_n + D_r."""
    return self.nope_dim + self.rope_dim

  @property
  def slot(self) -> int:
    """Numbers a position leaves in the state: C + D_r."""
    return self.rank + self.rope_dim


@dataclasses.dataclass(frozen=True)
class Experts:
  """Geometry and routing of mixture-of-experts feed-forwards.

  Each token is sent to the `top_k` experts with the highest scores, whatever
  other tokens choose: no token is dropped. The output is the sum of those
  experts' outputs, weighted by their scores.

  Attributes:
    count: E, experts of a layer.
    top_k: k, experts that a token is sent to.
    width: F, hidden width of one expert.
    shared_width: hidden width of an expert that serves every token; 0 for none.
    shared_gate: whether that expert's output is scaled by the sigmoid of a
      learned projection of the token (Qwen3-Next).
    first_dense: leading layers that have a dense feed-forward instead.
    scores: "softmax" over all experts, or "sigmoid" of each (DeepSeek-V3).
    normalised: whether a token's k weights are divided by their sum.
    scaling: factor on the weights, applied after `normalised`.
    correction: whether each expert has a parameter that is added to its score
      when experts are chosen, but not to its weight. It gets no gradient: it is
      for rules that balance without a loss, https://arxiv.org/abs/2408.15664.
    groups: number of equal groups of consecutive experts; a token chooses its
      experts within its `top_groups` best groups.
    top_groups: see `groups`.
    group_top: a group is rated by the sum of so many of its highest scores
      (DeepSeek: 1 in V2, 2 in V3).

  Sources: Qwen3, https://arxiv.org/abs/2505.09388; DeepSeek-V2,
  https://arxiv.org/abs/2405.04434; DeepSeek-V3,
  https://arxiv.org/abs/2412.19437.
  """

  count: int
  top_k: int
  width: int
  shared_width: int = 0
  shared_gate: bool = False
  first_dense: int = 0
  scores: str = "softmax"
  normalised: bool = True
  scaling: float = 1.0
  correction: bool = False
  groups: int = 1
  top_groups: int = 1
  group_top: int = 1

  def __post_init__(self):
    for field, least in dict(
        count=1, top_k=1, width=1, shared_width=0, first_dense=0, groups=1,
        top_groups=1, group_top=1,
    ).items():
      checks.integer(getattr(self, field), f"Experts.{field}", least)
    for field in ("shared_gate", "normalised", "correction"):
      checks.flag(getattr(self, field), f"Experts.{field}")
    checks.number(self.scaling, "Experts.scaling", above=0)
    if self.scores not in ("softmax", "sigmoid"):
      raise ValueError(
          f"Experts.scores must be 'softmax' or 'sigmoid': {self.scores!r}"
      )
    if self.shared_gate and not self.shared_width:
      raise ValueError(
          "Experts.shared_gate=True scales a shared expert: give it a "
          "shared_width."
      )
    if self.count % self.groups:
      raise ValueError(
          f"Experts.count={self.count} is not a multiple of "
          f"groups={self.groups}."
      )
    size = self.count // self.groups
    if self.top_groups > self.groups or self.group_top > size:
      raise ValueError(
          f"Experts has {self.groups} groups of {size}: top_groups="
          f"{self.top_groups} and group_top={self.group_top} cannot be more."
      )
    if self.top_k > size * self.top_groups:
      raise ValueError(
          f"Experts.top_k={self.top_k} is more than the "
          f"{size * self.top_groups} experts that a token may choose from."
      )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Geometry and dtypes of a Llama-like decoder.

  Attributes:
    vocab_size: V, rows of the embedding that are real tokens.
    width: M, the width of the residual stream.
    num_layers: L, the number of layers.
    num_heads: K·R, the number of query heads.
    num_kv_heads: K, the number of key-value heads; query head h reads
      key-value head h // R.
    head_dim: D, the size of a head; it need not be width / num_heads.
    ffn_width: F, the hidden width of the gated feed-forward.
    max_positions: the longest sequence the model accepts; longer is an error.
    rope_theta: base of the rotary frequencies.
    rope_theta_local: base in sliding layers, where `rope_scaling` then does
      not apply (Gemma 3); None to use `rope_theta` and `rope_scaling` there.
    rope_scaling: published long-context scaling, or None.
    rotary_dim: how many of a head's numbers, counted from the first, are
      rotated (Qwen3-Next, Qwen3.5); None for all. Latent layers ignore it.
    norm_eps: ε inside every RMSNorm.
    norms_from_one: RMSNorms scale by 1 plus their parameter, except the norm
      inside delta layers (Gemma 3, Qwen3-Next, Qwen3.5).
    qk_norm: RMSNorm on each query and key head before RoPE (Qwen3).
    score_divisor: attention scores are divided by √score_divisor (Gemma 3);
      None for √head_dim. Needs `qk_norm`; latent layers ignore it.
    qkv_bias: bias on the query, key and value projections (Qwen2).
    output_gate: full and sliding layers multiply the output of attention by
      the sigmoid of one more projection (Qwen3-Next, Qwen3.5).
    post_norms: RMSNorm on what the mixer and the feed-forward of a layer add
      to the residual stream (Gemma).
    activation: activation of the feed-forward's gate, "silu" or "gelu_tanh".
    scale_embeddings: embedded tokens are multiplied by √M (Gemma); the head's
      table, tied or not, is not.
    layer_pattern: kinds of layers, repeated: layer l has the kind
      layer_pattern[l mod its length]. "full" attends to all earlier positions,
      "sliding" to the last `window`, "latent" to all earlier ones through one
      compressed vector each; "delta" is the gated delta rule. An entry may also
      be a subclass of `mixers.Mixer`.
    window: W, how many positions a query of a sliding layer sees, its own
      included: the query at i sees the keys at j with i − j < W. None if there
      are no such layers.
    delta: geometry of delta layers; None if there are none.
    latent: geometry of latent layers; None if there are none.
    experts: mixture-of-experts feed-forwards, in all layers but the
      `first_dense` first; None for dense ones of `ffn_width` in all layers.
    tied_embeddings: the head uses the embedding table.
    adapter: low-rank adapters on matrices of the layers, see `models.adapters`.
    param_dtype: dtype that parameters are stored in.
    compute_dtype: dtype of activations and matrix products. Softmax,
      log-sum-exp, norms and log-probs are at least float32 in any case.
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
  rope_theta_local: float | None = None
  rope_scaling: RopeScaling | None = None
  rotary_dim: int | None = None
  norm_eps: float = 1e-5
  norms_from_one: bool = False
  qk_norm: bool = False
  score_divisor: int | None = None
  qkv_bias: bool = False
  output_gate: bool = False
  post_norms: bool = False
  activation: str = "silu"
  scale_embeddings: bool = False
  layer_pattern: tuple[Kind, ...] = ("full",)
  window: int | None = None
  delta: GatedDelta | None = None
  latent: LatentAttention | None = None
  experts: Experts | None = None
  tied_embeddings: bool = False
  adapter: Adapter | None = None
  param_dtype: str = "float32"
  compute_dtype: str = "float32"

  def __post_init__(self):
    for field in (
        "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads",
        "head_dim", "ffn_width", "max_positions",
    ):
      checks.integer(getattr(self, field), field, 1)
    for field in (
        "qk_norm", "qkv_bias", "output_gate", "post_norms", "scale_embeddings",
        "tied_embeddings",
    ):
      checks.flag(getattr(self, field), field)
    checks.number(self.rope_theta, "rope_theta", above=0)
    if self.rope_theta_local is not None:
      checks.number(self.rope_theta_local, "rope_theta_local", above=0)
    checks.number(self.norm_eps, "norm_eps", 0)
    for field, kind in dict(
        delta=GatedDelta, latent=LatentAttention, experts=Experts,
        adapter=Adapter,
    ).items():
      if getattr(self, field) is not None:
        checks.instance(getattr(self, field), field, kind)
    for field in ("window", "rotary_dim"):
      if getattr(self, field) is not None:
        checks.integer(getattr(self, field), field, 1)
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
    rotated = self.rotary_dim
    if rotated is not None and (rotated % 2 or not 0 < rotated < self.head_dim):
      raise ValueError(
          f"rotary_dim={rotated} must be even and less than head_dim="
          f"{self.head_dim}, or None to rotate all."
      )
    divisor = self.score_divisor
    if divisor is not None and (divisor < 1 or not self.qk_norm):
      raise ValueError(
          f"score_divisor={divisor} with qk_norm={self.qk_norm} must be at "
          "least 1, or None, and is of models with qk_norm alone."
      )
    if self.activation not in ACTIVATIONS:
      raise ValueError(
          f"activation={self.activation!r} must be one of "
          f"{', '.join(ACTIVATIONS)}."
      )
    self._check_pattern()
    self._check_experts()
    for field in ("param_dtype", "compute_dtype"):
      dtype = checks.float_dtype(getattr(self, field), field)
      # Stored by name, so that jnp.bfloat16 and "bfloat16" give equal configs.
      object.__setattr__(self, field, dtype.name)

  def _check_pattern(self):
    kinds = self.layer_pattern
    if not isinstance(kinds, tuple) or not kinds:
      raise ValueError(
          f"layer_pattern={kinds!r} must be a tuple of some of "
          f"{', '.join(KINDS)}, or of subclasses of mixers.Mixer."
      )
    for kind in kinds:
      _check_kind(kind)
    if len(kinds) > self.num_layers:
      raise ValueError(
          f"layer_pattern has {len(kinds)} kinds for {self.num_layers} layers: "
          "drop those that no layer has."
      )
    every = [kinds[i % len(kinds)] for i in range(self.num_layers)]
    for period in range(1, len(kinds)):
      if every == [kinds[i % period] for i in range(self.num_layers)]:
        raise ValueError(
            f"layer_pattern={kinds!r} repeats itself: write it as "
            f"{kinds[:period]!r}."
        )
    needed = {_geometry(kind) for kind in kinds}
    if ("window" in needed) != (self.window is not None):
      raise ValueError(
          f"window={self.window} with layer_pattern={kinds!r}: sliding layers "
          "need a window, and nothing else has one."
      )
    if ("delta" in needed) != (self.delta is not None):
      raise ValueError(
          f"delta={self.delta} with layer_pattern={kinds!r}: delta layers need "
          "a GatedDelta, and nothing else has one."
      )
    if ("latent" in needed) != (self.latent is not None):
      raise ValueError(
          f"latent={self.latent} with layer_pattern={kinds!r}: latent layers "
          "need a LatentAttention, and nothing else has one."
      )
    if self.rope_theta_local is not None and "window" not in needed:
      raise ValueError(
          f"rope_theta_local={self.rope_theta_local} with layer_pattern="
          f"{kinds!r}: only sliding layers have it."
      )

  def _check_experts(self):
    if self.experts is None:
      return
    if self.experts.first_dense >= self.num_layers:
      raise ValueError(
          f"Experts.first_dense={self.experts.first_dense} leaves none of "
          f"{self.num_layers} layers with experts: use experts=None."
      )
    if self.activation != "silu" or self.post_norms:
      raise ValueError(
          f"activation={self.activation!r}, post_norms={self.post_norms} with "
          "experts: their gates are silu and nothing norms what they add. Use "
          "activation='silu' and post_norms=False, or experts=None."
      )
    if self.adapter is not None:
      refused = {"gate", "up", "down"} & set(self.adapter.matrices)
      if refused:
        left = [name for name in self.adapter.matrices if name not in refused]
        raise ValueError(
            f"Adapter.matrices={self.adapter.matrices}: a model with experts "
            "has no adapters in its feed-forwards. Name others, as in "
            f"{tuple(left)}."
        )

  @property
  def embedding_scale(self) -> float:
    """Factor on embedded tokens: √M with `scale_embeddings`, else 1."""
    return self.width**0.5 if self.scale_embeddings else 1.0

  @property
  def query_factor(self) -> float:
    """Factor on queries that turns √head_dim into √score_divisor."""
    return (self.head_dim / (self.score_divisor or self.head_dim)) ** 0.5

  @property
  def head_path(self) -> str:
    """Name of the subtree of the parameters that holds the head's table."""
    return "embed" if self.tied_embeddings else "head"

  @property
  def queries_per_kv(self) -> int:
    """R, query heads that share one key-value head."""
    return self.num_heads // self.num_kv_heads


def at_least_float32(dtype) -> jnp.dtype:
  """The wider of `dtype` and float32, for softmax, norms and log-probs."""
  return jnp.promote_types(dtype, jnp.float32)
