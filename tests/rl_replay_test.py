# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The losses under branch replay: no split and no device shows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.ops import log_probs as log_probs_lib
from branch_replay.rl import advantages
from branch_replay.rl import divergences
from branch_replay.rl import metrics
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.rl import reductions
from branch_replay.rl import surrogates
from tests import tiny

CONFIG = tiny.in_float64(tiny.BASE)
TOLERANCE = 1e-11
LENGTHS = (5, 1, 3, 7, 0, 2, 6, 4)


def near(log_probs_GT, scale, seed):
  """Log-probs of another policy, close enough that some ratios are clipped."""
  noise_GT = np.random.default_rng(seed).normal(size=log_probs_GT.shape)
  return log_probs_GT + scale * jnp.asarray(noise_GT, log_probs_GT.dtype)


@pytest.mark.exhaustive(but="gspo")
@pytest.mark.parametrize(
    "objective,splits",
    [
        (objectives.grpo(), ((8, 1), (4, 8), (1, 1))),
        (objectives.gspo(clip_low=0.1, clip_high=0.1), ((3, 1),)),
    ],
    ids=("grpo", "gspo"),
)
def test_one_gradient_for_every_split(x64, objective, splits):
  decoder, params = tiny.model(CONFIG)
  group = tiny.group(prompt=9, tails=LENGTHS)
  reference_GT = br.dense_log_probs(decoder, params, group)
  answers = objective.answers(
      group.mask(), advantages.group_relative(jnp.arange(8.0) % 3),
      old_log_probs=near(reference_GT, 0.3, 0),
      reference_log_probs=near(reference_GT, 0.3, 1)
      if objective.kl_coefficient else None,
  )
  wanted_value, wanted = jax.jit(
      jax.value_and_grad(
          lambda p: objective(br.dense_log_probs(decoder, p, group), answers)
      )
  )(params)
  for at_once, devices in splits:
    schedule = br.Schedule(branches_at_once=at_once)
    if devices > 1:
      layout = sharding.sharded(params, devices)
      schedule = dataclasses.replace(schedule, layout=layout)
    evaluation, gradient = br.value_and_grad(
        decoder, objective, schedule=schedule
    )(params, group, answers)
    np.testing.assert_allclose(evaluation.loss, wanted_value, rtol=1e-12)
    assert tiny.worst(gradient, wanted) <= TOLERANCE, schedule


@pytest.mark.exhaustive
def test_a_fully_masked_group_moves_nothing(x64):
  """Beside a group that does, and under one mean over both."""
  decoder, params = tiny.model(CONFIG)
  groups = [
      tiny.group(prompt=9, tails=(3, 5), seed=seed) for seed in (0, 1)
  ]
  stacked = br.stack(groups)
  objective = objectives.dapo()
  dead = jnp.array([True, False])[:, None, None]
  old = jnp.stack([br.dense_log_probs(decoder, params, g) for g in groups])

  def gradient(mask):
    answers = objective.answers(
        mask, jnp.array([[1.0, -1.0], [-2.0, 2.0]]), old_log_probs=old
    )
    return br.value_and_grad(decoder, objective)(params, stacked, answers)

  evaluation, some = gradient(stacked.mask() & ~dead)
  objective_alone = objective.answers(
      groups[1].mask(), jnp.array([-2.0, 2.0]), old_log_probs=old[1]
  )
  alone = jax.jit(jax.grad(
      lambda p: objective(
          br.dense_log_probs(decoder, p, groups[1]), objective_alone
      )
  ))(params)
  assert tiny.worst(some, alone) <= TOLERANCE
  evaluation, none = gradient(jnp.zeros(stacked.tails.shape, bool))
  assert evaluation.loss == 0
  assert jax.tree.structure(none) == jax.tree.structure(params)
  for leaf in jax.tree.leaves(none):
    np.testing.assert_array_equal(leaf, 0)


def test_log_probs_are_tempered_on_both_sides():
  logits_NV = jnp.array([[2.0, 1.0, 0.0]])
  for temperature, right in ((0.6, -0.202573), (1.0, -0.407606)):
    result_N = log_probs_lib.chunked(
        logits_NV, jnp.eye(3), jnp.array([0]), temperature=temperature
    )
    np.testing.assert_allclose(result_N, [right], atol=1e-6)


