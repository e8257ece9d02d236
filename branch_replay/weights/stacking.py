# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps tensors of a file to parameters, and stacks them over layers.

A file holds one [out, in] matrix for each layer; a `Decoder` holds one
[L, in, out] array for each parameter. Shapes are taken from the model itself,
so this module repeats no geometry.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import functools
from typing import NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.models import pattern

# Path of a parameter -> name of its tensor, where the first {} is the layer and
# the second the expert. Paths of parameters that attention layers do not have
# start with the kind of their layers. `hf_tensors` makes tensors that no
# file has under these names.
HF_NAMES = {
    "embed/table": "model.embed_tokens.weight",
    "layers/project/norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/project/query/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/project/query/bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/project/key/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/project/key/bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/project/value/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/project/value/bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/rotate/query_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/rotate/key_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/project/output_gate/kernel": (
        "model.layers.{}.self_attn.output_gate.weight"
    ),
    "layers/join/output/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/join/post_norm/scale": (
        "model.layers.{}.post_mixer_layernorm.weight"
    ),
    "layers/expand/norm/scale": (
        "model.layers.{}.post_attention_layernorm.weight"
    ),
    "layers/expand/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/expand/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/contract/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "layers/contract/post_norm/scale": (
        "model.layers.{}.post_feedforward_layernorm.weight"
    ),
    "delta/project/channels/kernel": (
        "model.layers.{}.linear_attn.channels.weight"
    ),
    "delta/project/rates/kernel": (
        "model.layers.{}.linear_attn.in_proj_ba.weight"
    ),
    "delta/project/output_gate/kernel": (
        "model.layers.{}.linear_attn.in_proj_z.weight"
    ),
    "delta/recur/filter": "model.layers.{}.linear_attn.conv1d.weight",
    "delta/recur/log_rate": "model.layers.{}.linear_attn.A_log",
    "delta/recur/rate_bias": "model.layers.{}.linear_attn.dt_bias",
    "delta/join/norm/scale": "model.layers.{}.linear_attn.norm.weight",
    "delta/join/output/kernel": "model.layers.{}.linear_attn.out_proj.weight",
    "latent/project/latent/kernel": (
        "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight"
    ),
    "latent/rotate/query_norm/scale": (
        "model.layers.{}.self_attn.q_a_layernorm.weight"
    ),
    "latent/rotate/query_up/kernel": (
        "model.layers.{}.self_attn.q_b_proj.weight"
    ),
    "latent/rotate/latent_norm/scale": (
        "model.layers.{}.self_attn.kv_a_layernorm.weight"
    ),
    "latent/rotate/key_up": "model.layers.{}.self_attn.key_up",
    "latent/join/value_up": "model.layers.{}.self_attn.value_up",
    "layers/expand/router/kernel": "model.layers.{}.mlp.gate.weight",
    "layers/expand/router/correction": (
        "model.layers.{}.mlp.gate.e_score_correction_bias"
    ),
    "layers/expand/shared_gate/kernel": (
        "model.layers.{}.mlp.shared_expert.gate_proj.weight"
    ),
    "layers/expand/shared_up/kernel": (
        "model.layers.{}.mlp.shared_expert.up_proj.weight"
    ),
    "layers/expand/shared_scale/kernel": (
        "model.layers.{}.mlp.shared_expert_gate.weight"
    ),
    "layers/contract/shared_down/kernel": (
        "model.layers.{}.mlp.shared_expert.down_proj.weight"
    ),
    "layers/expand/expert_gate/kernel": (
        "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    ),
    "layers/expand/expert_up/kernel": (
        "model.layers.{}.mlp.experts.{}.up_proj.weight"
    ),
    "layers/contract/expert_down/kernel": (
        "model.layers.{}.mlp.experts.{}.down_proj.weight"
    ),
    "final_norm/scale": "model.norm.weight",
    "head/table": "lm_head.weight",
}

