# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tails in blocks that see themselves whole, and all before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.data import group as group_lib
from branch_replay.devices import sharding
from branch_replay.ops import attention
from branch_replay.ops.attention import reference
from branch_replay.ops.attention import tiling
from tests import attention_suite
from tests import tiny

TOLERANCE = 1e-11
MASK = 63  # an id that stands for what is to be predicted


def noised(prompt=12, lengths=(5, 1, 7), block=3, config=tiny.BASE):
  """A group whose tails run on half their ids, the others masked."""
  random = np.random.default_rng(0)
  tails = [random.integers(0, 63, length) for length in lengths]
  return br.Group.create(
      random.integers(0, 63, prompt), tails, config=config, block=block,
      tail_inputs=[
          np.where(random.random(tail.size) < 0.5, MASK, tail)
          for tail in tails
      ],
  )


def small_tiles(monkeypatch):
  """So that blocks straddle tiles."""
  for name in ("FORWARD_ROWS", "FORWARD_COLUMNS", "BACKWARD_ROWS",
               "BACKWARD_COLUMNS"):
    monkeypatch.setattr(tiling, name, 8)


def test_what_a_block_sees_by_hand():
  """Seven tokens in blocks of three, five of them real; two keys before."""
  v_KGTD = jnp.eye(9)[None, None, 2:]
  q_KGRTD = jnp.zeros((1, 1, 1, 7, 9))
  prefix_KPD = jnp.eye(9)[None, :2]
  out, lse = attention.replay_attention(
      q_KGRTD, jnp.zeros_like(v_KGTD), v_KGTD, jnp.zeros_like(prefix_KPD),
      prefix_KPD, 2, lengths_G=jnp.array([5]), block=3,
  )
  seen = np.zeros((7, 9))
  seen[:3, :5] = 1 / 5  # the prefix and the first block
  seen[3:5, :7] = 1 / 7  # and the real ones of the second
  np.testing.assert_allclose(out[0, 0, 0], seen, atol=1e-7)
  np.testing.assert_allclose(
      lse[0, 0, 0, :5], np.log([5, 5, 5, 7, 7]), rtol=1e-6
  )


@pytest.mark.parametrize("block,window", [(5, None), (32, None), (3, 7)])
def test_the_op_equals_its_reference(x64, monkeypatch, block, window):
  small_tiles(monkeypatch)
  case = attention_suite.make(tails=attention_suite.RAGGED, length=30)
  found, wanted = (
      attention_suite.run(
          lambda *args, attend=attend, **options: attend(
              *args, block=block, window=window, **options
          ), case,
      )
      for attend in (attention.replay_attention, reference.replay_attention)
  )
  worst = attention_suite.errors(found, wanted)
  assert max(worst.values()) < 1e-12, worst
  causal = attention_suite.run(reference.replay_attention, case)
  assert np.abs(causal["out"] - wanted["out"]).max() > 0.1


def test_blocks_of_one_are_causal(x64):
  case = attention_suite.make(tails=attention_suite.RAGGED)
  arguments = [getattr(case, name) for name in attention_suite.ARGUMENTS]
  one, causal = (
      attention.replay_attention(
          *arguments, case.length, lengths_G=case.tails, block=block
      )
      for block in (1, None)
  )
  np.testing.assert_allclose(one[0], causal[0], atol=1e-14)


@pytest.mark.exhaustive(but="llama")
@pytest.mark.parametrize("name,mode", [
    ("window and full", "exact"), ("latent", "exact"), ("llama", "full"),
])
def test_gradients_equal_dense_ones_with_the_same_mask(x64, name, mode):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  group = noised()
  weights = tiny.weights(group)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  schedule = br.Schedule(chunk_size=5, branches_at_once=2)
  (_, log_probs, _), found = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient=mode, schedule=schedule
  )(params, group, weights)
  assert tiny.worst(found, wanted) <= TOLERANCE
  np.testing.assert_allclose(
      log_probs, br.dense_log_probs(decoder, params, group), atol=1e-12
  )


def test_later_inputs_of_a_block_are_seen_and_no_others():
  decoder, params = tiny.model(tiny.BASE)
  group = noised()
  before = br.dense_log_probs(decoder, params, group)
  other = dataclasses.replace(
      group, tail_inputs=group.tail_inputs.at[2, 4].set(1)
  )
  after = br.dense_log_probs(decoder, params, other)
  changed = np.asarray(before != after)
  assert not changed[:2].any() and not changed[2, :3].any()
  assert changed[2, 3:7].all()  # its own block from its start, and the next


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ("eight devices", "host loop"))
def test_other_ways_to_run_give_the_same_gradient(x64, how):
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  group = noised(prompt=18, lengths=(12, 3), block=5)
  weights = tiny.weights(group)
  wanted = tiny.dense_gradient(decoder, params, group, weights)
  if how == "host loop":
    run = br.value_and_grad(
        decoder, tiny.loss, hosted=br.Hosted(),
        schedule=br.Schedule(branches_at_once=1),
    )
  else:
    layout = sharding.sharded(params, 8)
    params = layout.place(params)
    run = br.value_and_grad(
        decoder, tiny.loss, schedule=br.Schedule(chunk_size=8, layout=layout)
    )
  found = run(params, group, weights)[1]
  assert tiny.worst(found, wanted) <= TOLERANCE


def test_stacked_groups_keep_their_inputs():
  groups = [noised(), noised(prompt=30, lengths=(2, 9, 12))]
  both = br.stack(groups)
  assert both.block == 3
  np.testing.assert_array_equal(
      both.tail_inputs[0, :, :8], groups[0].tail_inputs
  )
  with pytest.raises(ValueError, match=r"blocks \[3, None\]"):
    br.stack([groups[0], tiny.group(tails=(5, 1, 3))])


def test_errors():
  create, config = br.Group.create, tiny.BASE
  with pytest.raises(ValueError, match="block must be at least 1, not 0"):
    create([1], [[2]], config=config, block=0)
  with pytest.raises(ValueError, match="say block="):
    create([1], [[2]], config=config, tail_inputs=[[MASK]])
  with pytest.raises(ValueError, match="each input has one target"):
    create([1], [[2]], config=config, block=2, tail_inputs=[[1, 2]])
  with pytest.raises(ValueError, match="ids of the tail_inputs lie outside"):
    create([1], [[2]], config=config, block=2, tail_inputs=[[64]])
  with pytest.raises(ValueError, match="recurrent layers see no later token"):
    group_lib.check(noised(), tiny.ARCHITECTURES["hybrid"])
  decoder, params = tiny.model(config)
  with pytest.raises(ValueError, match=r"no tails in blocks \(block=3\)"):
    br.sample(
        decoder, params, noised(), key=jax.random.key(0), branches=1,
        max_tokens=1,
    )
