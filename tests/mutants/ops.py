# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of `ops`, `mixers` and `models`."""

from tests.mutants.fault import faults

_ATTENTION = "attention_test.py::"
_SUITE = _ATTENTION + "TestReplayAttention::test_"
PREFIX = _SUITE + "equals_the_reference_for_any_prefix_length[19]"
TAILS = _SUITE + "equals_the_reference_for_any_tail_lengths[19-tails1]"
DECODING = _ATTENTION + "test_decoding_from_a_cache_equals_the_whole_segment"
_WINDOW = "window_test.py::test_"
_KERNELS = "attention_kernels_test.py::test_"
_DELTA = "gated_delta_test.py::test_"
DELTA = _DELTA + "blocks_equal_the_recurrence_and_so_do_all_gradients"
_LOG_PROBS = "log_probs_test.py::test_"
_EXPERTS = "experts_test.py::test_"
_ROPE = "rope_test.py::test_"
GRADIENT = (
    "gradient_test.py::test_exact_and_full_equal_dense_for_every_architecture"
)
POLICIES = "mixers_test.py::test_every_policy_gives_the_dense_gradient"
TOKENS = (
    "mixers_state_test.py::"
    "test_sampled_tokens_are_drawn_as_the_whole_model_would"
)

OPS = faults(
    ("the log-sum-exp sends no gradient", "ops/attention.py",
     "return delta if d_lse is None else delta - d_lse", "return delta",
     _SUITE + "cotangent_of_the_log_sum_exp_reaches_queries_and_keys_alone"),
    ("queries of the prefix part have no gradient", "ops/attention.py",
     "dq = dq + dq_rows.reshape(dq.shape)", "dq = dq + 0", PREFIX),
    ("padding of branches attends", "ops/attention.py",
     "real_GT = jnp.arange(lse.shape[-1])[None] < lengths_G[:, None]",
     "real_GT = jnp.arange(lse.shape[-1])[None] <= lengths_G[:, None]", TAILS),
    ("two parts are merged by sums", "ops/attention_loops.py",
     "out = a[..., None] * out_a + b[..., None] * out_b",
     "out = out_a + out_b",
     _ATTENTION + "test_merge_of_two_parts_is_one_attention"),
    ("scores are not scaled on the way back", "ops/attention_loops.py",
     "d_scores = probs * (d_probs - delta_N[:, None]) * scale",
     "d_scores = probs * (d_probs - delta_N[:, None])", PREFIX),
    ("old tiles are not rescaled", "ops/attention_loops.py",
     "weighted_ND * decay_N[:, None]", "weighted_ND",
     _ATTENTION + "test_tile_sizes_do_not_change_the_result[sizes0]"),
    ("a new token does not see itself", "ops/attention_loops.py",
     "<= slots_GT[..., None]", "< slots_GT[..., None]", DECODING + "[1-37]"),
    ("cotangents of keys and values are swapped", "ops/attention_loops.py",
     "windows = dk_DB.T, dv_DB.T", "windows = dv_DB.T, dk_DB.T", PREFIX),
    ("packed answers see each other", "ops/attention_packed.py",
     "seen_GTS &= jnp.tri(tokens, dtype=bool)[None]",
     "seen_GTS = jnp.tri(tokens, dtype=bool)[None]",
     "attention_packed_test.py::test_samples_see_themselves_and_the_prefix"),
    ("the reference's prefix ends one key early",
     "ops/attention_reference.py",
     "jnp.arange(positions) < prefix_length",
     "jnp.arange(positions) < prefix_length - 1", PREFIX),
    ("stretches are not counted on", "ops/attention_stretches.py",
     "start = start + count * size", "start = start + size",
     "attention_kernels_test.py::TestCudnn::"
     "test_equals_the_reference_for_any_prefix_length[37]"),
    ("late queries stand a row down", "ops/attention_stretches.py",
     "< stripe.offset", "<= stripe.offset",
     _KERNELS + "every_third_key_of_a_segment_as_lower_triangles"),
    ("a query sees the key after it", "ops/tiling.py",
     "seen = key[None, :] <= last[:, None]",
     "seen = key[None, :] <= last[:, None] + 1", TAILS),
    ("a window is one key wider", "ops/tiling.py",
     "query[:, None] - key[None, :] < window",
     "query[:, None] - key[None, :] <= window",
     _WINDOW + "a_window_of_four_shows_four_keys_its_own_included"),
    ("the last tile reads positions twice", "ops/tiling.py",
     "((position >= j * self.size) & (position < length))[None]",
     "(position < length)[None]",
     "tiling_test.py::test_columns_show_every_real_position_once"),
    ("blocks see one token less", "ops/tiling.py",
     "query < self.start, query, self.start + block * self.size - 1",
     "query < self.start, query, self.start + block * self.size - 2",
     "tail_mask_test.py::test_what_a_block_sees_by_hand"),
    ("probabilities are added to the cotangent", "ops/log_probs.py",
     "(hit_NB - probs_NB)", "(hit_NB + probs_NB)",
     _LOG_PROBS + "each_token_has_a_cotangent_of_its_own"),
    ("the temperature multiplies gradients", "ops/log_probs.py",
     "d_logits_NB = (d_logits_NB / divisor)",
     "d_logits_NB = (d_logits_NB * divisor)",
     _LOG_PROBS + "equals_the_reference_for_any_chunk_size"),
    ("the last chunk of ids is left out", "ops/log_probs.py",
     "if vocab_size % chunk:", "if False:",
     _LOG_PROBS + "equals_the_reference_for_any_chunk_size"),
    ("the correction of scores is weighed", "ops/experts.py",
     "score_NE += correction_E.astype(score_NE.dtype)[None]",
     "score_NE -= correction_E.astype(score_NE.dtype)[None]",
     _EXPERTS + "a_correction_moves_the_choice_and_not_the_weight"),
    ("weights of experts are not normalised", "ops/experts.py",
     "if experts.normalised:", "if False:",
     _EXPERTS + "weights_of_a_softmax_by_hand"),
    ("rows come back to other tokens", "ops/experts.py",
     "take(y_RM, rows.back_R)", "take(y_RM, rows.to_R)",
     _EXPERTS + "rows_in_the_order_of_experts_give_the_reference"),
    ("blocks of a group add their neighbours' rows", "ops/grouped_dot.py",
     "jnp.where(mine_N1, block_NA, jnp.zeros((), x_NA.dtype))", "block_NA",
     _EXPERTS + "rows_meet_the_matrix_of_their_group"),
    ("a state decays after it is read", "ops/gated_delta.py",
     "u_GKRE = beta_GKR[..., None] * (v_GKRE - held_GKRE)",
     "u_GKRE = beta_GKR[..., None] * v_GKRE - held_GKRE",
     _DELTA + "steps_equal_the_recurrence"),
    ("systems are solved with the wrong sign", "ops/gated_delta.py",
     "corner = -_matmul", "corner = _matmul",
     _DELTA + "systems_are_inverted"),
    ("the derivative of a solution is not negated", "ops/gated_delta.py",
     "return -_matmul(d_right, solved.swapaxes(-1, -2)), d_right",
     "return _matmul(d_right, solved.swapaxes(-1, -2)), d_right", DELTA),
    ("padding decays a state", "ops/gated_delta.py",
     'for name in ("log_decay_GTKR", "beta_GTKR")',
     'for name in ("beta_GTKR",)', _DELTA + "padding_leaves_no_trace"),
    ("halves turn the other way", "ops/rope.py",
     "first * cos_GTNH - second * sin_GTNH",
     "first * cos_GTNH + second * sin_GTNH",
     _ROPE + "rotation_turns_the_two_halves_by_the_hand_computed_angle"),
    ("linear scaling multiplies", "ops/rope.py",
     "inverse_H / np.float32(scaling.factor)",
     "inverse_H * np.float32(scaling.factor)",
     _ROPE + "linear_scaling_divides_every_frequency"),
    ("YaRN's ramp is upside down", "ops/rope.py",
     "stretched_H * (1 - keep_H) + (1 / power_H) * keep_H",
     "stretched_H * keep_H + (1 / power_H) * (1 - keep_H)",
     _ROPE + "yarn_interpolates_between_its_two_corners"),
    ("a decoding product is transposed", "ops/few_rows.py",
     "w_BA, x_NA, (((1,), (1,)), ((), ()))",
     "w_BA, x_NA[:, ::-1], (((1,), (1,)), ((), ()))",
     "sample_test.py::test_greedy_tokens_are_the_argmax_scored_at_"
     "temperature_one"),
)