GGUF_NAMES = {
    "embed/table": "token_embd.weight",
    "layers/project/norm/scale": "blk.{}.attn_norm.weight",
    "layers/project/query/kernel": "blk.{}.attn_q.weight",
    "layers/project/query/bias": "blk.{}.attn_q.bias",
    "layers/project/key/kernel": "blk.{}.attn_k.weight",
    "layers/project/key/bias": "blk.{}.attn_k.bias",
    "layers/project/value/kernel": "blk.{}.attn_v.weight",
    "layers/project/value/bias": "blk.{}.attn_v.bias",
    "layers/rotate/query_norm/scale": "blk.{}.attn_q_norm.weight",
    "layers/rotate/key_norm/scale": "blk.{}.attn_k_norm.weight",
    "layers/join/output/kernel": "blk.{}.attn_output.weight",
    "layers/expand/norm/scale": "blk.{}.ffn_norm.weight",
    "layers/expand/gate/kernel": "blk.{}.ffn_gate.weight",
    "layers/expand/up/kernel": "blk.{}.ffn_up.weight",
    "layers/contract/down/kernel": "blk.{}.ffn_down.weight",
    "final_norm/scale": "output_norm.weight",
    "head/table": "output.weight",
}


class Slot(NamedTuple):
  """Where one tensor of a file goes.

  Attributes:
    path: path of the parameter, with slashes.
    layer: index on its leading axis, or indices of layer and expert; None for a
      parameter that is not stacked.
    shape: shape the tensor must have in the file.
  """

  path: str
  layer: int | tuple[int, int] | None
  shape: tuple[int, ...]


@functools.lru_cache(maxsize=32)
def _abstract(config: config_lib.ModelConfig):
  """Shapes of the parameters by path; their dtypes mean nothing."""
  model = decoder.Decoder(dataclasses.replace(config, param_dtype="float32"))
  variables = jax.eval_shape(
      model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )
  return traverse_util.flatten_dict(variables["params"], sep="/")


def slots(
    config: config_lib.ModelConfig, names: Mapping[str, str]
) -> dict[str, Slot]:
  """Every tensor that a file of this config must hold.

  Args:
    config: configuration of the model.
    names: `HF_NAMES` or `GGUF_NAMES`.

  Returns:
    Slots by tensor name; the layers of a parameter follow one another.

  Raises:
    ValueError: the model has adapters, or a parameter that files of this format
      cannot hold.
  """
  if config.adapter is not None:
    raise ValueError(
        "The model has low-rank adapters: merge them first, adapters.merge."
    )
  wanted = {}
  for path, leaf in _abstract(config).items():
    if not path.startswith("layers/"):
      wanted[names[path]] = Slot(path, None, leaf.shape)
      continue
    shape = leaf.shape[1:]
    if path.endswith("/kernel"):
      shape = shape[::-1]
    kind, of_layer, layers = _place(config, path)
    name = names.get(f"{kind}/{of_layer}") or names.get(f"layers/{of_layer}")
    if name is None:
      raise ValueError(f"{path} has no place in files of this format.")
    of_experts = name.count("{}") == 2
    for index, layer in enumerate(layers):
      if not of_experts:
        wanted[name.format(layer)] = Slot(path, index, shape)
        continue
      for expert in range(leaf.shape[1]):
        wanted[name.format(layer, expert)] = Slot(
            path, (index, expert), leaf.shape[:1:-1]
        )
  return wanted


def _place(config, path):
  """Kind of a parameter's layers, its path in one, and which they are."""
  for part in pattern.parts(config):
    for place, kind in enumerate(part.kinds):
      start = f"{part.path(place)}/"
      if path.startswith(start):
        return kind, path.removeprefix(start), part.layers(place)
  raise ValueError(f"{path} belongs to no stack of layers.")


def listed(names: Iterable[str], *, limit: int = 8) -> str:
  """The first names in full, and the number of others."""
  names = sorted(names)
  rest = len(names) - limit
  shown = ", ".join(names[:limit])
  return f"{shown} and {rest} more" if rest > 0 else shown