def test_on_policy_the_first_step_is_reinforce():
  """Sampled at another temperature, truncated, eight at a time; then singly."""
  decoder, params = tiny.model(tiny.BASE)
  law = br.Law(temperature=0.6, top_p=0.9)
  rollout = br.sample(
      decoder, params, np.arange(1, 12), key=jax.random.key(0), branches=8,
      max_tokens=6, law=law,
  )
  group = br.Group.create(
      np.arange(1, 12), rollout.tails(), config=decoder.config
  )
  rewards_G = jnp.array([1.0, 0, 0, 1, 0, 1, 1, 1])
  advantages_G = advantages.group_relative(rewards_G)
  mask_GT = group.mask()
  width = group.tails.shape[1] - rollout.log_probs.shape[1]
  old_GT = jnp.pad(rollout.log_probs, ((0, 0), (0, width)))
  objective = objectives.dapo()
  answers = objective.answers(mask_GT, advantages_G, old_log_probs=old_GT)
  evaluation, gradient = br.value_and_grad(
      decoder, objective, readout=br.LogProbs(0.6),
      schedule=br.Schedule(branches_at_once=1),
  )(params, group, answers, state=rollout.state)
  # Centred, of equal lengths: the loss is 0, and says nothing.
  assert abs(evaluation.loss) < 1e-6
  assert np.abs(gradient["embed"]["table"]).max() > 1e-3
  reinforce = dataclasses.replace(
      objectives.reinforce(), reduction="token_mean"
  )
  np.testing.assert_allclose(
      jax.grad(objective)(evaluation.outputs, answers),
      jax.grad(reinforce)(
          evaluation.outputs, reinforce.answers(mask_GT, advantages_G)
      ),
      atol=1e-6,
  )
  log_ratio_GT = objective.log_ratio(evaluation.outputs, answers)
  found = metrics.ratios(
      log_ratio_GT, advantages_G, mask_GT, clip_low=0.2, clip_high=0.28
  ) | metrics.mismatch(evaluation.outputs, old_GT, mask_GT)
  for name, right in (
      ("ratio_mean", 1), ("ratio_max", 1), ("clipped_low", 0),
      ("clipped_high", 0), ("kl_old", 0), ("mismatch_max", 0),
  ):
    np.testing.assert_allclose(found[name], right, atol=1e-5, err_msg=name)
  untempered_GT = br.log_probs(decoder, params, group, state=rollout.state)
  found = metrics.mismatch(untempered_GT, old_GT, mask_GT)
  assert found["mismatch_mean"] > 0.1


@dataclasses.dataclass(frozen=True)
class ActorCritic:
  """Log-prob, entropy, and the value of a linear head in the tree."""

  def __call__(self, model, params, hidden_NM, targets_N, layout=None):
    del layout
    own = {name: x for name, x in params.items() if name != "value"}
    table_VM = model.apply({"params": own}, method="head_table")
    logits_NV = hidden_NM @ table_VM.T
    log_probs_NV = jax.nn.log_softmax(logits_NV)
    return {
        "log_prob": jnp.take_along_axis(
            log_probs_NV, targets_N[:, None], axis=1
        )[:, 0],
        "entropy": divergences.entropy(logits_NV),
        "value": hidden_NM @ params["value"]["kernel"],
    }


PPO = objectives.ppo(dual_clip=3.0)


def actor_critic_loss(outputs, answers, old_values_GT, returns_GT):
  """A sum over branches, made of sums over branches."""
  value_GT = surrogates.value_loss(
      outputs["value"], old_values_GT, returns_GT, answers.mask
  )
  bonus_GT = jnp.where(answers.mask, outputs["entropy"], 0)
  extra_GT = 0.5 * value_GT - 0.01 * bonus_GT
  return PPO(outputs["log_prob"], answers) + jnp.sum(
      answers.weights * extra_GT
  )


