# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The learned drafter: what it sees, what it is trained on, what it drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import readout as readout_lib
from branch_replay.engine import state as state_lib
from branch_replay.rollout import loop
from branch_replay.rollout import round as round_lib
from branch_replay.rollout.drafters import Learned
from branch_replay.rollout.drafters import learned_loss
from branch_replay.rollout.drafters import vocabulary
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from tests import drafters
from tests import sample_test
from tests import speculative_test
from tests import tiny

CONFIG, PROMPT = speculative_test.CONFIG, speculative_test.PROMPT
HALF = range(0, 64, 2)


def drafter(ids=HALF, config=CONFIG):
  decoder, params = tiny.model(config)
  return Learned.create(decoder, params, ids, jax.random.key(4))


# Rollouts.


def test_a_rollout_does_not_change_with_a_learned_drafter(x64):
  """Three drafts a round from half of the vocabulary."""
  result = speculative_test.run(drafter=drafter(), draft_length=3)
  speculative_test.check_same(result, speculative_test.plain())


@pytest.mark.exhaustive
def test_a_prompt_of_one_token_leaves_it_nothing_to_attend_to():
  config = tiny.ARCHITECTURES["one layer"]
  decoder, params = tiny.model(config)
  options = dict(key=jax.random.key(1), branches=1, max_tokens=6)
  plain = br.sample(decoder, params, (7,), **options)
  result = br.sample(
      decoder, params, (7,), drafter=drafter(config=config),
      draft_length=2, **options,
  )
  np.testing.assert_array_equal(result.tokens, plain.tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ("window and full", "expert groups"))
def test_a_model_whose_layers_differ_has_none(name):
  with pytest.raises(ValueError, match="this model's differ"):
    drafter(config=tiny.ARCHITECTURES[name])


@pytest.mark.exhaustive
def test_no_temporary_of_a_round_grows_with_the_prompt():
  """The captured prefix is read in place, by the model and by the drafter."""
  decoder, params = tiny.model(tiny.BASE)
  made = drafter(config=tiny.BASE)

  def temporaries(positions):
    state = state_lib.empty(tiny.BASE, positions)
    inputs = RolloutInputs(
        params, state, jnp.int32(1), jax.random.key(0),
        jnp.zeros(0, jnp.int32), jnp.int32(8),
    )
    answers, rows = loop.start(decoder, inputs, made, 2, 8)
    compiled = loop.rounds.lower(
        RoundSettings(decoder, br.Law(), 2), inputs, made, answers, rows,
        np.int32(0),
    ).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(50_000) == temporaries(5_000)


def test_after_an_update_of_the_model_it_goes_on_with_the_new_head(x64):
  """The same drafter; what it shares with the model is not its own copy."""
  decoder, params = tiny.model(CONFIG)
  updated = params | {
      "head": {"table": params["head"]["table"][::-1]},
      "embed": {"table": 1.1 * params["embed"]["table"]},
  }
  options = dict(
      key=jax.random.key(6), branches=6, max_tokens=20, compact=False,
      stop_ids=speculative_test.STOPS,
  )
  plain = br.sample(decoder, updated, PROMPT, **options)
  result = br.sample(
      decoder, updated, PROMPT, drafter=drafter(), draft_length=3, **options
  )
  speculative_test.check_same(result, plain)
  assert not np.array_equal(plain.tokens, speculative_test.plain().tokens)