def check(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    source: str,
):
  """Raises ValueError naming missing, unexpected and misshapen tensors.

  Args:
    wanted: expected shapes by name.
    found: shapes by name.
    source: what the message says is wrong.
  """
  problems = []
  if missing := wanted.keys() - found.keys():
    problems.append(f"missing {listed(missing)}")
  if extra := found.keys() - wanted.keys():
    problems.append(f"unexpected {listed(extra)}")
  misshapen = [
      f"{name} is {list(found[name])}, expected {list(shape)}"
      for name, shape in wanted.items()
      if name in found and tuple(found[name]) != tuple(shape)
  ]
  if misshapen:
    problems.append(f"misshapen {listed(misshapen)}")
  if problems:
    raise ValueError(
        f"{source} does not fit the model that its configuration describes: "
        + "; ".join(problems)
        + "."
    )


def stack(
    config: config_lib.ModelConfig,
    names: Mapping[str, str],
    read: Callable[[str], np.ndarray],
) -> dict:
  """Reads every tensor once, and makes the parameters of a `Decoder` of them.

  One parameter is filled at a time, so the peak memory is the model and one
  parameter, not two models.

  Args:
    config: configuration of the model; parameters get its `param_dtype`.
    names: `HF_NAMES` or `GGUF_NAMES`.
    read: function from a name to its tensor, [out, in] in any float dtype.

  Returns:
    The parameters, on the default device.

  Raises:
    ValueError: `param_dtype` cannot hold a value, or needs jax_enable_x64.
  """
  dtype = jnp.dtype(config.param_dtype)
  if jax.dtypes.canonicalize_dtype(dtype) != dtype:
    raise ValueError(
        f"Parameters of {dtype} need jax_enable_x64: set it, or pass "
        "param_dtype='float32'."
    )
  by_path = {}
  for name, slot in slots(config, names).items():
    by_path.setdefault(slot.path, []).append((name, slot))
  flat = {}
  for path, tensors in by_path.items():
    value = np.empty(_abstract(config)[path].shape, dtype)
    for name, slot in tensors:
      tensor = _cast(name, read(name), dtype)
      target = value if slot.layer is None else value[slot.layer]
      target[...] = tensor.T if path.endswith("/kernel") else tensor
    flat[path] = jnp.asarray(value)
  return traverse_util.unflatten_dict(flat, sep="/")


def _cast(name, tensor, dtype):
  if jnp.finfo(dtype).max >= jnp.finfo(tensor.dtype).max:
    return tensor.astype(dtype, copy=False)
  with np.errstate(over="ignore"):
    cast = tensor.astype(dtype)
  if np.any(np.isfinite(tensor) & ~np.isfinite(cast)):
    raise ValueError(
        f"{name} holds {np.max(np.abs(tensor.astype(np.float32)))}, beyond "
        f"{dtype}: pass param_dtype='float32' or 'bfloat16'."
    )
  return cast


def unstack(
    config: config_lib.ModelConfig, names: Mapping[str, str], params: dict
) -> Iterator[tuple[str, np.ndarray]]:
  """The inverse of `stack`: yields a file's tensors with their names.

  Args:
    config: configuration of the model.
    names: `HF_NAMES` or `GGUF_NAMES`.
    params: parameters of a `Decoder`, or their gradient.

  Yields:
    (name, contiguous tensor), each in the parameter's dtype.

  Raises:
    ValueError: the parameters do not fit the config.
  """
  flat = traverse_util.flatten_dict(params, sep="/")
  check(
      {path: leaf.shape for path, leaf in _abstract(config).items()},
      {path: np.shape(leaf) for path, leaf in flat.items()},
      "The parameter tree",
  )
  held, value = None, None
  for name, slot in slots(config, names).items():
    if slot.path != held:
      held, value = slot.path, np.asarray(flat[slot.path])
    tensor = value if slot.layer is None else value[slot.layer]
    if slot.path.endswith("/kernel"):
      tensor = tensor.T
    yield name, np.ascontiguousarray(tensor)
