# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads fields of `config.json` that several families share."""

from collections.abc import Mapping
from typing import Any

from branch_replay import config as config_lib

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Options that have an effect only together with a type.
_SCALES = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim",
)


def integer(mapping: Mapping[str, Any], key: str, *, default=None) -> int:
  """The integer under a key; raises ValueError for anything else."""
  value = mapping.get(key)
  value = default if value is None else value
  if not isinstance(value, int) or isinstance(value, bool):
    raise ValueError(f"config.json must hold an integer {key}, not {value!r}.")
  return value


def check_fixed(mapping: Mapping[str, Any], fixed: Mapping[str, Any]):
  """Raises ValueError for an option with an unsupported value.

  Args:
    mapping: the parsed file; an option that is absent or null is accepted.
    fixed: the one supported value of every option.
  """
  for key, supported in fixed.items():
    value = mapping.get(key)
    if value is not None and value != supported:
      raise ValueError(
          f"{key}={value!r} is not supported: only {supported!r} is."
      )


def rope_from_hf(mapping: Mapping[str, Any], *, default_theta=10_000.0):
  """Reads RoPE: base, scaling, and rotated share of a head.

  Both styles of options are read, see `hf_config.config_from_hf`.

  Returns:
    The base, the scaling or None, and the share or None.

  Raises:
    ValueError: a field is malformed or contradicts another, or there is a
      scaling without its type.
  """
  rope, source = _rope_options(mapping)
  kind = _rope_type(rope, source)
  theta = rope.get("rope_theta", mapping.get("rope_theta"))
  theta = default_theta if theta is None else _above_zero("rope_theta", theta)
  partial = rope.get(
      "partial_rotary_factor", mapping.get("partial_rotary_factor")
  )
  if partial is not None:
    partial = _above_zero("partial_rotary_factor", partial)
  if kind == "default":
    return theta, None, partial
  if kind not in _ROPE_TYPES:
    raise ValueError(
        f"RoPE type {kind!r} is not supported: {', '.join(_ROPE_TYPES)}."
    )
  if rope.get("original_max_position_embeddings") is None:
    rope["original_max_position_embeddings"] = mapping.get(
        "max_position_embeddings"
    )
  return theta, _scaling_from_hf(kind, rope, source), partial


def _rope_options(mapping):
  """The RoPE options, and the field they are in."""
  found = {}
  for field in ("rope_parameters", "rope_scaling"):
    value = mapping.get(field)
    if value is not None and not isinstance(value, Mapping):
      raise ValueError(f"{field} must be a mapping or null, not {value!r}.")
    found[field] = dict(value or {})
    nested = sorted(
        key for key, x in found[field].items() if isinstance(x, Mapping)
    )
    if nested:
      raise ValueError(
          f"{field} has options for {', '.join(nested)} apart, which this "
          "family does not have: give one set of options."
      )
  new, old = found["rope_parameters"], found["rope_scaling"]
  for key in new.keys() & old.keys():
    if new[key] != old[key]:
      raise ValueError(
          f"rope_parameters and rope_scaling differ in {key}, {new[key]!r} and "
          f"{old[key]!r}: keep one of them."
      )
  source = "rope_parameters" if new else "rope_scaling"
  return old | new, source


def _rope_type(rope, source):
  """The type the options name; "default" if there is no scaling."""
  named = {rope[key] for key in ("rope_type", "type") if rope.get(key)}
  if len(named) > 1:
    raise ValueError(
        f"{source} names two types, rope_type={rope['rope_type']!r} and type="
        f"{rope['type']!r}: keep one of them."
    )
  kind = named.pop() if named else "default"
  unused = {
      key: rope[key] for key in _SCALES
      if rope.get(key) is not None and kind == "default"
  }
  # A factor of 1 has no effect.
  if unused and unused != {"factor": 1}:
    raise ValueError(
        f"{source}={rope!r} has {', '.join(unused)} without a rope_type that "
        f"uses them: name one of {', '.join(_ROPE_TYPES[1:])}, or delete them."
    )
  return kind


def _above_zero(key, value) -> float:
  if not config_lib.is_number(value) or value <= 0:
    raise ValueError(
        f"{key} must be a finite number above 0, not {value!r}."
    )
  return float(value)


def whole_rope_from_hf(mapping: Mapping[str, Any], *, default_theta=10_000.0):
  """Base and scaling, for a family that rotates whole heads."""
  theta, scaling, partial = rope_from_hf(mapping, default_theta=default_theta)
  if partial not in (None, 1, 1.0):
    raise ValueError(
        f"partial_rotary_factor={partial} is not supported: only 1 is."
    )
  return theta, scaling


def _scaling_from_hf(kind, rope, source):
  def number(key):
    value = rope.get(key)
    if not config_lib.is_number(value) or value <= 0:
      raise ValueError(
          f"RoPE type {kind!r} needs a number {key}, not {value!r}: correct "
          f"{source}, it must be finite and above 0."
      )
    return float(value)

  if kind == "linear":
    return config_lib.LinearScaling(number("factor"))
  original = number("original_max_position_embeddings")
  if original != int(original):
    raise ValueError(
        f"{source} needs an integer original_max_position_embeddings, not "
        f"{original}."
    )
  original = int(original)
  if kind == "llama3":
    return config_lib.Llama3Scaling(
        factor=number("factor"),
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_max_positions=original,
    )

  def optional(key, default=None, *, zero=False):
    value = rope.get(key)
    if value is None or (zero and config_lib.is_number(value) and value == 0):
      return default if value is None else 0.0
    return number(key)

  return config_lib.YarnScaling(
      factor=number("factor"),
      original_max_positions=original,
      beta_fast=optional("beta_fast", 32.0),
      beta_slow=optional("beta_slow", 1.0),
      attention_factor=optional("attention_factor"),
      mscale=optional("mscale", zero=True),
      mscale_all_dim=optional("mscale_all_dim", zero=True),
      truncate=rope.get("truncate", True),
  )


def scaling_to_hf(
    scaling: config_lib.RopeScaling | None,
) -> dict[str, Any] | None:
  """The `rope_scaling` option that expresses a scaling."""
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
