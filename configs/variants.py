# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a config from its fields and the changes of one variant.

`--config=configs/long_run.py` is a config as it stands, and
`--config=configs/long_run.py:hybrid` its variant of that name.
"""

from collections.abc import Callable

import ml_collections

# A decoder of 40 million parameters, and one too small for times to matter.
MEASURED_MODEL = {
    "vocab_size": 4096, "width": 576, "num_layers": 8, "num_heads": 9,
    "num_kv_heads": 3, "head_dim": 64, "ffn_width": 1536,
    "max_positions": 32768,
}
TINY_MODEL = {
    "vocab_size": 64, "width": 32, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "ffn_width": 48,
}


def getter(
    fields: dict, variants: dict[str, dict]
) -> Callable[[str], ml_collections.ConfigDict]:
  """The `get_config` of a config file.

  Args:
    fields: of the config without a variant.
    variants: by name, the fields that differ; of a nested config those alone.
  """
  def get_config(variant: str = "") -> ml_collections.ConfigDict:
    found = ml_collections.ConfigDict(fields)
    if variant:
      found.update(chosen(variants, variant))
    return found

  return get_config


def chosen(variants: dict[str, dict], name: str) -> dict:
  """The entry of a variant; ValueError names them all if there is none."""
  if name not in variants:
    raise ValueError(
        f"Unknown variant {name!r}: use one of "
        f"{', '.join(filter(None, variants))}."
    )
  return variants[name]