@pytest.mark.exhaustive
def test_a_drafter_that_predicts_the_hidden_state_is_always_right():
  """In a model of no layers that is the embedding of the token of the item.

  So a pair map that passes the embedding on makes the drafter exact: an
  alignment that is off by one, noise of another place, or a map to other ids
  would not be. Only the first draft of a row is blind.
  """
  decoder, params = sample_test.rigged()
  width = tiny.BASE.width
  made = Learned.create(decoder, params, range(64), jax.random.key(0))
  kernel = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)])
  made = made.with_params(
      made.params | {"pair": {"kernel": kernel}}, range(64)
  )
  options = dict(
      key=jax.random.key(0), branches=5, max_tokens=29, stop_ids=(2, 3)
  )
  prompt = sample_test.RIGGED_PROMPT
  plain = br.sample(decoder, params, prompt, compact=False, **options)
  assert len(set(plain.lengths.tolist())) > 2, "another key"
  speculative = dict(options, draft_length=4)
  result = br.sample(decoder, params, prompt, drafter=made, **speculative)
  np.testing.assert_array_equal(result.tokens, plain.tokens)
  assert np.count_nonzero(result.work.rounds) > 1  # rows were compacted
  # In the first round, and in the last one past the row's end.
  assert int((result.drafted - result.accepted).max()) <= 4 + 4
  assert (result.rounds <= 1 + -(-(plain.lengths - 1) // 5)).all()
  # With ids that cannot be drafted fewer are accepted, and none changes.
  known = [id_ for id_ in range(64) if id_ not in (10, 12)]
  less = Learned(made.params, jnp.asarray(known, jnp.int32))
  fewer = br.sample(
      decoder, params, prompt, drafter=less, compact=False, **speculative
  )
  np.testing.assert_array_equal(fewer.tokens, plain.tokens)
  assert fewer.rounds.sum() > result.rounds.sum()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Told:
  """A learned drafter whose proposals are replaced by those of an oracle."""

  learned: Learned
  oracle: drafters.Oracle

  def init(self, *args):
    return self.learned.init(*args)

  def propose(self, settings, memory, view):
    _, memory = self.learned.propose(settings, memory, view)
    return self.oracle.propose(settings, (), view)[0], memory

  def observe(self, *args):
    return self.learned.observe(*args)


@pytest.mark.exhaustive
def test_what_it_remembers_and_drafts_is_what_it_is_trained_to_predict(x64):
  """Rounds that accept some drafts, against one packed pass over the rows."""
  decoder, params = tiny.model(CONFIG)
  made = Told(drafter(), speculative_test.oracle((0, 2, 3, 1, 3, 0)))
  state = br.capture(decoder, params, PROMPT)
  inputs = RolloutInputs(
      params, state, jnp.int32(PROMPT[-1]), jax.random.key(6),
      jnp.zeros(0, jnp.int32), jnp.int32(20),
  )
  answers, rows = loop.start(decoder, inputs, made, 6, 20)
  advance = jax.jit(round_lib.advance, static_argnums=0)
  for _ in range(3):
    answers, rows = advance(
        RoundSettings(decoder, br.Law(), 3), inputs, made, answers, rows
    )
  assert answers.lengths.tolist()[:2] == [3, 9]
  lengths = np.asarray(answers.lengths)
  # Trained on what a readout of `replay` gives.
  group = br.Group.create(PROMPT, np.asarray(answers.tokens), config=CONFIG)
  hidden_GTM = br.replay(
      decoder, params, group, state=state, readout=readout_lib.Hidden(),
      prefix_gradient="stop",
  )[:, :20]
  predict = jax.jit(lambda *arrays: learned_loss.predict(
      made.learned.params, decoder, params, learned_loss.PackedAnswers(
          *arrays, jnp.ones((6, 20), jnp.int32)
      ), state=state,
  ))
  row, tokens_GT = np.arange(6), answers.tokens
  predicted_GM = predict(hidden_GTM, tokens_GT)[row, lengths - 1]
  np.testing.assert_allclose(
      rows.memory.hidden_NM, predicted_GM, rtol=0, atol=1e-12
  )

  # What it would draft next: the same pass, with predictions in place of what
  # is not known yet.
  view = round_lib.look(
      RoundSettings(decoder, br.Law(), 3), inputs, answers, rows.ids_N
  )
  draft_Nk, _ = jax.jit(made.learned.propose, static_argnums=0)(
      RoundSettings(decoder, br.Law(), 3), rows.memory, view
  )
  table_UM = params["head"]["table"][::2]
  for place in range(3):
    scores_GU = jax.nn.log_softmax(predicted_GM @ table_UM.T)
    scores_GU += view.noise_NTV[:, place, ::2]
    token_G = 2 * jnp.argmax(scores_GU, axis=1).astype(jnp.int32)
    np.testing.assert_array_equal(draft_Nk[:, place], token_G)
    hidden_GTM = hidden_GTM.at[row, lengths + place].set(predicted_GM)
    tokens_GT = tokens_GT.at[row, lengths + place].set(token_G)
    predicted_GM = predict(hidden_GTM, tokens_GT)[row, lengths + place]


# Its loss.


LENGTHS = 5, 3, 4
PACKED = ((0, slice(0, 5)), (0, slice(5, 8)), (1, slice(0, 4)))
ALONE = tuple((row, slice(0, n)) for row, n in enumerate(LENGTHS))


def batch(places, shape):
  """Three answers at their places: hidden states, tokens, segments."""
  rng = np.random.default_rng(0)
  hidden = np.zeros((*shape, CONFIG.width))
  tokens, segments = np.zeros((2, *shape), np.int32)
  for one, (row, at) in enumerate(places):
    hidden[row, at] = rng.normal(size=(LENGTHS[one], CONFIG.width))
    tokens[row, at] = rng.integers(0, 64, LENGTHS[one])
    segments[row, at] = one + 1
  return hidden, tokens, segments


@functools.partial(jax.jit, static_argnames="model")
def scores(drafter_params, vocabulary_U, model, params, *arrays, **options):
  return learned_loss.losses(
      drafter_params, vocabulary_U, model, params,
      learned_loss.PackedAnswers(*arrays), **options
  )


def score(made, hidden, tokens, segments, **options):
  decoder, params = tiny.model(CONFIG)
  return scores(
      made.params, made.vocabulary, decoder, params, jnp.asarray(hidden),
      jnp.asarray(tokens, jnp.int32), jnp.asarray(segments, jnp.int32),
      **options,
  )


@pytest.mark.exhaustive
def test_packed_answers_score_as_answers_alone(x64):
  decoder, params = tiny.model(CONFIG)
  state, made = br.capture(decoder, params, PROMPT), drafter()
  packed, alone = batch(PACKED, (2, 9)), batch(ALONE, (3, 5))
  losses_NT, weights_NT = score(made, *packed, state=state)
  of_one, weights = score(made, *alone, state=state)
  assert weights.sum() > 3
  for (row, at), (other, there) in zip(PACKED, ALONE, strict=True):
    np.testing.assert_allclose(
        losses_NT[row, at], of_one[other, there], rtol=0, atol=1e-12
    )
    np.testing.assert_array_equal(
        weights_NT[row, at], weights[other, there]
    )

  @jax.jit
  def gradient(drafter_params, arrays):
    return jax.grad(lambda p: jnp.sum(learned_loss.losses(
        p, made.vocabulary, decoder, params,
        learned_loss.PackedAnswers(*arrays), state=state
    )[0]))(drafter_params)

  grads, wanted = (gradient(made.params, x) for x in (packed, alone))
  assert tiny.worst(grads, wanted) <= 1e-11
  for leaf in jax.tree.leaves(grads):
    assert jnp.isfinite(leaf).all() and leaf.any()


def test_the_prompt_counts(x64):
  decoder, params = tiny.model(CONFIG)
  state, made = br.capture(decoder, params, PROMPT), drafter()
  arrays = batch(PACKED, (2, 9))
  with_prompt, _ = score(made, *arrays, state=state)
  without, weights = score(made, *arrays)
  np.testing.assert_array_equal(with_prompt != without, weights)


def test_which_items_count(x64):
  """Those with a next token, in the same answer and in the vocabulary."""
  hidden = np.zeros((1, 6, CONFIG.width))
  losses, weights = score(
      drafter(), hidden, [[1, 2, 3, 4, 6, 8]], [[1, 1, 1, 2, 2, 0]]
  )
  assert weights.tolist() == [[1, 0, 0, 1, 0, 0]]
  np.testing.assert_array_equal(losses != 0, weights)


def test_item_t_reads_what_comes_before_and_the_next_hidden_state(x64):
  rng = np.random.default_rng(1)
  hidden = rng.normal(size=(1, 6, CONFIG.width))
  tokens = np.asarray([[2, 4, 6, 8, 10, 12]])
  made, ones = drafter(), np.ones((1, 6), np.int32)
  before, _ = score(made, hidden, tokens, ones)
  for at in range(6):
    moved = hidden.copy()
    moved[0, at] += 0.1
    after, _ = score(made, moved, tokens, ones)
    # hidden[t + 1] is predicted, and tokens[t] stands beside hidden[t].
    np.testing.assert_array_equal(
        np.flatnonzero(before[0] != after[0]), np.arange(max(at - 1, 0), 5)
    )
    other = tokens.copy()
    other[0, at] = 20
    after, _ = score(made, hidden, other, ones)
    np.testing.assert_array_equal(
        np.flatnonzero(before[0] != after[0]), np.arange(at, 5)
    )


def test_the_loss_is_a_divergence_of_laws_and_a_regression(x64):
  """Of what the tokens' own loss would be in the mean, over all draws."""
  decoder, params = tiny.model(CONFIG)
  made = drafter()
  hidden = np.random.default_rng(1).normal(size=(1, 2, CONFIG.width))
  tokens, ones = jnp.asarray([[5, 6]]), jnp.ones((1, 2), jnp.int32)
  losses, _ = score(
      made, hidden, tokens, ones, temperature=0.7, regression=0.3
  )
  predicted_M = learned_loss.predict(
      made.params, decoder, params,
      learned_loss.PackedAnswers(jnp.asarray(hidden), tokens, ones),
  )[0, 0]
  table_UM, target_M = params["head"]["table"][::2], hidden[0, 1]
  mine_U = jax.nn.softmax(table_UM @ predicted_M / 0.7)
  model_U = jax.nn.softmax(table_UM @ target_M / 0.7)
  wanted = sum(
      float(p) * np.log(float(p) / float(q))
      for p, q in zip(model_U, mine_U, strict=True)
  )
  wanted += 0.3 * np.sum((predicted_M - target_M) ** 2) / (target_M @ target_M)
  np.testing.assert_allclose(losses[0], [wanted, 0], rtol=1e-12)


@pytest.mark.exhaustive
def test_a_drafter_that_is_always_right_has_nothing_to_learn(x64):
  """As above: in a model of no layers it passes the embedding on."""
  decoder, params = sample_test.rigged()
  width = tiny.BASE.width
  made = Learned.create(decoder, params, range(64), jax.random.key(0))
  kernel = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)])
  group = br.Group.create(
      sample_test.RIGGED_PROMPT, [[9, 4, 7, 5]], config=decoder.config
  )
  hidden_GTM = br.replay(
      decoder, params, group, readout=readout_lib.Hidden()
  )
  ones = (jnp.arange(group.tails.shape[1]) < 4).astype(jnp.int32)[None]

  def loss(kernel):
    losses_NT, weights_NT = learned_loss.losses(
        made.params | {"pair": {"kernel": kernel}}, made.vocabulary, decoder,
        params, learned_loss.PackedAnswers(hidden_GTM, group.tails, ones),
    )
    assert weights_NT.sum() == 3
    return jnp.sum(losses_NT)

  assert loss(kernel) < 1e-9
  assert loss(1.1 * kernel[::-1]) > 0.1


