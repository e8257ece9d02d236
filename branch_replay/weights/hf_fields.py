# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Fields of `config.json` that the readers of all families share."""

from collections.abc import Mapping
from typing import Any

from branch_replay import config as config_lib

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def integer(mapping: Mapping[str, Any], key: str, *, default=None) -> int:
  """The integer under a key."""
  value = mapping.get(key)
  value = default if value is None else value
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(f"config.json must hold an integer {key}, not {value!r}.")
  return value


def check_fixed(mapping: Mapping[str, Any], fixed: Mapping[str, Any]):
  """Raises ValueError for an option of which only another value is computed.

  Args:
    mapping: the parsed file; an option that is absent or null is right.
    fixed: the one value of every option.
  """
  for key, supported in fixed.items():
    value = mapping.get(key)
    if value is not None and value != supported:
      raise ValueError(
          f"{key}={value!r} is not supported: only {supported!r} is."
      )


def rope_from_hf(mapping: Mapping[str, Any], *, default_theta=10_000.0):
  """Base, scaling and rotated share of a head, of either style of options.

  Returns:
    The base, the scaling or None, and the share or None.
  """
  rope = dict(
      mapping.get("rope_parameters") or mapping.get("rope_scaling") or {}
  )
  kind = rope.get("rope_type", rope.get("type", "default"))
  theta = rope.get("rope_theta", mapping.get("rope_theta"))
  theta = default_theta if theta is None else float(theta)
  partial = rope.get(
      "partial_rotary_factor", mapping.get("partial_rotary_factor")
  )
  if kind == "default":
    return theta, None, partial
  if kind not in _ROPE_TYPES:
    raise ValueError(
        f"RoPE type {kind!r} is not supported: {', '.join(_ROPE_TYPES)}."
    )
  rope.setdefault(
      "original_max_position_embeddings",
      mapping.get("max_position_embeddings"),
  )
  return theta, _scaling_from_hf(kind, rope), partial


def whole_rope_from_hf(mapping: Mapping[str, Any], *, default_theta=10_000.0):
  """Base and scaling of a family that rotates whole heads."""
  theta, scaling, partial = rope_from_hf(mapping, default_theta=default_theta)
  if partial not in (None, 1, 1.0):
    raise ValueError(
        f"partial_rotary_factor={partial} is not supported: only 1 is."
    )
  return theta, scaling


def _scaling_from_hf(kind, rope):
  def number(key):
    if not isinstance(rope.get(key), int | float):
      raise ValueError(
          f"RoPE type {kind!r} needs a number {key}, not {rope.get(key)!r}."
      )
    return float(rope[key])

  if kind == "linear":
    return config_lib.LinearScaling(number("factor"))
  original = int(number("original_max_position_embeddings"))
  if kind == "llama3":
    return config_lib.Llama3Scaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_positions=original,
    )

  def optional(key):
    return None if rope.get(key) is None else number(key)

  return config_lib.YarnScaling(
      factor=number("factor"),
      original_max_positions=original,
      beta_fast=optional("beta_fast") or 32.0,
      beta_slow=optional("beta_slow") or 1.0,
      attention_factor=optional("attention_factor"),
      mscale=optional("mscale"),
      mscale_all_dim=optional("mscale_all_dim"),
      truncate=bool(rope.get("truncate", True)),
  )


def scaling_to_hf(
    scaling: config_lib.RopeScaling | None,
) -> dict[str, Any] | None:
  """The `rope_scaling` of a scaling."""
  match scaling:
    case None:
      return None
    case config_lib.LinearScaling():
      return {"rope_type": "linear", "factor": scaling.factor}
    case config_lib.Llama3Scaling():
      return {
          "rope_type": "llama3",
          "factor": scaling.factor,
          "low_freq_factor": scaling.low_freq_factor,
          "high_freq_factor": scaling.high_freq_factor,
          "original_max_position_embeddings": scaling.original_max_positions,
      }
    case config_lib.YarnScaling():
      optional = {
          key: getattr(scaling, key)
          for key in ("attention_factor", "mscale", "mscale_all_dim")
          if getattr(scaling, key) is not None
      }
      return {
          "rope_type": "yarn",
          "factor": scaling.factor,
          "original_max_position_embeddings": scaling.original_max_positions,
          "beta_fast": scaling.beta_fast,
          "beta_slow": scaling.beta_slow,
          "truncate": scaling.truncate,
          **optional,
      }
    case _:
      raise ValueError(f"Unknown RoPE scaling {scaling!r}.")
