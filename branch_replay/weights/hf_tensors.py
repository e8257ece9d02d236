# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that a family stores in another form than `stacking` expects.

`stacking` expects one tensor for every parameter and layer. Some families fuse
two of these in one tensor of the file, split one, order its rows differently or
give it another name. A `RowMap` describes each case in the same way: the rows
of some tensors of the file, one after the other, are the rows of some expected
tensors in another order. A tensor that no `RowMap` names is stored as it is
expected. Values are moved and never changed, so reading and writing are exact.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import numpy as np

from branch_replay import config as config_lib
from branch_replay.models import pattern
from branch_replay.weights import hf_experts


class RowMap(NamedTuple):
  """Says which expected tensors of a layer are made of which file tensors.

  Attributes:
    files: names in the file; each has an equal share of the rows.
    own: names in `stacking.HF_NAMES`; they may have different shares.
    row: shape of one row in the file.
    order: row i of the file's tensors, joined, is row order[i] of the expected
      ones, joined; None if the order is the same.
  """

  files: tuple[str, ...]
  own: tuple[str, ...]
  row: tuple[int, ...]
  order: np.ndarray | None = None


def tensors(
    config: config_lib.ModelConfig, mapping: Mapping[str, Any]
) -> list[RowMap]:
  """All tensors that the family of a config.json stores in another form.

  Args:
    config: the configuration that `hf_config` reads from the file.
    mapping: the parsed file.
  """
  family, found = mapping["model_type"], []
  for layer, kind in enumerate(pattern.layers(config)):
    of_layer = []
    if family == "gemma3_text":
      of_layer = _gemma3()
    elif family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
      of_layer = _hybrid(config, kind, fused=family == "qwen3_next")
    elif family in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
      of_layer = _latent(config) + [
          RowMap((file,), (own,), (columns,))
          for file, own, columns in hf_experts.deepseek_names(config, layer)
      ]
    found += [
        rows._replace(
            files=tuple(f"model.layers.{layer}.{x}" for x in rows.files),
            own=tuple(f"model.layers.{layer}.{x}" for x in rows.own),
        )
        for rows in of_layer
    ]
  return found


def _gemma3() -> list[RowMap]:
  """Gemma 3, whose norms have other names."""
  return [
      RowMap((file,), (own,), ())
      for file, own in (
          ("post_attention_layernorm.weight", "post_mixer_layernorm.weight"),
          (
              "pre_feedforward_layernorm.weight",
              "post_attention_layernorm.weight",
          ),
      )
  ]


def _hybrid(config, kind, fused: bool) -> list[RowMap]:
  """Qwen3.5, and Qwen3-Next, which fuses two projections."""
  if kind == "full":
    heads, size = config.num_heads, config.head_dim
    return [RowMap(
        ("self_attn.q_proj.weight",),
        ("self_attn.q_proj.weight", "self_attn.output_gate.weight"),
        (config.width,), _by_head(heads, (size, size)),
    )]
  delta, row = config.delta, (config.width,)
  heads, repeats = delta.key_heads, delta.value_heads // delta.key_heads
  values = repeats * delta.value_dim
  at = np.arange(heads * delta.channels).reshape(heads, -1)
  apart = np.concatenate([
      x.reshape(-1)
      for x in np.split(at, [delta.key_dim, 2 * delta.key_dim], axis=1)
  ])
  stored = [RowMap(
      ("linear_attn.conv1d.weight",), ("linear_attn.conv1d.weight",),
      (1, delta.conv_width), apart,
  )]
  stored += [
      RowMap((name,), (name,), ())
      for name in ("linear_attn.A_log", "linear_attn.dt_bias")
  ]
  channels = "linear_attn.channels.weight"
  if fused:
    return [*stored, RowMap(
        ("linear_attn.in_proj_qkvz.weight",),
        (channels, "linear_attn.in_proj_z.weight"), row,
        _by_head(heads, (delta.channels, values)),
    )]
  rates = np.arange(2 * heads * repeats).reshape(heads, 2, repeats)
  return [
      *stored,
      RowMap(("linear_attn.in_proj_qkv.weight",), (channels,), row, apart),
      RowMap(
          ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
          ("linear_attn.in_proj_ba.weight",), row,
          rates.swapaxes(0, 1).reshape(-1),
      ),
  ]


