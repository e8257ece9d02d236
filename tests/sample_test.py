# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling is a pure function of parameters, prompt and key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import branch_replay as br
from branch_replay.engine import prefix
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import unstacked
from branch_replay.rollout.drafters import NGram
from tests import tiny

PROMPT = (7, 2, 60, 33, 2, 9, 14)
LAW = br.Law(0.6)
BRANCHES, TOKENS = 5, 12


def run(
    law=LAW, branches=BRANCHES, tokens=TOKENS, wide=True, seed=3,
    **options,
):
  """A rollout of the tiny model, in float64 if `wide`."""
  config = tiny.in_float64(tiny.BASE) if wide else tiny.BASE
  decoder, params = tiny.model(config)
  with jax.enable_x64(wide):
    return br.sample(
        decoder, params, PROMPT, key=jax.random.key(seed), branches=branches,
        max_tokens=tokens, law=law, **options,
    )


rollout = functools.cache(run)


@functools.cache
def dense_logits(law=LAW, wide=True):
  """[G, T, V] logits that the sampled tokens were drawn from."""
  config = tiny.in_float64(tiny.BASE) if wide else tiny.BASE
  decoder, params = tiny.model(config)
  tokens_GT = rollout(law, wide=wide).tokens
  with jax.enable_x64(wide):
    prompt = jnp.tile(jnp.asarray(PROMPT, jnp.int32), (BRANCHES, 1))
    logits = jax.jit(decoder.apply)(
        {"params": params}, jnp.concatenate([prompt, tokens_GT], axis=1)
    )
  return logits[:, len(PROMPT) - 1 : -1]


def noise(seed=3, branches=BRANCHES, tokens=TOKENS, dtype=jnp.float64):
  """[G, T, V] of the rows and of the positions of sampled tokens."""
  size, key = tiny.BASE.vocab_size, jax.random.key(seed)
  return jax.vmap(
      lambda row: jax.vmap(
          lambda position: law_lib.noise(key, row, position, size, dtype)
      )(len(PROMPT) + jnp.arange(tokens))
  )(jnp.arange(branches))


# What is drawn.


@pytest.mark.parametrize("law", (
    LAW, br.Law(1.0), br.Law(0.7, top_k=5, top_p=0.8),
))
def test_tokens_are_the_argmax_of_dense_log_probs_plus_noise(x64, law):
  scores = jax.nn.log_softmax(dense_logits(law) / law.temperature)
  scores = law_lib.truncate(
      scores.reshape(-1, scores.shape[-1]), law
  ).reshape(scores.shape)
  result = rollout(law)
  np.testing.assert_array_equal(
      result.tokens, jnp.argmax(scores + noise(), axis=-1)
  )
  assert result.lengths.tolist() == [TOKENS] * BRANCHES
  assert not result.finished.any()


def test_float32_tokens_differ_from_the_dense_argmax_only_at_ties():
  scores = jax.nn.log_softmax(dense_logits(wide=False) / 0.6)
  scores = np.asarray(scores + noise(dtype=jnp.float32))
  tokens = np.asarray(rollout(wide=False).tokens)[..., None]
  gap = scores.max(-1) - np.take_along_axis(scores, tokens, axis=-1)[..., 0]
  assert gap.max() < 1e-4
  assert np.count_nonzero(gap) <= 1


def test_a_prompt_of_one_token_leaves_nothing_to_capture():
  decoder, params = tiny.model(tiny.BASE)
  result = br.sample(
      decoder, params, (7,), key=jax.random.key(1), branches=3, max_tokens=5
  )
  assert result.state.capacity == 0
  group = br.Group.create((7,), result.tails(), config=tiny.BASE)
  expected = br.dense_log_probs(decoder, params, group)[:, :5]
  np.testing.assert_allclose(result.log_probs, expected, atol=1e-5)


