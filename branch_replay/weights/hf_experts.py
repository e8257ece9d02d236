# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts of Qwen3-MoE, Qwen3-Next, DeepSeek-V2 and -V3 in `config.json`.

What the families do with a router's logits, in the words of `config.Experts`:

  Qwen3-MoE    softmax, normalised if `norm_topk_prob`
  Qwen3-Next   the same, and a shared expert scaled by a gate of its own
  DeepSeek-V2  softmax, within groups or not, scaled, shared experts
  DeepSeek-V3  sigmoid with a correction of the choice, within groups,
               normalised if `norm_topk_prob`, scaled, shared experts

Several shared experts are one, of their widths together. A reader returns
`Experts`, or None if no layer has them. Some files have one tensor for the
matrices of all experts: `matrices` says where each is.
"""

from collections.abc import Mapping
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from branch_replay import config as config_lib
from branch_replay.weights import hf_fields

_METHODS = ("greedy", "group_limited_greedy")
# Projections of DeepSeek's shared experts are under another name than Qwen's.
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def qwen3_moe(mapping: Mapping[str, Any]) -> config_lib.Experts:
  """The experts of a Qwen3-MoE model, which every layer must have."""
  hf_fields.check_fixed(
      mapping, {"decoder_sparse_step": 1, "mlp_only_layers": []}
  )
  count = hf_fields.integer(mapping, "num_local_experts", default=128)
  return config_lib.Experts(
      count=hf_fields.integer(mapping, "num_experts", default=count),
      top_k=hf_fields.integer(mapping, "num_experts_per_tok", default=8),
      width=hf_fields.integer(mapping, "moe_intermediate_size", default=768),
      normalised=bool(mapping.get("norm_topk_prob", False)),
  )


def qwen3_next(mapping: Mapping[str, Any]) -> config_lib.Experts | None:
  """The experts of a Qwen3-Next model.

  Raises:
    ValueError: a layer without experts follows one with them.
  """
  layers = hf_fields.integer(mapping, "num_hidden_layers")
  dense = mapping.get("mlp_only_layers") or []
  step = hf_fields.integer(mapping, "decoder_sparse_step", default=1)
  count = hf_fields.integer(mapping, "num_experts", default=512)
  sparse = [
      layer for layer in range(layers)
      if count and layer not in dense and not (layer + 1) % step
  ]
  if not sparse:
    return None
  if sparse != list(range(sparse[0], layers)):
    raise ValueError(
        f"mlp_only_layers={dense!r} and decoder_sparse_step={step} put experts "
        f"into the layers {sparse} of {layers}: only leading layers may have "
        "none."
    )
  return config_lib.Experts(
      count=count,
      top_k=hf_fields.integer(mapping, "num_experts_per_tok", default=10),
      width=hf_fields.integer(mapping, "moe_intermediate_size", default=512),
      shared_width=hf_fields.integer(
          mapping, "shared_expert_intermediate_size", default=512
      ),
      shared_gate=True,
      first_dense=sparse[0],
      normalised=bool(mapping.get("norm_topk_prob", True)),
  )


def deepseek(mapping: Mapping[str, Any]) -> config_lib.Experts | None:
  """The experts of a DeepSeek-V2 or -V3 model.

  Raises:
    ValueError: an option asks for a routing that neither has.
  """
  second = mapping["model_type"] == "deepseek_v2"
  layers = hf_fields.integer(mapping, "num_hidden_layers")
  dense = hf_fields.integer(mapping, "first_k_dense_replace")
  if dense >= layers:
    return None
  method = mapping.get("topk_method") or "greedy"
  hf_fields.check_fixed(mapping, {"moe_layer_freq": 1})
  if second:
    # transformers does not divide these weights whatever the option says.
    hf_fields.check_fixed(
        mapping, {"scoring_func": "softmax", "norm_topk_prob": False}
    )
    if method not in _METHODS:
      raise ValueError(
          f"topk_method={method!r} must be one of {', '.join(_METHODS)}."
      )
  else:
    hf_fields.check_fixed(
        mapping, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    )
  groups = 1
  if not second or method != "greedy":
    groups = hf_fields.integer(mapping, "n_group")
  width = hf_fields.integer(mapping, "moe_intermediate_size")
  shared = hf_fields.integer(mapping, "n_shared_experts")
  if shared < 1:
    raise ValueError(
        f"n_shared_experts={shared} is not supported: layers of this family "
        "with experts have a shared one."
    )
  return config_lib.Experts(
      count=hf_fields.integer(mapping, "n_routed_experts"),
      top_k=hf_fields.integer(mapping, "num_experts_per_tok"),
      width=width,
      shared_width=shared * width,
      first_dense=dense,
      scores="softmax" if second else "sigmoid",
      normalised=not second and bool(mapping["norm_topk_prob"]),
      scaling=mapping["routed_scaling_factor"],
      correction=not second,
      groups=groups,
      top_groups=hf_fields.integer(mapping, "topk_group") if groups > 1 else 1,
      group_top=1 if second or groups == 1 else 2,
  )


def qwen3_moe_to_hf(experts: config_lib.Experts) -> dict[str, Any]:
  """The options of Qwen3-MoE, of which Qwen3-Next has the same and more."""
  return {
      "num_experts": experts.count,
      "num_experts_per_tok": experts.top_k,
      "moe_intermediate_size": experts.width,
      "norm_topk_prob": experts.normalised,
      "decoder_sparse_step": 1,
      "mlp_only_layers": list(range(experts.first_dense)),
  }


def qwen3_next_to_hf(experts: config_lib.Experts) -> dict[str, Any]:
  return qwen3_moe_to_hf(experts) | {
      "shared_expert_intermediate_size": experts.shared_width,
  }


def deepseek_to_hf(experts: config_lib.Experts) -> dict[str, Any]:
  """The options of DeepSeek-V3, or of V2 if scores are a softmax."""
  second = experts.scores == "softmax"
  method = _METHODS[experts.groups > 1] if second else "noaux_tc"
  return {
      "n_routed_experts": experts.count,
      "num_experts_per_tok": experts.top_k,
      "moe_intermediate_size": experts.width,
      "n_shared_experts": experts.shared_width // experts.width,
      "first_k_dense_replace": experts.first_dense,
      "moe_layer_freq": 1,
      "scoring_func": experts.scores,
      "topk_method": method,
      "norm_topk_prob": experts.normalised,
      "routed_scaling_factor": experts.scaling,
      "n_group": experts.groups,
      "topk_group": experts.top_groups,
  }


class Matrix(NamedTuple):
  """Where one expert's matrix is in a tensor of the matrices of all.

  Attributes:
    expert: index on the tensor's first axis.
    rows: rows of that expert, or columns if `turned`.
    shape: of the matrix, [out, in].
    turned: whether the tensor holds the transpose.
  """

  expert: int
  rows: slice
  shape: tuple[int, int]
  turned: bool

  def read(self, tensor) -> np.ndarray:
    """The matrix, of an array or of a tensor in a file that can be sliced."""
    if self.turned:
      return tensor[self.expert, :, self.rows].T
    return tensor[self.expert, self.rows]


def matrices(
    name: str, shape: tuple[int, ...], width: int
) -> dict[str, Matrix]:
  """Matrices by the names that files with one tensor for each have.

  Two forms are read: [E, 2F, M] and [E, M, F] of gates with ups and of downs,
  and the transpose of each matrix. If both fit, it is the former.

  Args:
    name: of a tensor.
    shape: its shape.
    width: M, the width of the residual stream.

  Returns:
    Nothing for a tensor that is not of all experts.
  """
  found = re.fullmatch(r"(.*\.mlp\.experts)\.(gate_up|down)_proj", name)
  if found is None or len(shape) != 3:
    return {}
  before, kind = found.groups()
  turned = shape[1 if kind == "down" else 2] != width
  rows, columns = shape[:0:-1] if turned else shape[1:]
  parts = ("down",) if kind == "down" else ("gate", "up")
  size = rows // len(parts)
  return {
      f"{before}.{expert}.{part}_proj.weight": Matrix(
          expert, slice(at * size, (at + 1) * size), (size, columns), turned
      )
      for expert in range(shape[0]) for at, part in enumerate(parts)
  }


def deepseek_names(
    config: config_lib.ModelConfig, layer: int
) -> list[tuple[str, str, int]]:
  """Name in a DeepSeek file, name in `stacking.HF_NAMES`, and columns.

  Those of the projections of a layer's shared experts; none if it has none.
  """
  experts = config.experts
  if experts is None or layer < experts.first_dense:
    return []
  columns = (config.width, config.width, experts.shared_width)
  return [
      (f"mlp.shared_experts.{name}.weight", f"mlp.shared_expert.{name}.weight",
       size)
      for name, size in zip(_PROJECTIONS, columns, strict=True)
  ]
