# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of precision: what is narrowed to bfloat16 and should not be.

Most of them change nothing on CPU unless XLA is told to round as it is told,
which bfloat16_test.py does.
"""

from tests.mutants.fault import faults

_DIGITS = "bfloat16_test.py::test_digits[{}]"

PRECISION = faults(
    (
        "logits of the model, fault 1",
        "models/decoder.py",
        "        preferred_element_type=dtype,\n    )\n\n  def hidden",
        "        preferred_element_type=hidden_GTM.dtype,\n    ).astype(dtype)"
        "\n\n  def hidden",
        _DIGITS.format("logits_of_the_model"),
    ),
    (
        "logits of decoding, fault 1",
        "ops/few_rows.py",
        "      preferred_element_type=config_lib.at_least_float32(x_NA.dtype),"
        "\n",
        "      preferred_element_type=x_NA.dtype,\n",
        _DIGITS.format("logits_of_decoding"),
    ),
    (
        "log probs in chunks, fault 1",
        "ops/log_probs.py",
        "      table_BM,\n      (((1,), (1,)), ((), ())),\n      "
        "preferred_element_type=dtype,\n  )\n",
        "      table_BM,\n      (((1,), (1,)), ((), ())),\n      "
        "preferred_element_type=hidden_NM.dtype,\n  ).astype(dtype)\n",
        _DIGITS.format("log_probs_in_chunks"),
    ),
    (
        "log probs in chunks, fault 2",
        "ops/log_probs.py",
        "  lse_N = checkpoint_name(top_N + jnp.log(total_N), LOG_SUM_EXP)",
        "  lse_N = checkpoint_name(top_N + jnp.log(total_N), LOG_SUM_EXP)\n  "
        "lse_N = lse_N.astype(hidden_NM.dtype).astype(dtype)",
        _DIGITS.format("log_probs_in_chunks"),
    ),
    (
        "log probs in chunks, fault 3",
        "ops/log_probs.py",
        "    return new_top_N, total_N, jnp.where(here_N",
        "    total_N = total_N.astype(hidden_NM.dtype).astype(dtype)\n    "
        "return new_top_N, total_N, jnp.where(here_N",
        _DIGITS.format("log_probs_in_chunks"),
    ),
    (
        "log probs pulled back to hidden states, fault 1",
        "ops/log_probs.py",
        "    d_hidden_NM += jnp.dot(",
        "    d_hidden_NM = d_hidden_NM.astype(hidden_NM.dtype).astype(dtype)\n"
        "    d_hidden_NM += jnp.dot(",
        _DIGITS.format("log_probs_pulled_back_to_hidden_states"),
    ),
    (
        "log probs pulled back near certainty, fault 1",
        "ops/log_probs.py",
        "    probs_NB = jnp.exp(logits_NB - lse_N[:, None])",
        "    probs_NB = jnp.exp((logits_NB - lse_N[:, "
        "None]).astype(hidden_NM.dtype))",
        _DIGITS.format("log_probs_pulled_back_near_certainty"),
    ),
    (
        "log probs pulled back to the table, fault 1",
        "ops/log_probs.py",
        "        (((0,), (0,)), ((), ())),\n        "
        "preferred_element_type=dtype,\n",
        "        (((0,), (0,)), ((), ())),\n        "
        "preferred_element_type=hidden_NM.dtype,\n",
        _DIGITS.format("log_probs_pulled_back_to_the_table"),
    ),
    (
        "log probs of the reference, fault 1",
        "ops/log_probs.py",
        "      table_VM[:vocab_size].astype(hidden_NM.dtype),\n      "
        "preferred_element_type=dtype,",
        "      table_VM[:vocab_size].astype(hidden_NM.dtype),\n      "
        "preferred_element_type=hidden_NM.dtype,",
        _DIGITS.format("log_probs_of_the_reference"),
    ),
    (
        "values of states, fault 1",
        "training/actor_critic.py",
        "    values_N = hidden_NM.astype(dtype) @ "
        "head[\"kernel\"].astype(dtype)",
        "    values_N = hidden_NM @ head[\"kernel\"].astype(hidden_NM.dtype)",
        _DIGITS.format("values_of_states"),
    ),
    (
        "scales of norms, fault 1",
        "models/layers.py",
        "    return (normed * scale).astype(x.dtype)",
        "    return normed.astype(x.dtype) * scale.astype(x.dtype)",
        _DIGITS.format("scales_of_norms"),
    ),
    (
        "biases, fault 1",
        "models/layers.py",
        "    y_NB = (y_NB.astype(wide) + b_B.astype(wide)[None]).astype(dtype)",
        "    y_NB += b_B.astype(dtype)[None]",
        _DIGITS.format("biases"),
    ),
    (
        "factors of adapters, fault 1",
        "models/layers.py",
        "      y_NB = y_NB.astype(wide) + adapter.alpha / adapter.rank * "
        "more_NB",
        "      y_NB += adapter.alpha / adapter.rank * more_NB.astype(dtype)",
        _DIGITS.format("factors_of_adapters"),
    ),
    (
        "angles far out, fault 1",
        "ops/rope.py",
        "  angle_GTH = angles(positions_GT, inverse_H, dtype)",
        "  angle_GTH = positions_GT[..., None].astype(dtype) * inverse_H[None,"
        " None]",
        _DIGITS.format("angles_far_out"),
    ),
    (
        "angles far out, fault 2",
        "ops/rope.py",
        "  angle_GTH = angles(positions_GT, inverse_H, dtype)",
        "  angle_GTH = angles(positions_GT, inverse_H, "
        "dtype).astype(x_GTND.dtype)",
        _DIGITS.format("angles_far_out"),
    ),
    (
        "factors of latent scores, fault 1",
        "models/latent_layers.py",
        "    q = (q.astype(wide) * factor).astype(q.dtype)",
        "    q = q.astype(q.dtype) * factor",
        _DIGITS.format("factors_of_latent_scores"),
    ),
    (
        "logits of the router, fault 1",
        "models/expert_layers.py",
        "    return x_NM.astype(wide) @ kernel_ME.astype(wide), correction_E",
        "    logits_NE = x_NM @ kernel_ME.astype(x_NM.dtype)\n    return "
        "logits_NE.astype(wide), correction_E",
        _DIGITS.format("logits_of_the_router"),
    ),
    (
        "scores of the router, fault 1",
        "ops/experts.py",
        "  return jax.nn.softmax(logits_NE)",
        "  return "
        "jax.nn.softmax(logits_NE.astype(jnp.bfloat16)).astype(logits_NE.dtype)",
        _DIGITS.format("scores_of_the_router"),
    ),
    (
        "scores of the router, fault 2",
        "ops/experts.py",
        "    return jax.nn.sigmoid(logits_NE)",
        "    return "
        "jax.nn.sigmoid(logits_NE.astype(jnp.bfloat16)).astype(logits_NE.dtype)",
        _DIGITS.format("scores_of_the_router"),
    ),
    (
        "weights of experts, fault 1",
        "ops/experts.py",
        "    taken_Nk /= taken_Nk.sum(axis=1, keepdims=True) + 1e-20",
        "    taken_Nk /= taken_Nk.astype(jnp.bfloat16).sum(axis=1, "
        "keepdims=True) + 1e-20",
        _DIGITS.format("weights_of_experts"),
    ),
    (
        "choices between near experts, fault 1",
        "ops/experts.py",
        "  score_NE = scores(experts, logits_NE)\n  if correction",
        "  score_NE = scores(experts, logits_NE).astype(jnp.bfloat16)\n  if "
        "correction",
        _DIGITS.format("choices_between_near_experts"),
    ),
    (
        "outputs of experts weighted, fault 1",
        "models/expert_layers.py",
        "  return (x_RF.astype(factor_R1.dtype) * "
        "factor_R1).astype(x_RF.dtype)",
        "  return x_RF * factor_R1.astype(x_RF.dtype)",
        _DIGITS.format("outputs_of_experts_weighted"),
    ),
    (
        "sums over experts, fault 1",
        "ops/experts.py",
        "  return take(y_RM, rows.back_R).reshape(tokens, -1, "
        "y_RM.shape[1]).sum(axis=1)",
        "  each = take(y_RM, rows.back_R).reshape(tokens, -1, y_RM.shape[1])\n"
        "  return sum(each[:, j] for j in range(each.shape[1]))",
        _DIGITS.format("sums_over_experts"),
    ),
    (
        "log sum exps of attention, fault 1",
        "ops/attention/loops.py",
        "  return lax.dot_general(a, b, axes, preferred_element_type=dtype)",
        "  return lax.dot_general(a, b, axes).astype(dtype)",
        _DIGITS.format("log_sum_exps_of_attention"),
    ),
    (
        "outputs of attention, fault 1",
        "ops/attention/loops.py",
        "  return lax.dot_general(a, b, axes, preferred_element_type=dtype)",
        "  return lax.dot_general(a, b, axes).astype(dtype)",
        _DIGITS.format("outputs_of_attention"),
    ),
    (
        "log sum exps of attention, fault 2",
        "ops/attention/loops.py",
        "  probs = jnp.exp(scores - shift_N[:, None])\n",
        "  probs = jnp.exp((scores - shift_N[:, "
        "None]).astype(q_ND.dtype)).astype(dtype)\n",
        _DIGITS.format("log_sum_exps_of_attention"),
    ),
    (
        "outputs of attention with equal keys, fault 1",
        "ops/attention/loops.py",
        "      total_N * decay_N + sums_N,",
        "      (total_N * decay_N + sums_N).astype(q_ND.dtype).astype(dtype),",
        _DIGITS.format("outputs_of_attention_with_equal_keys"),
    ),
    (
        "outputs of attention, fault 2",
        "ops/attention/loops.py",
        "      weighted_ND * decay_N[:, None]\n",
        "      (weighted_ND * decay_N[:, "
        "None]).astype(q_ND.dtype).astype(dtype)\n",
        _DIGITS.format("outputs_of_attention"),
    ),
    (
        "merges of attention, fault 1",
        "ops/attention/loops.py",
        "  a, b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)",
        "  a, b = (jnp.exp((x - top).astype(jnp.bfloat16)).astype(x.dtype) for"
        " x in (lse_a, lse_b))",
        _DIGITS.format("merges_of_attention"),
    ),
    (
        "log sum exps of attention, fault 3",
        "ops/attention/op.py",
        "        out_p.reshape(out.shape), lse_p.reshape(lse.shape), out, lse"
        "\n    )\n  if lengths_G",
        "        "
        "out_p.reshape(out.shape).astype(q_KGRTD.dtype).astype(out.dtype), "
        "lse_p.reshape(lse.shape).astype(q_KGRTD.dtype).astype(lse.dtype), "
        "out, lse\n    )\n  if lengths_G",
        _DIGITS.format("log_sum_exps_of_attention"),
    ),
    (
        "outputs of decoding, fault 1",
        "ops/attention/loops.py",
        "        \"kgrtd,kgbd->kgrtb\", q_KGRTD, k_KGBD, "
        "preferred_element_type=dtype",
        "        \"kgrtd,kgbd->kgrtb\", q_KGRTD, k_KGBD",
        _DIGITS.format("outputs_of_decoding"),
    ),
    (
        "outputs of decoding, fault 2",
        "ops/attention/loops.py",
        "    more = jnp.einsum(\n        \"kgrtb,kgbd->kgrtd\", "
        "probs.astype(v_KGBD.dtype), v_KGBD,\n        "
        "preferred_element_type=dtype,\n    )",
        "    probs = probs.astype(v_KGBD.dtype)\n    more = "
        "jnp.einsum(\"kgrtb,kgbd->kgrtd\", probs, v_KGBD)",
        _DIGITS.format("outputs_of_decoding"),
    ),
    (
        "outputs of packed attention, fault 1",
        "ops/attention/packed.py",
        "      \"kgrtd,kgsd->kgrts\", q_KGRTD, k_KGTD, "
        "preferred_element_type=dtype",
        "      \"kgrtd,kgsd->kgrts\", q_KGRTD, k_KGTD",
        _DIGITS.format("outputs_of_packed_attention"),
    ),
    (
        "attention pulled back to queries, fault 1",
        "ops/attention/loops.py",
        "  scores = _dot(q_ND, k_BD, (1, 1), dtype) * scale\n",
        "  scores = _dot(q_ND, k_BD, (1, 1), q_ND.dtype).astype(dtype) * scale"
        "\n",
        _DIGITS.format("attention_pulled_back_to_queries"),
    ),
    (
        "attention pulled back to keys and values, fault 1",
        "ops/attention/loops.py",
        "  probs = jnp.where(seen, jnp.exp(scores - lse_N[:, None]), 0)\n",
        "  probs = jnp.where(seen, jnp.exp((scores - lse_N[:, "
        "None]).astype(q_ND.dtype)), 0).astype(dtype)\n",
        _DIGITS.format("attention_pulled_back_to_keys_and_values"),
    ),
    (
        "attention pulled back to keys and values, fault 2",
        "ops/attention/loops.py",
        "  d_probs = _dot(d_out_ND, v_BD, (1, 1), dtype)\n",
        "  d_probs = _dot(d_out_ND, v_BD, (1, 1), q_ND.dtype).astype(dtype)\n",
        _DIGITS.format("attention_pulled_back_to_keys_and_values"),
    ),
    (
        "attention pulled back to keys and values, fault 3",
        "ops/attention/op.py",
        "  delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)",
        "  delta = jnp.sum(d_out.astype(wide) * out.astype(wide), "
        "axis=-1).astype(d_out.dtype).astype(wide)",
        _DIGITS.format("attention_pulled_back_to_keys_and_values"),
    ),
    (
        "cotangents of the prefix over many rows, fault 1",
        "ops/attention/loops.py",
        "      return dq_KND, dk_DB + dk, dv_DB + dv\n\n    def tile_in",
        "      return dq_KND, dk_DB + dk, (dv_DB + "
        "dv).astype(q_KND.dtype).astype(dtype)\n\n    def tile_in",
        _DIGITS.format("cotangents_of_the_prefix_over_many_rows"),
    ),
    (
        "attention pulled back to keys and values, fault 4",
        "ops/attention/loops.py",
        "      return dq, dk_DB + dk_tile, dv_DB + dv_tile",
        "      return dq, (dk_DB + "
        "dk_tile).astype(q_KGRTD.dtype).astype(dtype), (dv_DB + "
        "dv_tile).astype(q_KGRTD.dtype).astype(dtype)",
        _DIGITS.format("attention_pulled_back_to_keys_and_values"),
    ),
    (
        "delta states by blocks, fault 1",
        "ops/gated_delta.py",
        "    return matrix_GKRDE, out_GKRBE\n",
        "    return matrix_GKRDE.astype(jnp.bfloat16).astype(jnp.float32), "
        "out_GKRBE\n",
        _DIGITS.format("delta_states_by_blocks"),
    ),
    (
        "delta outputs by blocks, fault 1",
        "ops/gated_delta.py",
        "  wide = config_lib.at_least_float32(seen_GTKX.dtype)\n",
        "  wide = seen_GTKX.dtype\n",
        _DIGITS.format("delta_outputs_by_blocks"),
    ),
    (
        "delta outputs by blocks, fault 2",
        "ops/gated_delta.py",
        "      seen_GTKX[:, at : at + tokens].astype(wide) * filter_KXW[\n"
        "          None, None, ..., at\n      ]\n",
        "      (seen_GTKX[:, at : at + tokens] * filter_KXW[None, None, ..., "
        "at].astype(seen_GTKX.dtype)).astype(wide)\n",
        _DIGITS.format("delta_outputs_by_blocks"),
    ),
    (
        "delta states by blocks, fault 2",
        "ops/gated_delta.py",
        "  total_NGKRB = jnp.cumsum(log_decay, axis=-1)",
        "  total_NGKRB = jnp.cumsum(log_decay.astype(jnp.bfloat16), "
        "axis=-1).astype(log_decay.dtype)",
        _DIGITS.format("delta_states_by_blocks"),
    ),
    (
        "delta states by blocks, fault 3",
        "ops/gated_delta.py",
        "  solved = _solve(system, jnp",
        "  system = system.astype(jnp.bfloat16).astype(system.dtype)\n  solved"
        " = _solve(system, jnp",
        _DIGITS.format("delta_states_by_blocks"),
    ),
    (
        "delta states by steps, fault 1",
        "ops/gated_delta.py",
        "  out_GKRE = jnp.einsum(\"gkrde,gkd->gkre\", matrix_GKRDE, q_GKD)\n",
        "  matrix_GKRDE = "
        "matrix_GKRDE.astype(jnp.bfloat16).astype(jnp.float32)\n  out_GKRE = "
        "jnp.einsum(\"gkrde,gkd->gkre\", matrix_GKRDE, q_GKD)\n",
        _DIGITS.format("delta_states_by_steps"),
    ),
    (
        "gradients of 64 equal tails, fault 1",
        "engine/spec.py",
        "      lambda x: jnp.zeros(x.shape, "
        "config_lib.at_least_float32(x.dtype)),\n      params,",
        "      lambda x: jnp.zeros(x.shape, x.dtype),\n      params,",
        _DIGITS.format("gradients_of_64_equal_tails"),
    ),
    (
        "gradients of 64 equal tails, fault 2",
        "engine/state.py",
        "  dtype = dtype or config_lib.at_least_float32(config.compute_dtype)",
        "  dtype = dtype or config.compute_dtype",
        _DIGITS.format("gradients_of_64_equal_tails"),
    ),
    (
        "gradients of 64 equal tails, fault 3",
        "mixers/delta.py",
        "    wide = config_lib.at_least_float32(self.config.compute_dtype)\n"
        "    return self._left(count, sizes.devices, wide, wide)",
        "    wide = self.config.compute_dtype\n"
        "    return self._left(count, sizes.devices, wide, wide)",
        _DIGITS.format("gradients_of_64_equal_tails"),
    ),
    (
        "log probs of drawn tokens, fault 1",
        "rollout/law.py",
        "  tempered_NV = logits_NV / (law.temperature or 1.0)",
        "  tempered_NV = logits_NV.astype(jnp.bfloat16) / (law.temperature or "
        "1.0)",
        _DIGITS.format("log_probs_of_drawn_tokens"),
    ),
    (
        "entropies, fault 1",
        "rl/divergences.py",
        "  logits_NV = "
        "logits_NV.astype(config_lib.at_least_float32(logits_NV.dtype))\n",
        "",
        _DIGITS.format("entropies"),
    ),
    (
        "delta states by reference, fault 1",
        "ops/gated_delta_reference.py",
        "    matrix_GKRDE = matrix_GKRDE * decay_GKR[..., None, None]",
        "    matrix_GKRDE = (matrix_GKRDE * decay_GKR[..., None, "
        "None]).astype(dtype).astype(wide)",
        _DIGITS.format("delta_states_by_reference"),
    ),
    (
        "log probs pulled back to hidden states, fault 2",
        "ops/log_probs.py",
        "    d_hidden_NM += jnp.dot(\n        d_logits_NB,\n        table_BM,"
        "\n        preferred_element_type=dtype,\n    )",
        "    d_hidden_NM += jnp.dot(d_logits_NB, table_BM)",
        _DIGITS.format("log_probs_pulled_back_to_hidden_states"),
    ),
    (
        "gradients of 64 equal tails, fault 4",
        "engine/steps.py",
        "lambda total, new: total + new.astype(total.dtype), of_outer",
        "lambda total, new: (total + new.astype(total.dtype)).astype("
        "jnp.bfloat16).astype(total.dtype), of_outer",
        _DIGITS.format("gradients_of_64_equal_tails"),
    ),
    (
        "attention pulled back to queries, fault 2",
        "ops/attention/loops.py",
        "  d_scores = probs * (d_probs - delta_N[:, None]) * scale\n",
        "  d_scores = (probs * (d_probs - delta_N[:, "
        "None]).astype(q_ND.dtype)) * scale\n",
        _DIGITS.format("attention_pulled_back_to_queries"),
    ),
    (
        "outputs of experts of the reference, fault 1",
        "ops/experts_reference.py",
        "  y_NM = jnp.einsum(\"nem,ne->nm\", out_NEM.astype(dtype), "
        "weights_NE)",
        "  y_NM = jnp.einsum(\"nem,ne->nm\", out_NEM, "
        "weights_NE.astype(x_NM.dtype))",
        _DIGITS.format("outputs_of_experts_of_the_reference"),
    ),
    (
        "turns of rotary angles, fault 1",
        "ops/rope.py",
        "  angle_GTH = angles(positions_GT, inverse_H, dtype)",
        "  angle_GTH = positions_GT[..., None].astype(dtype) * inverse_H[None,"
        " None]",
        "rope_test.py::"
        "test_cos_and_sin_are_exact_at_any_position_up_to_four_million",
    ),
    (
        "cos and sin of far positions, fault 1",
        "ops/rope.py",
        "  high_GTH -= jnp.where(at_GT1 < 0, low_11H, np.uint32(0))\n",
        "",
        "rope_test.py::"
        "test_cos_and_sin_are_exact_at_any_position_up_to_four_million",
    ),
    (
        "cos and sin of far positions, fault 2",
        "ops/rope.py",
        "high_GTH = word_GT1 * high_11H + _high_word(word_GT1, low_11H)",
        "high_GTH = word_GT1 * high_11H",
        "rope_test.py::"
        "test_cos_and_sin_are_exact_at_any_position_up_to_four_million",
    ),
    (
        "frequencies of float64, fault 1",
        "ops/rope.py",
        "  second = low_a * high_b + (first & _LOW_HALF)",
        "  second = low_a * high_b",
        "rope_test.py::"
        "test_float64_uses_the_same_frequencies_with_more_digits",
    ),
    (
        "rotary frequencies, fault 1",
        "ops/rope.py",
        "  power_H = (base ** "
        "exponent_H.astype(np.float64)).astype(np.float32)",
        "  power_H = (base ** (np.arange(0, head_dim, 2) / "
        "head_dim)).astype(np.float32)",
        "parity_test.py::test_rope_frequencies_agree_with_transformers",
    ),
    (
        "rotary frequencies, fault 2",
        "ops/rope.py",
        "  wavelength_H = (1 / inverse_H) * (2 * math.pi)",
        "  wavelength_H = 2 * math.pi / inverse_H",
        "parity_test.py::test_rope_frequencies_agree_with_transformers",
    ),
    (
        "scales of norms in float32, fault 1",
        "models/layers.py",
        "    scale = (1 + scale if self.from_one else scale) * factor",
        "    scale = (1 + scale) * factor",
        "norms_test.py::test_scales_next_to_1_count_in_bfloat16",
    ),
    (
        "scales of norms in float32, fault 2",
        "models/layers.py",
        "    return (normed * scale).astype(x.dtype)",
        "    return normed.astype(x.dtype) * scale.astype(x.dtype)",
        "norms_test.py::test_scales_next_to_1_count_in_bfloat16",
    ),
    (
        "the divisor of scores, fault 1",
        "models/layers.py",
        "(q_GTND, config.query_factor)",
        "(q_GTND)",
        "norms_test.py::test_scores_are_divided_by_the_root_of_their_divisor",
    ),
)