@pytest.mark.exhaustive
def test_a_value_loss_and_an_entropy_bonus_are_sums_beside_the_policy_s(x64):
  decoder, params = tiny.model(CONFIG)
  random = np.random.default_rng(0)
  head = {"kernel": jnp.asarray(random.normal(size=CONFIG.width))}
  params = params | {"value": head}
  group = tiny.group(prompt=6, tails=(5, 0, 3, 4))
  shape = group.tails.shape
  old_values_GT = jnp.asarray(random.normal(size=shape))
  rewards_GT = jnp.asarray(random.normal(size=shape))
  of_GT, returns_GT = advantages.gae(
      rewards_GT, old_values_GT, group.mask(), discount=0.99, trace=0.95
  )
  answers = PPO.answers(
      group.mask(), advantages.whiten(of_GT, group.mask()),
      old_log_probs=jnp.asarray(random.normal(size=shape)) - 4,
  )
  args = answers, old_values_GT, returns_GT
  _, gradient = br.value_and_grad(
      decoder, actor_critic_loss, readout=ActorCritic(),
      schedule=br.Schedule(branches_at_once=3),
  )(params, group, *args)

  def dense(params):
    own = {name: x for name, x in params.items() if name != "value"}
    hidden_GSM = decoder.apply(
        {"params": own}, group.sequences(), method="hidden"
    )
    hidden_NM = hidden_GSM[:, 5 : 5 + shape[1]].reshape(-1, CONFIG.width)
    outputs = ActorCritic()(decoder, params, hidden_NM, group.tails.ravel())
    outputs = jax.tree.map(
        lambda x: jnp.where(group.mask(), x.reshape(shape), 0), outputs
    )
    return actor_critic_loss(outputs, *args)

  wanted = jax.jit(jax.grad(dense))(params)
  assert np.abs(gradient["value"]["kernel"]).max() > 1e-3
  assert tiny.worst(gradient, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_a_pair_as_two_branches_equals_two_rows(x64):
  decoder, params = tiny.model(CONFIG)
  tails = [[3, 1, 4, 1, 5], [9, 2]]
  prompt = np.arange(7)
  both = br.Group.create(prompt, tails, config=CONFIG)
  rows = [br.Group.create(prompt, [tail], config=CONFIG) for tail in tails]
  reference_GT = near(br.dense_log_probs(decoder, params, both), 0.5, 0)
  pairs = preference.Pairs.create(both.mask(), reference_GT)
  loss = preference.Dpo()
  evaluation, gradient = br.value_and_grad(decoder, loss)(params, both, pairs)

  def by_rows(params):
    chosen, rejected = (
        jnp.sum(br.dense_log_probs(decoder, params, row))
        - jnp.sum(jnp.where(row.mask(), reference_GT[i, :8][None], 0))
        for i, row in enumerate(rows)
    )
    return -jax.nn.log_sigmoid(0.1 * (chosen - rejected))

  right, wanted = jax.jit(jax.value_and_grad(by_rows))(params)
  np.testing.assert_allclose(evaluation.loss, right, rtol=1e-12)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  # One row at a time: the pair is known from a first pass.
  coefficients_GT = jax.grad(loss)(evaluation.outputs, pairs)
  _, gradient = br.value_and_grad(
      decoder, objectives.linear, schedule=br.Schedule(branches_at_once=1)
  )(params, both, coefficients_GT)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  with pytest.raises(ValueError, match="1 rows do not make pairs"):
    br.value_and_grad(
        decoder, loss, schedule=br.Schedule(branches_at_once=1)
    )(params, both, pairs)


def test_rows_over_eight_devices_and_rows_of_padding(x64):
  """The pure functions under jit, branches dealt out, half of them empty."""
  objective = objectives.dr_grpo(max_tokens=7)
  mesh = jax.make_mesh(
      (8,), ("branches",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec("branches")
  )
  random = np.random.default_rng(0)
  log_probs_GT, old_GT = jnp.asarray(random.normal(size=(2, 8, 7)))
  mask_GT = jnp.arange(7)[None] < jnp.array([3, 0, 0, 7, 1, 0, 0, 2])[:, None]
  rewards_G = jnp.asarray(random.normal(size=8))

  @jax.jit
  def of(log_probs_GT, old_GT, mask_GT, rewards_G):
    real_G = jnp.any(mask_GT, axis=1)
    advantages_G = advantages.group_relative(rewards_G, real_G)
    answers = objective.answers(mask_GT, advantages_G, old_log_probs=old_GT)
    return jax.value_and_grad(objective)(log_probs_GT, answers)

  args = log_probs_GT, old_GT, mask_GT, rewards_G
  wanted = of(*args)
  got = of(*jax.device_put(args, spec))
  for x, right in zip(got, wanted, strict=True):
    np.testing.assert_allclose(x, right, rtol=1e-12)
  kept = np.flatnonzero(mask_GT.any(axis=1))
  compact, _ = of(*(x[kept] for x in args))
  np.testing.assert_allclose(wanted[0], compact, rtol=1e-12)
  total = reductions.reduce(
      jnp.ones((8, 7)), mask_GT, "constant", max_tokens=7
  )
  assert total.weight == 4
