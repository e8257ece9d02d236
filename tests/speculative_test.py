# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""No draft, however good or bad, changes a rollout: token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.mixers import places
from branch_replay.rollout import decode
from branch_replay.rollout import loop
from branch_replay.rollout import round as round_lib
from branch_replay.rollout.drafters import Model
from branch_replay.rollout.drafters import NGram
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from tests import drafters
from tests import tiny

CONFIG = tiny.in_float64(tiny.BASE)
PROMPT = (7, 2, 60, 33, 2, 9, 14)
BRANCHES, TOKENS = 6, 20
STOPS = tuple(range(5))


def run(wide=True, seed=6, **options):
  decoder, params = tiny.model(CONFIG if wide else tiny.BASE)
  options = dict(
      branches=BRANCHES, max_tokens=TOKENS, stop_ids=STOPS, compact=False
  ) | options
  with jax.enable_x64(wide):
    return br.sample(
        decoder, params, PROMPT, key=jax.random.key(seed), **options
    )


plain = functools.cache(run)


def oracle(right=100):
  right_G = jnp.broadcast_to(jnp.asarray(right, jnp.int32), (BRANCHES,))
  return drafters.Oracle(plain().tokens, right_G)


def itself(config=CONFIG):
  """The model as its own drafter."""
  decoder, params = tiny.model(config)
  return Model(params, br.capture(decoder, params, PROMPT), decoder)


def smaller():
  return itself(tiny.in_float64(tiny.ARCHITECTURES["one layer"]))


def check_same(result, wanted, tolerance=1e-12):
  np.testing.assert_array_equal(result.tokens, wanted.tokens)
  np.testing.assert_array_equal(result.lengths, wanted.lengths)
  np.testing.assert_array_equal(result.finish, wanted.finish)
  np.testing.assert_allclose(
      result.log_probs, wanted.log_probs, rtol=0, atol=tolerance
  )


# Rollouts with a drafter and without.


def test_the_plain_rollout_is_one_that_can_go_wrong():
  """Rows end at different places, by a stop id and by the limit."""
  finish = plain().finish.tolist()
  assert set(finish) == {br.Finish.STOP, br.Finish.LENGTH}
  assert len(set(plain().lengths.tolist())) >= 4
  assert plain().drafted.tolist() == [0] * BRANCHES
  np.testing.assert_array_equal(plain().accept_lengths, 1)


@pytest.mark.exhaustive(but=("make", "Random", "oracle", "NGram"))
@pytest.mark.parametrize("make, length, compact", (
    (drafters.Random, 3, False),
    (functools.partial(drafters.Random, 3), 3, False),
    (functools.partial(drafters.Constant, 10**6), 3, False),  # no such id
    (functools.partial(drafters.Constant, -1), 3, False),
    (NGram, 1, False),
    (NGram, 3, False),
    (itself, 3, True),
    (smaller, 7, False),
    (oracle, 7, False),
    (functools.partial(oracle, (0, 2, 4, 1, 3, 4)), 4, False),
))
def test_a_rollout_does_not_change_with_its_drafter(
    x64, make, length, compact
):
  result = run(drafter=make(), draft_length=length, compact=compact)
  check_same(result, plain())
  np.testing.assert_array_equal(result.drafted, length * result.rounds)
  # A round gives what it accepts and one token more, but where a row ends
  # inside of what it accepts.
  short = result.rounds + result.accepted - result.lengths
  assert set(short.tolist()) <= {0, 1}


def test_a_rollout_does_not_change_with_draft_lengths_by_bucket(x64):
  lengths = {6: 3, 4: 0, 2: 7, 1: 1}
  result = run(drafter=itself(), draft_length=lengths, compact=True)
  check_same(result, plain())
  reached = result.work.rounds > 0
  assert reached.sum() >= 3, "another key"
  assert result.work.draft_lengths.tolist() == [3, 0, 7, 1]
  # Drafts went on after the buckets that had none.
  wholly = (result.accepted + result.rounds)[result.lengths == TOKENS]
  assert (wholly >= TOKENS).all()


def test_a_drafter_with_draft_length_zero_is_the_plain_rollout():
  check_same(run(drafter=oracle(), draft_length=0), plain(), tolerance=0)