def test_greedy_tokens_are_the_argmax_scored_at_temperature_one(x64):
  law = br.Law(0.0)
  result = rollout(law)
  logits_GTV = dense_logits(law)
  np.testing.assert_array_equal(result.tokens, jnp.argmax(logits_GTV, axis=-1))
  assert (result.tokens == result.tokens[:1]).all()
  np.testing.assert_allclose(
      result.log_probs, jnp.max(jax.nn.log_softmax(logits_GTV), axis=-1),
      rtol=1e-12,
  )


@pytest.mark.parametrize("temperature, wide, tolerance", (
    (0.6, True, 1e-12), (1.0, True, 1e-12), (0.6, False, 1e-5),
))
def test_log_probs_are_those_the_trainer_replays(temperature, wide, tolerance):
  result = rollout(br.Law(temperature), wide=wide)
  config = tiny.in_float64(tiny.BASE) if wide else tiny.BASE
  decoder, params = tiny.model(config)
  with jax.enable_x64(wide):
    group = br.Group.create(PROMPT, result.tails(), config=config)
    options = dict(temperature=temperature, state=result.state)
    replayed = br.log_probs(decoder, params, group, **options)[:, :TOKENS]
  assert result.log_probs.dtype == config.param_dtype
  np.testing.assert_allclose(
      result.log_probs, replayed, rtol=0, atol=tolerance
  )


def test_log_probs_are_of_the_law_before_truncation(x64):
  law = br.Law(0.7, top_k=5, top_p=0.8)
  log_probs_GTV = jax.nn.log_softmax(dense_logits(law) / 0.7)
  picked = jnp.take_along_axis(
      log_probs_GTV, rollout(law).tokens[..., None], axis=-1
  )
  np.testing.assert_allclose(
      rollout(law).log_probs, picked[..., 0], rtol=1e-10
  )


def test_logits_2_1_0_at_temperature_06_score_the_first_id_minus_0_2026():
  token, log_prob = law_lib.draw(
      br.Law(0.6, top_k=1), jnp.asarray([[2.0, 1.0, 0.0]]), jnp.zeros((1, 3))
  )
  assert token.tolist() == [0]
  np.testing.assert_allclose(log_prob, [-0.202573], atol=1e-6)


# Truncation.


def truncated(logits, **law):
  log_probs_GV = jax.nn.log_softmax(jnp.asarray([logits], jnp.float32))
  return np.asarray(law_lib.truncate(log_probs_GV, br.Law(**law)))[0]


def kept(logits, **law):
  return np.flatnonzero(np.isfinite(truncated(logits, **law))).tolist()


def test_top_p_keeps_the_smallest_set_that_reaches_p():
  """Probabilities 0.665, 0.245, 0.090."""
  logits = [2.0, 1.0, 0.0]
  assert kept(logits, top_p=0.9) == [0, 1]
  mass = np.exp(truncated(logits, top_p=0.9)).sum()
  np.testing.assert_allclose(mass, 0.909969, atol=1e-6)
  assert kept(logits, top_p=0.6) == [0]
  assert kept(logits, top_p=0.67) == [0, 1]
  assert kept(logits, top_p=0.92) == [0, 1, 2]
  assert kept([0.0, 2.0, 1.0], top_p=0.9) == [1, 2]  # in any order
  assert kept(logits, top_p=1e-9) == [0]  # never none


def test_top_k_keeps_k_ids_ties_included():
  assert kept([0.0, 2.0, 1.0, -1.0], top_k=2) == [1, 2]
  assert kept([1.0, 1.0, 1.0], top_k=2) == [0, 1]
  assert kept([2.0, 1.0, 0.0], top_k=7) == [0, 1, 2]


def test_top_k_and_top_p_keep_what_both_keep():
  logits = [2.0, 1.0, 0.0, -1.0]
  assert kept(logits, top_k=3, top_p=0.7) == [0, 1]
  assert kept(logits, top_k=1, top_p=0.99) == [0]