def test_nothing_it_learns_reaches_the_model(x64):
  decoder, params = tiny.model(CONFIG)
  made, (hidden, tokens, segments) = drafter(), batch(PACKED, (2, 9))
  state = br.capture(decoder, params, PROMPT)

  @jax.jit
  @jax.grad
  def gradient(constants):
    params, hidden_NTM, mixer = constants
    losses_NT, _ = learned_loss.losses(
        made.params, made.vocabulary, decoder, params,
        learned_loss.PackedAnswers(hidden_NTM, tokens, segments),
        state=dataclasses.replace(state, mixer=mixer),
    )
    return jnp.sum(losses_NT)

  constants = params, jnp.asarray(hidden), state.mixer
  for leaf in jax.tree.leaves(gradient(constants)):
    assert not leaf.any()


# Its vocabulary.


def test_the_most_frequent_ids_are_kept_and_the_lowest_fill_up():
  seen = [9, 9, 9, 5, 5, 30, 7, 40, 3]
  assert vocabulary.most_frequent(seen, 2, 64).tolist() == [5, 9]
  assert vocabulary.most_frequent(seen, 8, 64).tolist() == [
      0, 1, 3, 5, 7, 9, 30, 40,
  ]
  assert vocabulary.most_frequent([], 3, 64).tolist() == [0, 1, 2]


