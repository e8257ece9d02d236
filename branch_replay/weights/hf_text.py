# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a file that a decoder of text is made of.

A model that reads images too has the options of its text part in `text_config`
(or among its own), an image part in `vision_config`, and tensors of both in its
file. Some models of text have heads that predict tokens further on as well.
Here is said what of such a file is the decoder, and under which names.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

from branch_replay.weights import hf_fields


class Images(NamedTuple):
  """A model that reads images too.

  Attributes:
    family: `model_type` of a model of text that computes what its text part
      does, where there is no image.
    inner: `model_type` that its `text_config` may have.
    defaults: options that the two have other defaults of.
    flat: whether options of the text part may be outside of a `text_config`.
    axes: whether positions are of three axes, which are equal in text.
  """

  family: str
  inner: tuple[str, ...]
  defaults: Mapping[str, Any] = {}
  flat: bool = False
  axes: bool = False


IMAGES = {
    "gemma3": Images("gemma3_text", ("gemma3_text",)),
    "mistral3": Images("mistral", ("mistral",)),
    "qwen2_5_vl": Images(
        "qwen2", ("qwen2_5_vl_text",),
        {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5},
        flat=True, axes=True,
    ),
    "qwen3_vl": Images(
        "qwen3", ("qwen3_vl_text",), {"rope_theta": 500_000.0}, axes=True
    ),
    "qwen3_vl_moe": Images(
        "qwen3_moe", ("qwen3_vl_moe_text",),
        {"rope_theta": 500_000.0, "norm_topk_prob": True}, axes=True,
    ),
    "qwen3_5": Images("qwen3_5_text", ("qwen3_5_text",), axes=True),
    "qwen3_5_moe": Images(
        "qwen3_5_moe_text", ("qwen3_5_moe_text",), axes=True
    ),
}

# Beginnings of names of the text part, with what they are in a model of text
# alone, and of the image part.
_TEXT_PREFIXES = {
    "language_model.model.": "model.", "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PREFIXES = (
    "vision_tower.", "multi_modal_projector.", "visual.", "model.vision_tower.",
    "model.multi_modal_projector.", "model.visual.",
)
# A buffer in older exports that the configuration determines.
_COMPUTED = "rotary_emb.inv_freq"


def text_part(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
  """The config of a model's text part; of a model of text alone its own.

  Whether the head is tied is said outside of `text_config`, as transformers 5
  has it, or else inside. A text part of another family than expected keeps its
  `model_type`, for `hf_config` to refuse.
  """
  images = IMAGES.get(mapping.get("model_type"))
  if images is None:
    return mapping
  inner = mapping.get("text_config")
  if not isinstance(inner, Mapping):
    if not images.flat:
      return mapping
    inner = {x: mapping[x] for x in mapping if x != "model_type"}
  outer = {
      name: mapping[name]
      for name in ("tie_word_embeddings", "quantization_config")
      if name in mapping
  }
  family = inner.get("model_type") or images.family
  if family in images.inner:
    family = images.family
  part = {**images.defaults, **inner, **outer, "model_type": family}
  if images.axes:
    part |= {
        name: _one_axis(part[name])
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(part.get(name), Mapping)
    }
  return part


def _one_axis(rope):
  """RoPE options of text, in which positions of all axes are the same."""
  return {
      key: "default" if key in ("type", "rope_type") and value == "mrope"
      else value
      for key, value in rope.items()
  }


def drafts(part: Mapping[str, Any]) -> tuple[str, ...]:
  """Beginnings of names of heads that predict tokens after the next.

  Args:
    part: what `text_part` returned.
  """
  family = part.get("model_type")
  if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
    return ("mtp.",)
  if family in ("deepseek_v3", "kimi_k2"):
    layers = hf_fields.integer(part, "num_hidden_layers")
    more = hf_fields.integer(part, "num_nextn_predict_layers", default=1)
    return tuple(
        f"model.layers.{layer}." for layer in range(layers, layers + more)
    )
  return ()


def namer(mapping: Mapping[str, Any]) -> Callable[[str], str | None]:
  """Returns a function from a stored name to the decoder's, or None.

  The decoder's name is that in a model of text alone. Tensors of an image part
  are left out only if the config has one, and heads for later tokens only in
  families that have them: the function returns None for these. Anything else
  is for the caller to refuse.

  Args:
    mapping: the whole config.json.
  """
  left_out = drafts(text_part(mapping))
  if isinstance(mapping.get("vision_config"), Mapping):
    left_out += _IMAGE_PREFIXES

  def name(stored):
    alone = next(
        (
            own + stored.removeprefix(prefix)
            for prefix, own in _TEXT_PREFIXES.items()
            if stored.startswith(prefix)
        ), stored,
    )
    if alone.endswith(_COMPUTED) or alone.startswith(left_out):
      return None
    return alone

  return name