MIXERS = faults(
    ("the weight of a chunk is dropped", "mixers/attention.py",
     "popped.scale * places.read(", "places.read(",
     "stacked_sampled_test.py::test_a_learner_draws_the_chunks_of_every_"
     "group_by_its_place"),
    ("what later tokens send to a chunk's values is lost",
     "mixers/attention.py",
     "dk, dv = dk + of_k, dv + of_v", "dk, dv = dk + of_k, dv",
     GRADIENT + "[llama]"),
    ("keys are rotated one slot early", "mixers/attention.py",
     "positions_GT = at.length + at.slots_GT\n",
     "positions_GT = at.length + at.slots_GT - 1\n",
     "sample_test.py::test_tokens_are_the_argmax_of_dense_log_probs_plus_"
     "noise"),
    ("chunks add to what came before", "mixers/delta.py",
     "return total.at[layer].set(new.astype(total.dtype))",
     "return total.at[layer].add(new.astype(total.dtype))",
     GRADIENT + "[delta]"),
    ("chunks continue from the end", "mixers/delta.py",
     "if index is None:", "if True:", GRADIENT + "[delta]"),
    ("latents of a prefix have no values", "mixers/latent.py",
     "return stack, stack", "return stack, 0 * stack",
     GRADIENT + "[latent]"),
    ("latents of every chunk stand at the first", "mixers/latent.py",
     "places.push((stack,), present[:1], chunk)",
     "places.push((stack,), present[:1], chunk._replace(start=0))",
     TOKENS + "[deepseek]"),
    ("what stands before a short chunk is lost", "mixers/window.py",
     "start = slots - jnp.minimum(tokens, slots)", "start = slots",
     POLICIES + "[mistral-recompute-2]"),
    ("a window reaches one position more", "mixers/window.py",
     "lowest_GT = jnp.maximum(positions_GT - self.window + 1, 0)",
     "lowest_GT = jnp.maximum(positions_GT - self.window, 0)",
     TOKENS + "[gemma3]"),
    ("a delta layer's gate is a sigmoid", "models/delta_layers.py",
     "nn.silu(gate_NE)", "nn.sigmoid(gate_NE)",
     "parity_test.py::test_mixers_agree_with_transformers"),
    ("scores have the root of the latent", "models/latent_layers.py",
     "latent.slot / latent.query_dim", "latent.query_dim / latent.slot",
     "mixers_test.py::test_queries_in_the_latent_attend_as_heads_with_keys_"
     "of_their_own"),
    ("the shared expert is not added", "models/expert_layers.py",
     "y_NM += self.shared_down(hidden_NF)",
     "y_NM += 0 * self.shared_down(hidden_NF)",
     "parity_test.py::test_experts_agree_with_transformers[deepseek_v3]"),
    ("the feed-forward's two halves are swapped", "models/layers.py",
     "activation(self.config, gate_NF) * up_NF",
     "activation(self.config, up_NF) * gate_NF",
     "parity_test.py::test_small_models_agree_with_transformers"),
    ("embeddings are not scaled", "models/decoder.py",
     "return x * self.config.embedding_scale", "return x",
     GRADIENT + "[gemma3]"),
)
