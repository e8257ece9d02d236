# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The law of what is emitted, with a drafter of another law.

Pearson's test at level 1e-4 on n draws; three rules of acceptance that are
wrong must fail the same test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import branch_replay as br
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import round as round_lib

ROWS = 60_000
P = np.array([0.5, 0.3, 0.15, 0.05])  # the model's
Q = np.array([0.1, 0.6, 0.2, 0.1])  # the drafter's
# The model's next law, after each token: rows differ from P and each other.
NEXT = np.array([
    [0.12, 0.19, 0.29, 0.4], [0.64, 0.16, 0.12, 0.08],
    [0.25, 0.25, 0.25, 0.25], [0.03, 0.09, 0.59, 0.29],
])


def rejected(counts, probs) -> bool:
  """Whether counts are not those of the law, at level 1e-4."""
  counts, probs = counts.ravel(), probs.ravel()
  if counts[probs == 0].any():
    return True
  counts, probs = counts[probs > 0], probs[probs > 0]
  expected = counts.sum() * probs
  statistic = np.sum((counts - expected) ** 2 / expected)
  return statistic > stats.chi2.isf(1e-4, probs.size - 1)


def law_of(probs, law: br.Law):
  """The law of a token under temperature and truncation, by hand."""
  tempered = probs ** (1 / law.temperature)
  tempered /= tempered.sum()
  if law.top_p is not None:
    order = np.argsort(-tempered)
    before = np.cumsum(tempered[order]) - tempered[order]
    tempered[order[before >= law.top_p]] = 0
  return tempered / tempered.sum()


def draw(law, probs_NV, noise_NV):
  logits_NV = jnp.log(jnp.asarray(probs_NV, jnp.float32))
  return law_lib.draw(law, logits_NV, noise_NV)[0]


@functools.partial(jax.jit, static_argnums=0)
def two_tokens(law, key):
  """The first two tokens of every row, one draft a round: coupled.

  The draft is drawn from Q with the noise of its place. If it holds the block
  gives the second token too; else the next round draws it.
  """
  rows_N = jnp.arange(ROWS)
  places_NT = jnp.broadcast_to(jnp.arange(2)[None], (ROWS, 2))
  noise_NTV = law_lib.noise_of_rows(law, key, rows_N, places_NT, 4, jnp.float32)
  wide = functools.partial(jnp.broadcast_to, shape=(ROWS, 4))
  draft_N = draw(law, wide(Q[None]), noise_NTV[:, 0])
  after_draft_NV = jnp.asarray(NEXT)[draft_N]
  first_N = draw(law, wide(P[None]), noise_NTV[:, 0])
  second_N = draw(law, after_draft_NV, noise_NTV[:, 1])
  block_NT = jnp.stack([first_N, second_N], axis=1)
  accepted_N = round_lib.accept(draft_N[:, None], block_NT)
  again_N = draw(law, jnp.asarray(NEXT)[first_N], noise_NTV[:, 1])
  return first_N, jnp.where(accepted_N == 1, second_N, again_N), accepted_N


@pytest.mark.parametrize("law", (
    br.Law(), br.Law(0.7), br.Law(1.0, top_p=0.9), br.Law(0.7, top_p=0.9),
))
def test_the_law_of_two_tokens_is_the_model_s(law):
  first_N, second_N, accepted_N = two_tokens(law, jax.random.key(2))
  counts = np.zeros((4, 4))
  np.add.at(counts, (np.asarray(first_N), np.asarray(second_N)), 1)
  wanted = np.stack([
      p * law_of(row, law) for p, row in zip(law_of(P, law), NEXT, strict=True)
  ])
  assert not rejected(counts, wanted)
  # Of tokens whose first draft held, and of those whose did not.
  for held in (0, 1):
    part = np.zeros((4, 4))
    chosen = np.asarray(accepted_N) == held
    np.add.at(
        part, (np.asarray(first_N)[chosen], np.asarray(second_N)[chosen]), 1
    )
    given_first = part.sum(axis=1, keepdims=True) * wanted / wanted.sum(
        axis=1, keepdims=True
    ).clip(1e-30)
    assert not rejected(part, given_first / part.sum())
  # A wrong temperature, or no truncation, is seen.
  other = br.Law(law.temperature + 0.1, top_p=law.top_p)
  assert rejected(counts.sum(axis=1), law_of(P, other))
  if law.top_p is not None:
    assert rejected(counts.sum(axis=1), law_of(P, br.Law(law.temperature)))


def test_shared_noise_accepts_more_than_noise_of_one_s_own():
  """And no more than the largest overlap of the two laws."""
  law, key = br.Law(), jax.random.key(3)
  accepted = float(np.mean(two_tokens(law, key)[2]))
  assert accepted <= np.minimum(P, Q).sum() + 0.01
  assert accepted > 1.3 * np.sum(P * Q)


# Rules of acceptance that are wrong.


def uniform_and_noise(seed):
  keys = jax.random.split(jax.random.key(seed), 3)
  uniform_N = jax.random.uniform(keys[0], (ROWS,))
  return uniform_N, *(jax.random.gumbel(key, (ROWS, 4)) for key in keys[1:])


def drafted(probs, noise_NV):
  return jnp.argmax(jnp.log(probs)[None] + noise_NV, axis=1)


def greedy_draft_judged_as_a_random_one():
  """The draft is the mode of Q, the test is that of a draw from Q."""
  uniform_N, noise_NV, _ = uniform_and_noise(0)
  draft_N = jnp.full(ROWS, np.argmax(Q))
  rest = np.maximum(P - Q, 0)
  other_N = drafted(rest / rest.sum(), noise_NV)
  return jnp.where(uniform_N < (P / Q)[draft_N], draft_N, other_N)


def redrawn_from_the_model_itself():
  """After a rejection from P, instead of from what Q leaves of it."""
  uniform_N, noise_NV, other_NV = uniform_and_noise(1)
  draft_N = drafted(Q, noise_NV)
  return jnp.where(
      uniform_N < (P / Q)[draft_N], draft_N, drafted(P, other_NV)
  )


def redrawn_with_the_draft_s_noise():
  """The redraw is not independent of what was rejected."""
  uniform_N, noise_NV, _ = uniform_and_noise(2)
  draft_N = drafted(Q, noise_NV)
  return jnp.where(
      uniform_N < (P / Q)[draft_N], draft_N, drafted(P, noise_NV)
  )


@pytest.mark.parametrize("rule", (
    greedy_draft_judged_as_a_random_one, redrawn_from_the_model_itself,
    redrawn_with_the_draft_s_noise,
))
def test_wrong_rules_are_seen(rule):
  counts = np.bincount(rule(), minlength=4)
  assert rejected(counts, P)


def test_the_wrong_rules_have_the_laws_they_are_known_to_have():
  counts = np.bincount(greedy_draft_judged_as_a_random_one(), minlength=4)
  assert not rejected(counts, np.array([0.5, 0.5, 0, 0]))
  counts = np.bincount(redrawn_from_the_model_itself(), minlength=4)
  overlap = np.minimum(P, Q)
  assert not rejected(counts, overlap + (1 - overlap.sum()) * P)
