# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of what published models have: experts, text parts, defaults."""

from tests.mutants.fault import faults

_AGREE = "families_test.py::test_logits_and_gradients_agree_with_transformers"
_NEXT, _SECOND, _THIRD = (
    f"{_AGREE}[{name}]" for name in (
        "qwen3_next_experts", "deepseek_v2_groups", "deepseek_v3_experts",
    )
)
_EXPERTS = "hf_experts_test.py::test_"
_TEXT = "hf_text_test.py::test_"

LOADING = faults(
    ("weights of Qwen3-Next are not normalised", "weights/hf_experts.py",
     'normalised=bool(mapping.get("norm_topk_prob", True))',
     "normalised=False", _NEXT),
    ("weights of DeepSeek-V2 are normalised", "weights/hf_experts.py",
     'normalised=not second and bool(mapping["norm_topk_prob"])',
     "normalised=True", _SECOND),
    ("any group may be chosen from", "weights/hf_experts.py",
     'groups = hf_fields.integer(mapping, "n_group")', "groups = 1", _SECOND),
    ("a group of DeepSeek-V3 is as good as its best", "weights/hf_experts.py",
     "group_top=1 if second or groups == 1 else 2", "group_top=1", _THIRD),
    ("a correction weighs experts too", "models/expert_layers.py",
     "return x_NM.astype(wide) @ kernel_ME.astype(wide), correction_E",
     "return x_NM.astype(wide) @ kernel_ME.astype(wide) + (\n"
     "        0 if correction_E is None else correction_E[None]\n"
     "    ), correction_E", _THIRD),
    ("a correction is left out of the choice", "models/expert_layers.py",
     "return ops.choose(self.config.experts, logits_NE, correction_E)",
     "return ops.choose(self.config.experts, logits_NE)", _THIRD),
    ("a shared expert has no gate", "models/expert_layers.py",
     "if scale_N1 is not None:", "if False:", _NEXT),
    ("a shared expert's gate is not squashed", "models/expert_layers.py",
     "nn.sigmoid(scale_N1.astype(wide))", "scale_N1.astype(wide)", _NEXT),
    ("weights of DeepSeek are not scaled", "weights/hf_experts.py",
     'scaling=mapping["routed_scaling_factor"]', "scaling=1.0", _SECOND,
     _THIRD),
    ("only one of the shared experts is read", "weights/hf_experts.py",
     "shared_width=shared * width", "shared_width=width", _SECOND),
    ("leading layers have experts too", "weights/hf_experts.py",
     "first_dense=dense", "first_dense=0", _THIRD),
    ("latents have the epsilon of other norms", "weights/hf_families.py",
     'norm_eps=1e-6 if mapping.get("rms_norm_eps", 1e-6) != 1e-6 else None',
     "norm_eps=None", _THIRD),
    ("gates and ups of all experts are swapped", "weights/hf_experts.py",
     '("gate", "up")', '("up", "gate")',
     _TEXT + "one_tensor_may_hold_all_experts"),
    ("matrices of all experts are never turned", "weights/hf_experts.py",
     'turned = shape[1 if kind == "down" else 2] != width', "turned = False",
     _TEXT + "one_tensor_may_hold_all_experts"),
    ("no model may have tensors for images", "weights/hf_text.py",
     'if isinstance(mapping.get("vision_config"), Mapping):', "if False:",
     _TEXT + "the_text_part_computes_what_the_whole_does[mistral3]"),
    ("any model may have tensors for images", "weights/hf_text.py",
     'if isinstance(mapping.get("vision_config"), Mapping):', "if True:",
     _TEXT + "a_model_of_text_alone_has_no_image_tensors"),
    ("any text part is of the usual family", "weights/hf_text.py",
     'family = inner.get("model_type") or images.family',
     "family = images.family",
     _TEXT + "a_text_part_of_another_family_is_not_taken_for_the_usual_one"),
    ("a head is tied as the text part says", "weights/hf_text.py",
     "{**images.defaults, **inner, **outer,",
     "{**images.defaults, **outer, **inner,",
     _TEXT + "the_text_part_computes_what_the_whole_does[qwen3_vl_moe]"),
    ("the last layer predicts later tokens", "weights/hf_text.py",
     "range(layers, layers + more)", "range(layers - 1, layers + more)",
     _EXPERTS + "heads_for_later_tokens_are_left_out_in_one_line"),
    ("any model may predict later tokens", "weights/hf_text.py",
     "  return ()\n", '  return ("model.mtp.",)\n',
     _EXPERTS + "in_other_places_they_are_unexpected"),
    ("a Gemma has as many heads for keys as for queries",
     "weights/hf_config.py", "num_key_value_heads=4", "num_key_value_heads=8",
     _TEXT + "a_sparse_text_config_has_the_defaults_of_transformers"),
)