def test_parameters_of_another_vocabulary_are_refused():
  made = drafter(config=tiny.BASE)
  again = made.with_params(made.params, list(HALF))
  np.testing.assert_array_equal(again.vocabulary, HALF)
  with pytest.raises(ValueError, match="same size: 32 of 32.*index 0 0.*1"):
    made.with_params(made.params, range(1, 64, 2))
  with pytest.raises(ValueError, match="of 32 ids.*for 31"):
    made.with_params(made.params, list(HALF)[1:])


@pytest.mark.parametrize("ids", ([], [3, 2], [2, 2], [-1, 2], [2, 64]))
def test_what_is_no_vocabulary_is_refused(ids):
  with pytest.raises(ValueError, match="ascending order, below 64"):
    drafter(ids, tiny.BASE)


def test_sizes_and_ids_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match="size=65"):
    vocabulary.most_frequent([1], 65, 64)
  with pytest.raises(ValueError, match="from 1 to 64"):
    vocabulary.most_frequent([1, 64], 3, 64)


@pytest.mark.exhaustive
def test_a_drafter_of_another_width_is_refused():
  config = br.ModelConfig(64, 16, 1, 1, 1, 8, 8, 64)
  with pytest.raises(ValueError, match="width 16, this one has 32"):
    speculative_test.run(
        wide=False, drafter=drafter(config=config), draft_length=1
    )