def test_all_drafts_that_hold_are_taken_up_to_the_row_s_end(x64):
  """So a stop id or the limit inside a block ends the row there."""
  drafter = drafters.Oracle(  # goes on beyond the stop ids
      plain(stop_ids=()).tokens, jnp.full(BRANCHES, 7)
  )
  result = run(drafter=drafter, draft_length=7)
  check_same(result, plain())
  lengths = np.asarray(plain().lengths)
  np.testing.assert_array_equal(result.rounds, -(-lengths // 8))
  assert (lengths % 8).any(), "no row ended inside a block"
  whole, rest = lengths // 8, lengths % 8
  np.testing.assert_array_equal(result.accepted, 7 * whole + rest)


def test_greedy_and_truncated_rollouts_do_not_change_either(x64):
  for law in (br.Law(0.0), br.Law(0.7, top_k=20, top_p=0.9)):
    options = dict(law=law, max_tokens=8)
    result = run(drafter=itself(), draft_length=1, **options)
    check_same(result, run(**options))
    np.testing.assert_array_equal(result.rounds, -(-result.lengths // 2))


# Rows that accept different numbers of drafts.


def test_rows_of_a_batch_are_rolled_back_each_by_its_own_length(x64):
  """Of 4 drafts 0, 2, 4, …: what is cached is the row's own past."""
  right = np.array([0, 2, 4, 1, 3, 4])
  wanted = plain(stop_ids=())
  decoder, params = tiny.model(CONFIG)
  state = br.capture(decoder, params, PROMPT)
  inputs = RolloutInputs(
      params, state, jnp.int32(PROMPT[-1]), jax.random.key(6),
      jnp.zeros(0, jnp.int32), jnp.int32(TOKENS),
  )
  drafter = drafters.Oracle(wanted.tokens, jnp.asarray(right))
  answers, rows = loop.start(decoder, inputs, drafter, BRANCHES, TOKENS)
  past_GT = jnp.pad(
      wanted.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=PROMPT[-1]
  )
  _, past, _ = jax.jit(decode.run, static_argnums=0)(
      decoder, params, state, rows.cache, jnp.zeros(BRANCHES, jnp.int32),
      past_GT,
  )
  advance = jax.jit(round_lib.advance, static_argnums=0)
  for count in (1, 2, 3):
    answers, rows = advance(
        RoundSettings(decoder, br.Law(), 4), inputs, drafter, answers, rows
    )
    lengths = count * (right + 1)
    np.testing.assert_array_equal(answers.lengths, lengths)
    np.testing.assert_array_equal(answers.accepted, count * right)
    for row, length in enumerate(lengths):
      for held, whole in zip(rows.cache, past, strict=True):
        np.testing.assert_allclose(
            held[:, :, row, :length], whole[:, :, row, :length], rtol=0,
            atol=1e-12,
        )


def test_the_model_itself_is_always_right_for_fifty_rounds(x64):
  tokens = 50 * 4
  result = run(
      drafter=itself(), draft_length=3, branches=3, max_tokens=tokens,
      stop_ids=(),
  )
  assert result.rounds.tolist() == [50] * 3
  np.testing.assert_array_equal(result.accepted, result.drafted)
  np.testing.assert_array_equal(result.accept_lengths, 4)
  assert result.work.rounds.tolist() == [50]
  assert result.work.tokens.tolist() == [3 * tokens]


def test_inputs_past_the_room_of_a_cache_are_dropped():
  old = tuple(jnp.ones((2, 1, 2, 4, 3)) for _ in range(2))
  new_T = jnp.asarray([7.0, 8.0, 9.0])[None, None, :, None]
  new = tuple(jnp.broadcast_to(new_T, (1, 2, 3, 3)) for _ in range(2))
  slots_NT = decode.slots(jnp.asarray([3, 0]), 3)
  for cache in places.write_cache(old, 1, slots_NT, new):
    np.testing.assert_array_equal(cache[0], 1)
    np.testing.assert_array_equal(cache[1, 0, :, :, 0], [
        [1, 1, 1, 7], [7, 8, 9, 1],
    ])


# The pieces of a round.


def test_drafts_are_accepted_up_to_the_first_that_is_wrong():
  tokens_NT = jnp.asarray([[4, 5, 6, 7]] * 4)
  draft_Nk = jnp.asarray([[4, 5, 6], [4, 0, 6], [0, 5, 6], [4, 5, 7]])
  assert round_lib.accept(draft_Nk, tokens_NT).tolist() == [3, 1, 0, 2]
  assert round_lib.accept(draft_Nk[:, :0], tokens_NT).tolist() == [0] * 4


@pytest.mark.parametrize("tokens, held, length, emitted, finish", (
    ([5, 6, 7], 3, 0, 3, "RUNNING"),
    ([5, 6, 7], 2, 0, 2, "RUNNING"),
    ([5, 2, 7], 3, 0, 2, "STOP"),
    ([5, 2, 3], 3, 0, 2, "STOP"),  # the first of two
    ([5, 6, 3], 2, 0, 2, "RUNNING"),  # a stop that does not hold
    ([5, 6, 3], 3, 0, 3, "STOP"),
    ([5, 6, 7], 3, 8, 2, "LENGTH"),
    ([5, 6, 7], 2, 8, 2, "LENGTH"),
    ([5, 6, 7], 1, 8, 1, "RUNNING"),
    ([5, 2, 7], 3, 8, 2, "STOP"),  # on the last token allowed
    ([5, 6, 2], 3, 8, 2, "LENGTH"),  # a stop beyond the limit
    ([2, 6, 7], 1, 9, 1, "STOP"),
))
def test_where_a_row_ends(tokens, held, length, emitted, finish):
  inputs = RolloutInputs(
      None, None, None, None, jnp.asarray([2, 3]), jnp.int32(10)
  )
  emitted_N, finish_N = round_lib.end(
      jnp.asarray([tokens]), jnp.asarray([held]), jnp.asarray([length]), inputs
  )
  assert (emitted_N.tolist(), finish_N.tolist()) == (
      [emitted], [br.Finish[finish]]
  )


# Compilations, numbers, errors.


def test_one_loop_is_compiled_for_each_bucket_and_draft_length():
  options = dict(branches=3, compact=True, drafter=NGram(2))
  before = loop.rounds._cache_size()
  first = run(draft_length=2, **options)
  again = run(draft_length=2, seed=8, **options)
  other = run(draft_length={3: 0, 2: 1, 1: 2}, **options)
  reached = {
      (size, length)
      for work in (first.work, again.work, other.work)
      for size, length, rounds in zip(
          work.buckets.tolist(), work.draft_lengths.tolist(), work.rounds,
          strict=True,
      ) if rounds
  }
  assert {(3, 2), (3, 0)} < reached
  assert loop.rounds._cache_size() - before == len(reached)


def test_float32_log_probs_are_the_model_s_and_the_trainer_s():
  result = run(wide=False, drafter=itself(tiny.BASE), draft_length=3)
  assert (result.accept_lengths > 2).any()
  decoder, params = tiny.model(tiny.BASE)
  group = br.Group.create(PROMPT, result.tails(), config=tiny.BASE)
  replayed_GT = br.log_probs(decoder, params, group, state=result.state)
  width = group.tails.shape[1]
  np.testing.assert_allclose(
      np.pad(result.log_probs, ((0, 0), (0, width)))[:, :width], replayed_GT,
      rtol=0, atol=1e-5,
  )


@pytest.mark.parametrize("options, message", (
    (dict(draft_length=2), "{6: 2}.*without a drafter"),
    (dict(draft_length=-1, drafter=NGram()), "at least 0.*-1"),
    (
        dict(draft_length={6: 1, 2: 1}, compact=True, drafter=NGram()),
        r"buckets \[4, 1\]",
    ),
    (dict(draft_length={4: 1}, drafter=NGram()), r"buckets \[6\]"),
))
def test_draft_lengths_that_do_not_fit_are_an_error(options, message):
  with pytest.raises(ValueError, match=message):
    run(wide=False, **options)


def test_a_drafter_of_another_vocabulary_or_prompt_is_an_error():
  decoder, params = tiny.model(tiny.BASE)
  other = Model(params, br.capture(decoder, params, PROMPT[1:]), decoder)
  with pytest.raises(ValueError, match="holds another prompt"):
    run(wide=False, drafter=other, draft_length=1)
  config = br.ModelConfig(65, 8, 1, 1, 1, 8, 8, 64)
  small, params = tiny.model(config)
  other = Model(params, br.capture(small, params, PROMPT), small)
  with pytest.raises(ValueError, match="vocabulary of 65 is not.*64"):
    run(wide=False, drafter=other, draft_length=1)