def _latent(config) -> list[RowMap]:
  """DeepSeek, which stores the two numbers of a rotated pair as neighbours."""
  latent, heads = config.latent, config.num_heads
  pairs = np.arange(latent.rope_dim).reshape(2, -1).T.reshape(-1)
  shared = np.concatenate([np.arange(latent.rank), latent.rank + pairs])
  head = np.concatenate([np.arange(latent.nope_dim), latent.nope_dim + pairs])
  queries = latent.query_dim * np.arange(heads)[:, None] + head
  by_head = queries.reshape(-1)
  if latent.query_rank:
    of_queries = [
        RowMap(
            ("self_attn.q_a_proj.weight",), ("self_attn.q_proj.weight",),
            (config.width,),
        ),
        RowMap(
            ("self_attn.q_b_proj.weight",), ("self_attn.q_b_proj.weight",),
            (latent.query_rank,), by_head,
        ),
    ]
  else:
    of_queries = [RowMap(
        ("self_attn.q_proj.weight",), ("self_attn.q_proj.weight",),
        (config.width,), by_head,
    )]
  joint = "self_attn.kv_a_proj_with_mqa.weight"
  return [
      *of_queries,
      RowMap((joint,), (joint,), (config.width,), shared),
      RowMap(
          ("self_attn.kv_b_proj.weight",),
          ("self_attn.key_up", "self_attn.value_up"), (latent.rank,),
          _by_head(heads, (latent.nope_dim, latent.value_dim)),
      ),
  ]


def _by_head(heads: int, sizes: tuple[int, int]) -> np.ndarray:
  """Order of the rows of two matrices that a file interleaves by head."""
  first = np.arange(heads * sizes[0]).reshape(heads, -1)
  second = first.size + np.arange(heads * sizes[1]).reshape(heads, -1)
  return np.concatenate([first, second], axis=1).reshape(-1)


def file_shapes(
    stored: list[RowMap], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
  """Shapes of a file's tensors, from those of the expected tensors."""
  found = dict(shapes)
  for rows in stored:
    for name in rows.own:
      del found[name]
  for rows in stored:
    numbers = sum(int(np.prod(shapes[name])) for name in rows.own)
    count = numbers // int(np.prod(rows.row)) // len(rows.files)
    for name in rows.files:
      found[name] = (count, *rows.row)
  return found


def reader(
    stored: list[RowMap], shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> Callable[[str], np.ndarray]:
  """Returns a function that reads expected tensors from a file's tensors.

  Args:
    stored: what `tensors` returned.
    shapes: shapes of the expected tensors, by name.
    read: function from a name in the file to its tensor.
  """
  by_name = {name: rows for rows in stored for name in rows.own}

  def read_own(name):
    rows = by_name.get(name)
    if rows is None:
      return read(name)
    values = np.concatenate([read(file) for file in rows.files])
    if rows.order is not None:
      ordered = np.empty_like(values)
      ordered[rows.order] = values
      values = ordered
    before = rows.own[: rows.own.index(name)]
    start = sum(_count(rows, shapes[other]) for other in before)
    part = values[start : start + _count(rows, shapes[name])]
    return _turned(name, part, shapes[name])

  return read_own


def _count(rows: RowMap, shape) -> int:
  return int(np.prod(shape)) // int(np.prod(rows.row))


def _turned(name, rows, shape):
  """Rows as the expected tensor; `value_up` is transposed."""
  if name.endswith("value_up"):
    heads, rank, size = shape
    return rows.reshape(heads, size, rank).swapaxes(1, 2)
  return rows.reshape(shape)


def to_file(
    stored: list[RowMap], named: Iterable[tuple[str, np.ndarray]]
) -> dict[str, np.ndarray]:
  """The inverse: the file's tensors, made of the expected ones."""
  found = dict(named)
  made = {}
  for rows in stored:
    values = np.concatenate([
        (x.swapaxes(1, 2) if name.endswith("value_up") else x).reshape(
            -1, *rows.row
        )
        for name, x in ((name, found.pop(name)) for name in rows.own)
    ])
    if rows.order is not None:
      values = values[rows.order]
    parts = np.split(values, len(rows.files))
    made |= dict(zip(rows.files, map(np.ascontiguousarray, parts), strict=True))
  return found | made
