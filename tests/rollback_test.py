# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts for recurrent layers: what is not accepted leaves no trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import state as state_lib
from branch_replay.rollout import decode
from branch_replay.rollout import loop
from branch_replay.rollout import round as round_lib
from branch_replay.rollout.drafters import NGram
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings
from tests import drafters
from tests import tiny

CONFIG = tiny.in_float64(tiny.ARCHITECTURES["hybrid"])
PROMPT = (7, 2, 60, 33, 2, 9, 14)
BRANCHES, TOKENS = 6, 20
STOPS = tuple(range(5))


def run(seed=6, **options):
  decoder, params = tiny.model(CONFIG)
  options = dict(
      branches=BRANCHES, max_tokens=TOKENS, stop_ids=STOPS, compact=False
  ) | options
  with jax.enable_x64(True):
    return br.sample(
        decoder, params, PROMPT, key=jax.random.key(seed), **options
    )


plain = functools.cache(run)


def oracle(right):
  """Knows what a row will be, beyond the stop ids too."""
  right_G = jnp.broadcast_to(jnp.asarray(right, jnp.int32), (BRANCHES,))
  return drafters.Oracle(plain(stop_ids=()).tokens, right_G)


def recurrent(caches):
  """The cache of the delta layers."""
  return caches["periods"]["0"]


def check_near(found, wanted):
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


# A block, and what is taken of it.


@pytest.fixture(scope="module")
def blocks():
  """A block of 5 inputs of 6 rows after 3 others, and a jitted decode.run."""
  with jax.enable_x64(True):
    decoder, params = tiny.model(CONFIG)
    state = br.capture(decoder, params, PROMPT)
    caches = state_lib.caches(CONFIG, state.mixer, BRANCHES, 16)
    tokens_NT = jnp.asarray(
        np.random.default_rng(0).integers(0, 64, (BRANCHES, 8)), jnp.int32
    )
    run_block = jax.jit(decode.run, static_argnums=0)
    settle = jax.jit(decode.settle, static_argnums=0)

    def after(caches, start, tokens_NT, taken_N=None):
      starts_N = jnp.full(BRANCHES, start, jnp.int32)
      _, caches, inputs = run_block(
          decoder, params, state, caches, starts_N, tokens_NT
      )
      if taken_N is None:
        return caches
      return settle(
          decoder, params, caches, inputs, jnp.asarray(taken_N, jnp.int32)
      )

    one_by_one = [caches]
    for at in range(8):
      one_by_one.append(after(one_by_one[-1], at, tokens_NT[:, at : at + 1]))
    return after, tokens_NT, one_by_one


def test_taking_some_inputs_of_a_block_is_never_having_seen_the_others(
    x64, blocks
):
  after, tokens_NT, one_by_one = blocks
  taken = np.array([0, 1, 2, 3, 4, 5])
  found = recurrent(after(one_by_one[3], 3, tokens_NT[:, 3:], taken))
  for row, count in enumerate(taken):
    wanted = recurrent(one_by_one[3 + count])
    check_near(
        (x[:, :, row] for x in found), (x[:, :, row] for x in wanted)
    )
  # A block of no use leaves the cache as it was, to the last bit.
  for one, other in zip(found, recurrent(one_by_one[3]), strict=True):
    np.testing.assert_array_equal(one[:, :, 0], other[:, :, 0])


def test_what_is_not_taken_may_be_anything(x64, blocks):
  after, tokens_NT, one_by_one = blocks
  taken = np.array([0, 1, 2, 3, 4, 5])
  beyond = np.arange(5)[None] >= taken[:, None]
  other_NT = jnp.where(beyond, (tokens_NT[:, 3:] + 11) % 64, tokens_NT[:, 3:])
  assert (other_NT != tokens_NT[:, 3:]).sum() == beyond.sum()
  found, wanted = (
      recurrent(after(one_by_one[3], 3, x, taken))
      for x in (tokens_NT[:, 3:], other_NT)
  )
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(one, other)


def test_the_rest_of_a_block_can_follow_it(x64, blocks):
  """Two blocks of which two inputs each are taken are four inputs."""
  after, tokens_NT, one_by_one = blocks
  two = np.full(BRANCHES, 2)
  caches = after(one_by_one[0], 0, tokens_NT[:, :5], two)
  caches = after(caches, 2, tokens_NT[:, 2:7], two)
  check_near(recurrent(caches), recurrent(one_by_one[4]))


# Rounds.


def test_rounds_with_drafts_and_without_leave_the_state_of_plain_decoding(x64):
  """Of 3, 0, 7 and 1 drafts every row accepts a number of its own."""
  right = np.array([0, 2, 3, 1, 7, 5])
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
  step = jax.jit(decode.run, static_argnums=0)
  at, seen = rows.cache, []
  for place in range(TOKENS):
    starts_N = jnp.full(BRANCHES, place, jnp.int32)
    seen.append(recurrent(at))
    _, at, _ = step(
        decoder, params, state, at, starts_N, past_GT[:, place : place + 1]
    )
  advance = jax.jit(round_lib.advance, static_argnums=0)
  lengths = np.zeros(BRANCHES, int)
  for drafts in (3, 0, 7, 1):
    answers, rows = advance(
        RoundSettings(decoder, br.Law(), drafts), inputs, drafter, answers, rows
    )
    lengths += np.minimum(right, drafts) + 1
    np.testing.assert_array_equal(answers.lengths, lengths)
    for row, length in enumerate(lengths):
      check_near(
          (x[:, :, row] for x in recurrent(rows.cache)),
          (x[:, :, row] for x in seen[length]),
      )


def test_the_plain_rollout_is_one_that_can_go_wrong():
  finish = plain().finish.tolist()
  assert set(finish) == {br.Finish.STOP, br.Finish.LENGTH}
  assert len(set(plain().lengths.tolist())) >= 4


@pytest.mark.exhaustive(but=("Random", "NGram", "make2", "make3", "make4"))
@pytest.mark.parametrize("make, length, compact", (
    (NGram, 2, False),
    (drafters.Random, 3, False),
    (functools.partial(drafters.Random, 3), 3, False),
    (functools.partial(oracle, 100), 5, False),
    (functools.partial(oracle, (0, 2, 4, 1, 3, 4)), 4, False),
    (functools.partial(oracle, (6, 0, 2, 5, 1, 3)),
     {6: 6, 4: 0, 2: 1, 1: 3}, True),
))
def test_a_rollout_does_not_change_with_its_drafter(
    x64, make, length, compact
):
  drafter, wanted = make(), plain()
  result = run(drafter=drafter, draft_length=length, compact=compact)
  np.testing.assert_array_equal(result.tokens, wanted.tokens)
  np.testing.assert_array_equal(result.lengths, wanted.lengths)
  np.testing.assert_array_equal(result.finish, wanted.finish)
  np.testing.assert_allclose(
      result.log_probs, wanted.log_probs, rtol=0, atol=1e-12
  )
  if isinstance(drafter, drafters.Oracle):
    assert (result.accepted > 0).sum() >= 3


def test_the_trainer_replays_what_was_drafted(x64):
  result = run(drafter=oracle(2), draft_length=3)
  decoder, params = tiny.model(CONFIG)
  group = br.Group.create(PROMPT, result.tails(), config=CONFIG)
  replayed_GT = br.log_probs(
      decoder, params, group, state=result.state, prefix_gradient="stop"
  )
  width = group.tails.shape[1]
  np.testing.assert_allclose(
      np.pad(result.log_probs, ((0, 0), (0, width)))[:, :width], replayed_GT,
      rtol=0, atol=1e-12,
  )
