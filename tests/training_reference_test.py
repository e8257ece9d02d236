# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of every algorithm against the same ones written down by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.training import algorithms
from branch_replay.training import experience
from branch_replay.training import learner as learner_lib
from branch_replay.training import optimizers
from branch_replay.training import step as step_lib
from tests import by_hand

WIDTH = 8  # T, the bucket of the longest answer
CLIP, DUAL = dict(low=0.1, high=0.25), 1.4
RATES = [1e-4, 3e-4, 2e-4]  # by update
TOLERANCE = 1e-10  # of the distance that a parameter is moved


def batch_of():
  """Two groups: prompts, lengths and rewards all differ."""
  random = np.random.default_rng(5)
  batch = []
  for prompt, lengths, rewards in (
      (11, (5, 1, 3, 7), (1.0, 0.25, 0.0, 0.5)),
      (15, (2, 6, 4, 3), (0.3, 0.3, 2.0, -1.0)),
  ):
    batch.append(by_hand.Answers(
        random.integers(0, 64, prompt),
        [random.integers(0, 64, length).tolist() for length in lengths],
        np.array(rewards),
    ))
  return batch


BATCH = batch_of()
MASK = by_hand.mask_of(BATCH, WIDTH)
REWARDS = np.stack([one.rewards for one in BATCH])


class Constants:
  """Log-probs and values that are settled before the first update."""

  def __init__(self, model, params, reference, temperature):
    read = functools.partial(
        by_hand.read, model, batch=BATCH, width=WIDTH, temperature=temperature
    )
    log_probs, values = (np.array(x) for x in read(params))
    noise = np.random.default_rng(13).normal(size=log_probs.shape)
    self.old = np.where(MASK, log_probs + 0.3 * noise, 50.0)
    self.values = values
    self.reference = np.array(read(reference)[0])


def ratio_loss(log_probs, of: Constants, advantages, reduce, beta=0.0):
  loss = by_hand.surrogate(
      jnp.exp(jnp.where(MASK, log_probs - of.old, 0)), advantages, dual=DUAL,
      **CLIP,
  )
  if beta:
    loss += beta * by_hand.k3(log_probs, of.reference)
  return reduce(loss, MASK)


def grpo(log_probs, _, of):
  advantages = by_hand.group_relative(REWARDS)[..., None]
  return ratio_loss(log_probs, of, advantages, by_hand.sequence_mean, 0.3)


def dr_grpo(log_probs, _, of):
  advantages = by_hand.group_centred(REWARDS)[..., None]
  return ratio_loss(log_probs, of, advantages, by_hand.sequence_sum) / 20


def dapo(log_probs, _, of):
  advantages = by_hand.group_relative(REWARDS)[..., None]
  return ratio_loss(log_probs, of, advantages, by_hand.token_mean)


def gspo(log_probs, _, of):
  advantages = by_hand.group_relative(REWARDS)
  difference = jnp.sum(jnp.where(MASK, log_probs - of.old, 0), -1)
  ratio = jnp.exp(difference / MASK.sum(-1))
  return jnp.mean(by_hand.surrogate(ratio, advantages, dual=DUAL, **CLIP))


def reinforce(log_probs, _, of, *, advantages):
  del of
  loss = -advantages(REWARDS)[..., None] * log_probs
  return by_hand.sequence_sum(loss, MASK)


def ppo(log_probs, values, of):
  advantages, returns = by_hand.gae(
      REWARDS, of.values, MASK, discount=0.97, trace=0.8
  )
  advantages = by_hand.whiten(advantages, MASK)
  near = of.values + jnp.clip(values - of.values, -0.002, 0.002)
  error = jnp.maximum(jnp.square(values - returns), jnp.square(near - returns))
  policy = ratio_loss(log_probs, of, advantages, by_hand.token_mean, 0.2)
  return policy + 0.7 * by_hand.token_mean(error / 2, MASK)


def preferred(log_probs, _, of, *, loss):
  sums = jnp.sum(jnp.where(MASK, log_probs - of.reference, 0), -1)
  margins = [
      sums[n, better] - sums[n, worse]
      for n, one in enumerate(BATCH)
      for better, worse in by_hand.pairs(one.rewards)
  ]
  return jnp.mean(loss(jnp.stack(margins)))


def dpo(margins):
  right = jnp.log(1 / (1 + jnp.exp(-0.5 * margins)))
  wrong = jnp.log(1 / (1 + jnp.exp(0.5 * margins)))
  return -0.9 * right - 0.1 * wrong


def ipo(margins):
  return (margins - 1 / (2 * 0.5)) ** 2


def supervised(log_probs, *_):
  return by_hand.token_mean(-log_probs, MASK)


def objective(like, **changes):
  return dataclasses.replace(
      like, clip_low=CLIP["low"], clip_high=CLIP["high"], dual_clip=DUAL,
      **changes,
  )