def test_no_truncation_leaves_log_probs_alone():
  scores = jnp.asarray([[-1.0, -2.0]])
  assert law_lib.truncate(scores, br.Law()) is scores


def test_top_p_of_one_keeps_every_id_of_a_large_vocabulary():
  logits = 8 * np.random.default_rng(2).normal(size=50_000)
  assert len(kept(logits, top_p=1.0)) == 50_000


# Where a row ends. A rigged model: some ids have one successor, the last token
# of the prompt has three of equal probability, and after others all are equal.

SUCCESSORS = {
    20: [5, 8, 9], 5: [6], 6: [2], 8: [3], 9: [10], 10: [11], 11: [12],
    12: [13], 13: [14],
}
ROWS = {5: [5, 6, 2], 8: [8, 3], 9: [9, 10, 11, 12, 13, 14]}
RIGGED_PROMPT = (2, 3, 20)


@functools.cache
def rigged():
  """Layers that add nothing, one-hot embeddings, a table of successors."""
  decoder, params = tiny.model(tiny.BASE)
  table_VM = np.zeros((tiny.BASE.vocab_size, tiny.BASE.width), np.float32)
  for token, successors in SUCCESSORS.items():
    table_VM[successors, token] = 20
  return decoder, dict(
      params,
      layers=jax.tree.map(jnp.zeros_like, params["layers"]),
      embed={"table": jnp.eye(*table_VM.shape)},
      final_norm={"scale": jnp.ones(tiny.BASE.width)},
      head={"table": jnp.asarray(table_VM)},
  )


@pytest.mark.exhaustive(but="llama")
@pytest.mark.parametrize(
    "name", ("llama", "hybrid", "window and full", "latent", "expert groups")
)
def test_layers_one_by_one_are_the_layers_of_a_scan(name, x64):
  """With drafts, so that recurrent layers take in a part of a block."""
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  both = [
      br.sample(
          decoder, params, PROMPT, key=jax.random.key(5), branches=2,
          max_tokens=9, layers=layers, drafter=NGram(), draft_length=2,
          compact=False,
      )
      for layers in (None, unstacked.layers(decoder.config, params))
  ]
  np.testing.assert_array_equal(both[0].tokens, both[1].tokens)
  np.testing.assert_allclose(
      both[0].log_probs, both[1].log_probs, rtol=0, atol=1e-11
  )


def test_layers_of_other_parameters_are_an_error():
  decoder, params = tiny.model(tiny.BASE)
  other = jax.tree.map(lambda x: 2 * x, params)
  with pytest.raises(ValueError, match="layers= were made from other"):
    br.sample(
        decoder, params, PROMPT, key=jax.random.key(5), branches=2,
        max_tokens=2, layers=unstacked.layers(decoder.config, other),
    )


@functools.cache
def stopped(max_tokens=6):
  decoder, params = rigged()
  result = br.sample(
      decoder, params, RIGGED_PROMPT, key=jax.random.key(0), branches=12,
      max_tokens=max_tokens, stop_ids=(2, 3),
  )
  assert set(result.tokens[:, 0].tolist()) == {5, 8, 9}, "another key"
  return result


def test_a_row_ends_with_any_stop_id_which_is_counted():
  result = stopped()
  assert result.tails() == [ROWS[int(row[0])] for row in result.tokens]
  for row, length, finished in zip(
      result.tokens.tolist(), result.lengths, result.finished, strict=True
  ):
    expected = ROWS[row[0]]
    assert length == len(expected)
    assert row[len(expected) :] == [0] * (6 - len(expected))
    assert finished == (row[0] != 9)  # which was cut off by the limit
  reasons = {5: br.Finish.STOP, 8: br.Finish.STOP, 9: br.Finish.LENGTH}
  assert result.finish.tolist() == [reasons[int(r[0])] for r in result.tokens]
  assert result.rounds.tolist() == result.lengths.tolist()


