# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A small Llama in PyTorch, for the peers that bring no model of their own.

Written for this comparison from the definitions of RMSNorm (arXiv 1910.07467),
RoPE (2104.09864) and SwiGLU (2002.05202), with PyTorch's fused
`scaled_dot_product_attention`.
"""

import numpy as np
import torch
from torch.nn import functional

from experiments.peers import problem as problem_lib


class Llama:
  """Parameters and the forward pass up to the final norm.

  Attributes:
    head_VM: the head's table.
  """

  def __init__(self, problem: problem_lib.Problem):
    self._model = problem.model
    self._weights = {
        name: torch.nn.Parameter(_for_torch(name, x))
        for name, x in problem.weights.items()
        if not name.startswith("layers/")
    }
    self._layers = [
        {
            name.removeprefix("layers/"): torch.nn.Parameter(
                _for_torch(name, x[layer])
            )
            for name, x in problem.weights.items()
            if name.startswith("layers/")
        }
        for layer in range(problem.model["num_layers"])
    ]
    self.head_VM = self._weights["head/table"]

  def parameters(self):
    """All of them."""
    yield from self._weights.values()
    for layer in self._layers:
      yield from layer.values()

  def hidden(self, tokens_GS, positions_GS, attend):
    """Hidden states after the final norm.

    Args:
      tokens_GS: i64 ids.
      positions_GS: i64 positions.
      attend: (q_GNSD, k_GKSD, v_GKSD) -> out_GSND, of N query heads and K
        key-value heads, head h reading h // (N / K).

    Returns:
      f32[G, S, M].
    """
    model = self._model
    cos_sin = _rotation(positions_GS, model["head_dim"], model["rope_theta"])
    x_GSM = functional.embedding(tokens_GS, self._weights["embed/table"])
    for layer in self._layers:
      x_GSM = x_GSM + self._attention(layer, x_GSM, cos_sin, attend)
      normed_GSM = self._norm(x_GSM, layer["expand/norm/scale"])
      gate_GSF = functional.linear(normed_GSM, layer["expand/gate/kernel"])
      up_GSF = functional.linear(normed_GSM, layer["expand/up/kernel"])
      x_GSM = x_GSM + functional.linear(
          functional.silu(gate_GSF) * up_GSF, layer["contract/down/kernel"]
      )
    return self._norm(x_GSM, self._weights["final_norm/scale"])

  def gradient(self) -> dict[str, np.ndarray]:
    """Gradients under the package's names, after a backward pass."""
    outer = {
        name: _from_torch(name, weight.grad)
        for name, weight in self._weights.items()
    }
    return outer | {
        f"layers/{name}": np.stack(
            [_from_torch(name, layer[name].grad) for layer in self._layers]
        )
        for name in self._layers[0]
    }

  def _norm(self, x, scale):
    return functional.rms_norm(
        x, (x.shape[-1],), scale, self._model["norm_eps"]
    )

  def _attention(self, layer, x_GSM, cos_sin, attend):
    normed_GSM = self._norm(x_GSM, layer["project/norm/scale"])
    q, k, v = (
        functional.linear(normed_GSM, layer[f"project/{name}/kernel"])
        .unflatten(-1, (-1, self._model["head_dim"]))
        .transpose(1, 2)
        for name in ("query", "key", "value")
    )
    out_GSND = attend(_rotate(q, cos_sin), _rotate(k, cos_sin), v)
    return functional.linear(out_GSND.flatten(2), layer["join/output/kernel"])


def attention(q_GNSD, k_GKSD, v_GKSD, *, mask=None):
  """Fused attention, causal when there is no mask; [G, S, N, D]."""
  out_GNSD = functional.scaled_dot_product_attention(
      q_GNSD, k_GKSD, v_GKSD, attn_mask=mask, is_causal=mask is None,
      enable_gqa=True,
  )
  return out_GNSD.transpose(1, 2)


def log_probs(hidden_GTM, head_VM, targets_GT):
  """log p(target) of every position, f32[G, T]."""
  logits_GTV = functional.linear(hidden_GTM, head_VM)
  return -functional.cross_entropy(
      logits_GTV.flatten(0, 1), targets_GT.flatten(), reduction="none"
  ).view(targets_GT.shape)


def _for_torch(name: str, x: np.ndarray) -> torch.Tensor:
  """Kernels are [in, out] in the package and [out, in] in torch."""
  x = torch.from_numpy(x)
  return x.t().contiguous() if name.endswith("kernel") else x.clone()


def _from_torch(name: str, grad: torch.Tensor) -> np.ndarray:
  return (grad.t() if name.endswith("kernel") else grad).numpy()


def _rotation(positions_GS, head_dim: int, theta: float):
  exponent_H = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
  inverse_H = (theta**-exponent_H).float()
  # Float32 on purpose: at position 16384 the rounding of an angle, 1e-3, would
  # otherwise be a difference between the systems.
  angle_G1SH = (positions_GS[..., None].float() * inverse_H)[:, None]
  return angle_G1SH.cos(), angle_G1SH.sin()


def _rotate(x_GNSD, cos_sin):
  cos, sin = cos_sin
  first, second = x_GNSD.chunk(2, dim=-1)
  return torch.cat(
      [first * cos - second * sin, second * cos + first * sin], dim=-1
  )