ALGORITHMS = {
    "grpo": (
        algorithms.PolicyGradient(
            objective(objectives.grpo(kl_coefficient=0.3))
        ), grpo,
    ),
    "dr grpo": (
        algorithms.PolicyGradient(
            objective(objectives.dr_grpo(max_tokens=20)), "group_centred"
        ), dr_grpo,
    ),
    "dapo": (
        algorithms.PolicyGradient(
            objective(objectives.dapo()), temperature=0.8
        ), dapo,
    ),
    "gspo": (algorithms.PolicyGradient(objective(objectives.gspo())), gspo),
    "ppo": (
        algorithms.ProximalPolicy(
            objective(objectives.ppo(kl_coefficient=0.2)), discount=0.97,
            trace=0.8, value_coefficient=0.7, value_clip=0.002,
            temperature=1.3,
        ), ppo,
    ),
    "dpo": (
        algorithms.Preference(preference.Dpo(0.5, 0.1)),
        functools.partial(preferred, loss=dpo),
    ),
    "ipo": (
        algorithms.Preference(preference.Ipo(0.5)),
        functools.partial(preferred, loss=ipo),
    ),
    "supervised": (algorithms.MaximumLikelihood(), supervised),
} | {
    f"reinforce, {name}": (
        algorithms.PolicyGradient(objectives.reinforce(), name),
        functools.partial(reinforce, advantages=getattr(by_hand, name)),
    )
    for name in ("group_relative", "group_centred", "leave_one_out")
}


def report_by_hand(name, log_probs, values, of: Constants) -> dict:
  """What an update is to say of itself, token by token."""
  log_probs, values = np.asarray(log_probs), np.asarray(values)
  if name == "supervised":
    return {"answer_loss": -log_probs[MASK].mean()}
  if name in ("dpo", "ipo"):
    sums = np.where(MASK, log_probs - of.reference, 0).sum(-1)
    margins = np.array([
        sums[n, better] - sums[n, worse]
        for n, one in enumerate(BATCH)
        for better, worse in by_hand.pairs(one.rewards)
    ])
    return {"margin": margins.mean(), "ordered": np.mean(margins > 0)}
  difference = (log_probs - of.old)[MASK]
  found = {
      "mismatch_mean": np.abs(difference).mean(),
      "mismatch_max": np.abs(difference).max(),
  }
  if name in ("grpo", "ppo"):
    delta = (log_probs - of.reference)[MASK]
    found["kl_reference"] = np.mean(np.exp(-delta) - 1 + delta)
  if name == "ppo":
    advantages, returns = by_hand.gae(
        REWARDS, of.values, MASK, discount=0.97, trace=0.8
    )
    found["value_error"] = np.mean((values - returns)[MASK] ** 2)
    advantages = by_hand.whiten(advantages, MASK)[MASK]
  elif name == "dr grpo":
    advantages = by_hand.group_centred(REWARDS)
  else:
    advantages = by_hand.group_relative(REWARDS)
  if not name.startswith("reinforce"):
    if name == "gspo":
      of_answer = np.where(MASK, log_probs - of.old, 0).sum(-1) / MASK.sum(-1)
      difference = np.broadcast_to(of_answer[..., None], MASK.shape)[MASK]
    if advantages.ndim == 2:
      advantages = np.broadcast_to(advantages[..., None], MASK.shape)[MASK]
    r, up = np.exp(difference), advantages >= 0
    found |= {
        "ratio_mean": r.mean(), "ratio_max": r.max(),
        "clipped_low": np.mean(~up & (r < 1 - CLIP["low"])),
        "clipped_high": np.mean(up & (r > 1 + CLIP["high"])),
        "clipped_dual": np.mean(~up & (r > DUAL)),
        "kl_old": np.mean(r - 1 - np.log(r)),
        "effective_sample_size": r.sum() ** 2 / (r.size * np.sum(r**2)),
    }
  return found


def experiences(model, of: Constants):
  return [
      experience.Experience(
          f"row-{n}",
          br.Group.create(one.prompt, one.tails, config=model.config),
          of.old[n], one.rewards, np.ones(4, bool),
      )
      for n, one in enumerate(BATCH)
  ]


@pytest.mark.exhaustive(but=("grpo", "dpo", "supervised"))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_updates_are_those_written_down_by_hand(x64, name):
  model, params, reference = by_hand.model_in_float64()
  algorithm, loss = ALGORITHMS[name]
  if name == "ppo":
    random = np.random.default_rng(7)
    head = {"kernel": jnp.asarray(0.3 * random.normal(size=32)),
            "bias": jnp.asarray(0.1)}
    params, reference = (x | {"value_head": head} for x in (params, reference))
  temperature = getattr(algorithm, "temperature", 1.0)
  of = Constants(model, params, reference, temperature)
  batch = experiences(model, of)
  mine = learner_lib.Learner(
      model, algorithm,
      optimizers.adamw(
          lambda update: jnp.asarray(RATES)[update], b1=0.8, b2=0.95,
          weight_decay=0.0, clip_norm=0.01,
      ),
  )
  known = mine.know(params, batch, version=0, reference=reference)
  train_state = step_lib.create(
      jax.tree.map(jnp.copy, params), mine.optimizer
  )
  hand = by_hand.AdamW(params, RATES, b1=0.8, b2=0.95, clip=0.01)

  def read(params):
    return by_hand.read(
        model, params, BATCH, width=WIDTH, temperature=temperature
    )

  for number in range(3):
    update = mine.update(
        train_state, batch, known, version=number, key=jax.random.key(0)
    )
    train_state = update.train_state
    wanted = report_by_hand(name, *read(hand.tree), of)
    assert set(update.report) >= set(wanted)
    for what, x in wanted.items():
      np.testing.assert_allclose(
          update.report[what], x, rtol=1e-6, atol=1e-9, err_msg=what
      )
    value, grads = jax.value_and_grad(
        lambda params: loss(*read(params), of)
    )(hand.tree)
    norm = hand.update(grads)
    np.testing.assert_allclose(update.loss, value, rtol=1e-9)
    np.testing.assert_allclose(update.grad_norm, norm, rtol=1e-9)
    assert norm > 0.01, "is clipped"
  assert train_state.step == 3
  by_hand.assert_moved_alike(train_state.params, hand, params, TOLERANCE)