def test_masks_of_a_rollout_count_stop_tokens_and_no_padding():
  result = stopped()
  group = br.Group.create(RIGGED_PROMPT, result.tails(), config=tiny.BASE)
  masks = {5: [1, 1, 1, 0, 0, 0], 8: [1, 1, 0, 0, 0, 0], 9: [1] * 6}
  expected = [masks[int(row[0])] for row in result.tokens]
  np.testing.assert_array_equal(group.mask()[:, :6], expected)
  assert not group.mask()[:, 6:].any()
  aborted = br.Group.create(RIGGED_PROMPT, [[5, 6, 7]], config=tiny.BASE)
  assert aborted.mask()[0].tolist() == [True] * 3 + [False] * 5


def test_rows_that_ended_early_score_as_the_trainer_scores_them():
  decoder, params = rigged()
  result = stopped()
  group = br.Group.create(RIGGED_PROMPT, result.tails(), config=tiny.BASE)
  replayed = br.log_probs(decoder, params, group)[:, :6]
  np.testing.assert_allclose(result.log_probs, replayed, atol=1e-5)
  np.testing.assert_allclose(result.log_probs[:, 0], -np.log(3), atol=1e-5)
  assert not result.log_probs[~group.mask()[:, :6]].any()


def test_a_stop_id_on_the_last_token_allowed_finishes_the_row():
  result = stopped(max_tokens=3)
  for row, length, finished in zip(
      result.tokens.tolist(), result.lengths, result.finished, strict=True
  ):
    assert length == {5: 3, 8: 2, 9: 3}[row[0]]
    assert finished == (row[0] in (5, 8))


# What a row does not depend on.


def test_rows_do_not_change_with_the_number_of_branches():
  few, many = rollout(branches=3), rollout()
  np.testing.assert_array_equal(few.tokens, many.tokens[:3])
  np.testing.assert_allclose(few.log_probs, many.log_probs[:3], rtol=1e-12)


def test_rows_do_not_change_with_the_tokens_allowed():
  short, long = rollout(), rollout(tokens=20)
  np.testing.assert_array_equal(short.tokens, long.tokens[:, :TOKENS])
  np.testing.assert_allclose(
      short.log_probs, long.log_probs[:, :TOKENS], rtol=1e-12
  )


def test_rows_do_not_change_with_how_the_prefix_is_captured():
  chunked = rollout(schedule=br.Schedule(chunk_size=4))
  np.testing.assert_array_equal(chunked.tokens, rollout().tokens)


def test_rows_do_not_change_with_a_state_given_and_nothing_is_captured(
    monkeypatch
):
  first = rollout()
  monkeypatch.setattr(prefix, "capture", None)
  again = run(state=first.state)
  np.testing.assert_array_equal(again.tokens, first.tokens)
  np.testing.assert_array_equal(again.log_probs, first.log_probs)


def test_the_same_key_gives_the_same_rows_and_another_key_others():
  first = rollout()
  np.testing.assert_array_equal(run().tokens, first.tokens)
  assert (run(seed=4).tokens != first.tokens).any(axis=1).all()


def test_two_rows_of_one_prompt_are_not_alike():
  rows = [tuple(row) for row in rollout().tokens.tolist()]
  assert len(set(rows)) == BRANCHES


def test_no_two_rows_or_positions_share_their_noise():
  key = jax.random.key(0)
  draws = [
      law_lib.noise(key, row, position, 4, jnp.float32)
      for row in range(4)
      for position in range(4)
  ]
  values = np.concatenate(draws)
  assert len(set(values.tolist())) == values.size


# The law of a token.


def chi_square(probs_V, counts_V):
  expected = counts_V.sum() * probs_V
  return np.sum((counts_V - expected) ** 2 / expected)


