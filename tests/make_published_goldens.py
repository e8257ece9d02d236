# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens of hf_experts_test.py, hf_text_test.py, models_test.py.

Experts as published models have them, models that read images too, here given
text alone, and numbers of parameters of published models. Run in the
environment of make_goldens.py, which says what the numbers are:

  ATEN_CPU_CAPABILITY=default .goldens/bin/python \\
      tests/make_published_goldens.py

A minute on one core. The models are as small as their structure allows. With
`--exports FOLDER` nothing is written: what make_exports.py wrote of these is
read by transformers, and its logits are compared with the goldens'.
"""

import json
import pathlib
import sys

import make_goldens
import torch
import transformers

IDS_BELOW = 40  # the ids above mark images
_SMALL = dict(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    max_position_embeddings=128,
)
_LATENT = dict(
    num_key_value_heads=2, kv_lora_rank=6, qk_nope_head_dim=4,
    qk_rope_head_dim=4, v_head_dim=6, head_dim=4, first_k_dense_replace=1,
    n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3,
    moe_intermediate_size=4,
)
_YARN = dict(
    rope_type="yarn", rope_theta=1000.0, factor=4.0, mscale=0.7,
    mscale_all_dim=0.7, original_max_position_embeddings=32,
)
_AXES = dict(rope_type="default", rope_theta=1000.0, mrope_section=[1, 1, 2])
_DELTA = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4,
    linear_conv_kernel_dim=3,
)
_VISION = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=1,
    out_hidden_size=16, patch_size=2, num_position_embeddings=4,
)
_MARKS = dict(
    image_token_id=40, video_token_id=41, vision_start_token_id=42,
    vision_end_token_id=43,
)
# Name -> class, options. DeepSeek's norms of latents have an epsilon of
# their own, so another one of the other norms shows which is where.
EXPERTS = {
    "qwen3_next_experts": ("Qwen3Next", dict(
        rope_parameters=dict(
            rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.5
        ),
        **_DELTA, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=4, shared_expert_intermediate_size=8,
        norm_topk_prob=True,
    )),
    "deepseek_v2_greedy": ("DeepseekV2", _LATENT | dict(
        rope_parameters=_YARN, q_lora_rank=None, topk_method="greedy",
        n_group=1, topk_group=1, routed_scaling_factor=1.0,
    )),
    "deepseek_v2_groups": ("DeepseekV2", _LATENT | dict(
        rope_parameters=_YARN, q_lora_rank=5,
        topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=4.0,
    )),
    "deepseek_v3_experts": ("DeepseekV3", _LATENT | dict(
        rope_parameters=_YARN, q_lora_rank=5, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, rms_norm_eps=0.05,
    )),
}
# Name -> class, options of text_config, of vision_config, and of the whole.
IMAGES = {
    "mistral3": (
        "Mistral3",
        dict(model_type="mistral", sliding_window=None, rope_theta=1000.0),
        dict(
            model_type="pixtral", hidden_size=8, intermediate_size=8,
            num_hidden_layers=1, num_attention_heads=1, head_dim=8,
            image_size=28, patch_size=14,
        ),
        dict(image_token_index=40, tie_word_embeddings=False),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL", dict(rope_parameters=_AXES, rms_norm_eps=1e-6),
        dict(
            depth=1, hidden_size=8, intermediate_size=8, num_heads=1,
            out_hidden_size=16, patch_size=2, fullatt_block_indexes=[0],
        ),
        _MARKS | dict(tie_word_embeddings=False),
    ),
    "qwen3_vl": (
        "Qwen3VL", dict(rope_parameters=_AXES),
        _VISION | dict(deepstack_visual_indexes=[0]),
        _MARKS | dict(tie_word_embeddings=True),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe", dict(
            rope_parameters=_AXES, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=4,
        ),
        _VISION | dict(deepstack_visual_indexes=[0]),
        _MARKS | dict(tie_word_embeddings=False),
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe", dict(
            rope_parameters=_AXES | dict(partial_rotary_factor=0.5),
            **_DELTA, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=4, shared_expert_intermediate_size=8,
        ),
        _VISION, _MARKS | dict(tie_word_embeddings=False),
    ),
}


def make_experts(name):
  """A model of text alone, its golden with all gradients."""
  family, options = EXPERTS[name]
  generator = torch.Generator().manual_seed(sum(map(ord, name)))
  config = getattr(transformers, f"{family}Config")(
      **_SMALL | options, bos_token_id=1, eos_token_id=2
  )
  model = getattr(transformers, f"{family}ForCausalLM")(config)
  zero = family == "Qwen3Next"
  make_goldens.randomise(
      model, generator, lambda key: zero and "linear_attn" not in key
  )
  with torch.no_grad():
    for key, buffer in model.named_buffers():
      if key.endswith("e_score_correction_bias"):
        buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
  model.save_pretrained(make_goldens.GOLDENS / name)
  make_goldens.write_golden(
      name, transformers.AutoModelForCausalLM, generator, IDS_BELOW
  )


def make_images(name):
  """A model that reads images too; its golden is of text, logits alone."""
  family, text, vision, whole = IMAGES[name]
  generator = torch.Generator().manual_seed(sum(map(ord, name)))
  small = dict(_SMALL)
  if name == "qwen2_5_vl":  # its heads are of width by count
    del small["head_dim"]
  config = getattr(transformers, f"{family}Config")(
      text_config=small | text | dict(bos_token_id=1, eos_token_id=2),
      vision_config=vision, **whole
  )
  model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
  zero = family == "Qwen3_5Moe"
  make_goldens.randomise(
      model, generator, lambda key: zero and "linear_attn" not in key
  )
  model.save_pretrained(make_goldens.GOLDENS / name)
  make_goldens.write_golden(
      name, transformers.AutoModelForImageTextToText, generator, IDS_BELOW,
      gradients=False,
  )


def parameters(options):
  """How many numbers the decoder of text has that a config.json describes.

  No memory is taken for them. The correction of DeepSeek's routers is a buffer
  there, and counted. What predicts later tokens is not made by these classes.
  """
  # Kimi-K2 is DeepSeek-V3 under a name that needs code of its own.
  family = options["model_type"].replace("kimi_k2", "deepseek_v3")
  rest = {
      key: value for key, value in options.items()
      if key not in ("model_type", "quantization_config")
  }
  if family == "mistral3":  # published with a head, and without the option
    rest.setdefault("tie_word_embeddings", False)
  config = transformers.AutoConfig.for_model(family, **rest)
  auto = transformers.AutoModelForCausalLM
  if "vision_config" in options:
    auto = transformers.AutoModelForImageTextToText
  with torch.device("meta"):
    model = auto.from_config(config)
  named = dict(model.named_parameters()) | {
      name: buffer for name, buffer in model.named_buffers()
      if name.endswith("e_score_correction_bias")
  }
  return sum(
      value.numel() for name, value in named.items()
      if not name.startswith(("model.visual", "model.vision", "model.multi_"))
  )


def count_published():
  """Writes the numbers of all models of tests/published."""
  folder = pathlib.Path(__file__).parent / "published"
  found = {
      path.stem: parameters(json.loads(path.read_text()))
      for path in sorted(folder.glob("*.json"))
  }
  path = make_goldens.GOLDENS / "published.json"
  path.write_text(json.dumps(found, indent=1) + "\n")


def check_export(directory):
  """Prints how far the logits of an export are from those of its golden."""
  golden = make_goldens.np.load(
      make_goldens.GOLDENS / directory.name / "golden.npz"
  )
  model, said = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation="eager",
      output_loading_info=True,
  )
  wrong = {key: names for key, names in said.items() if names}
  assert not wrong, (directory, wrong)
  ids = torch.tensor(golden["tokens"]).long()[None]
  with torch.no_grad():
    logits = model(input_ids=ids).logits[0].numpy()
  far = abs(logits - golden["logits"]).max()
  print(f"{directory.name} as {type(model).__name__}: off by {far:.2g}")
  assert far < 2e-4, directory


def main():
  if sys.argv[1:2] == ["--exports"]:
    for name in (*EXPERTS, *IMAGES):
      check_export(pathlib.Path(sys.argv[2]) / name)
    return
  for name in sys.argv[1:] or [*EXPERTS, *IMAGES, "published"]:
    if name == "published":
      count_published()
    else:
      (make_experts if name in EXPERTS else make_images)(name)


if __name__ == "__main__":
  main()