def drawn_counts(law, logits_V, rows: int, seed: int):
  """How often each id is drawn by many rows at one position."""
  @jax.jit
  def draw(logits_NV):
    noise_NTV = law_lib.noise_of_rows(
        law, jax.random.key(seed), jnp.arange(rows), jnp.full((rows, 1), 11),
        logits_NV.shape[1], logits_NV.dtype,
    )
    return law_lib.draw(law, logits_NV, noise_NTV[:, 0])

  logits_V = jnp.asarray(logits_V, jnp.float32)
  tokens, _ = draw(jnp.broadcast_to(logits_V, (rows, logits_V.size)))
  return np.bincount(tokens, minlength=logits_V.size)


def test_the_law_of_a_token_is_the_softmax_at_its_temperature():
  """Pearson's test at level 1e-4; the wrong temperature must fail it."""
  rows, vocab = 20_000, 8
  logits_V = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2])
  counts_V = drawn_counts(br.Law(0.8), logits_V, rows, seed=5)
  threshold = stats.chi2.isf(1e-4, vocab - 1)

  def statistic(temperature):
    weights_V = np.exp(logits_V / temperature)
    return chi_square(weights_V / weights_V.sum(), counts_V)

  assert statistic(0.8) < threshold
  assert statistic(1.0) > 10 * threshold
  assert statistic(0.9) > threshold  # the test has power


def test_the_law_of_a_truncated_token_is_the_renormalised_softmax():
  rows, logits_V = 20_000, np.array([2.0, 1.0, 0.0])
  counts_V = drawn_counts(br.Law(top_p=0.9), logits_V, rows, seed=6)
  assert counts_V[2] == 0
  probs_V = np.exp(logits_V[:2]) / np.exp(logits_V[:2]).sum()
  assert chi_square(probs_V, counts_V[:2]) < stats.chi2.isf(1e-4, 1)


# Errors.


def draw(prompt=PROMPT, branches=2, max_tokens=3, params=None, **options):
  decoder, own = tiny.model(tiny.BASE)
  return br.sample(
      decoder, params or own, prompt, key=jax.random.key(0),
      branches=branches, max_tokens=max_tokens, **options,
  )


@pytest.mark.parametrize("options, message", (
    (dict(prompt=()), "[Ee]mpty prompt"),
    (dict(prompt=(1, 64)), "prompt.*vocabulary of 64.*64"),
    (dict(prompt=(1, -3)), "prompt.*-3"),
    (dict(branches=0), "branches must be at least 1, not 0"),
    (dict(max_tokens=0), "max_tokens must be at least 1, not 0"),
    (dict(stop_ids=(2, 64)), "stop ids.*64"),
    (dict(max_tokens=250), "257 positions.*max_positions=256"),
))
def test_what_cannot_be_sampled_is_an_error_that_names_it(options, message):
  with pytest.raises(ValueError, match=message):
    draw(**options)


@pytest.mark.parametrize("options, message", (
    (dict(temperature=-0.5), "temperature.*-0.5"),
    (dict(temperature=float("nan")), "temperature.*nan"),
    (dict(top_k=0), "top_k.*0"),
    (dict(top_p=0.0), "top_p.*0.0"),
    (dict(top_p=1.5), "top_p.*1.5"),
))
def test_a_law_that_is_none_is_an_error_that_names_it(options, message):
  with pytest.raises(ValueError, match=message):
    br.Law(**options)


def test_a_state_of_another_prompt_or_other_parameters_is_an_error():
  decoder, params = tiny.model(tiny.BASE)
  state = br.capture(decoder, params, PROMPT)
  for other in ((*PROMPT[:-2], 5, 14), PROMPT[1:], (*PROMPT, 1)):
    message = f"6 positions of another prompt.*has {len(other) - 1}"
    with pytest.raises(ValueError, match=message):
      draw(prompt=other, state=state)
  moved = jax.tree.map(lambda x: x * 1.001, params)
  with pytest.raises(ValueError, match="other parameters"):
    draw(params=moved, state=state)
  # The last token of the prompt is not part of the prefix.
  draw(prompt=(*PROMPT[:-1], 5), state=state)
