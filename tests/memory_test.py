# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What the compiled program holds: nothing that grows with the group."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import branch_replay as br
from branch_replay.data import group as group_lib
from branch_replay.engine import compiled as compiled_lib
from tests import tiny

# Large enough that state and activations dwarf constants; only compiled.
CONFIG = dataclasses.replace(
    tiny.BASE, num_layers=4, width=64, max_positions=100_000
)


def shapes(prompt: int, branches: int, tail: int = 64) -> br.Group:
  def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  return br.Group(
      integers(prompt + 1), integers(), integers(branches, tail),
      integers(branches),
  )


def compiled(prompt, branches, mode="exact", activations="recompute"):
  decoder = br.Decoder(CONFIG)
  params = jax.eval_shape(
      lambda: decoder.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  schedule = br.Schedule(
      chunk_size=256, branches_at_once=1, activations=activations
  )
  function = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient=mode, schedule=schedule
  )
  group = shapes(prompt, branches)
  weights = jax.ShapeDtypeStruct(group.tails.shape, jnp.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  return jax.jit(function).lower(params, group, weights, key=key).compile()


def temporaries(*args, **options) -> int:
  return compiled(*args, **options).memory_analysis().temp_size_in_bytes


def state_bytes(prompt: int) -> int:
  heads = CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim
  return 2 * 4 * heads * prompt  # keys and values, float32


def test_temporaries_do_not_grow_with_the_group():
  few, many = temporaries(2048, 2), temporaries(2048, 16)
  per_branch = 64 * 4  # ids and log-probs of one more tail
  assert many - few <= 14 * 8 * per_branch


@pytest.mark.parametrize("mode,states", [("exact", 2), ("stop", 1)])
def test_temporaries_grow_with_the_prefix_by_the_state_alone(mode, states):
  short, long = (temporaries(n, 4, mode=mode) for n in (4096, 8192))
  growth = long - short
  wanted = states * (state_bytes(8192) - state_bytes(4096))
  assert 0.9 * wanted <= growth <= 1.15 * wanted


def test_no_buffer_holds_the_prefix_once_a_branch():
  # 7 branches and 3 · 512 positions: sizes that nothing else has.
  text = compiled(1536, 7).as_text()
  per_branch = [
      shape
      for shape in re.findall(r"\w+\[([\d,]+)\]", text)
      if "7" in shape.split(",") and "1536" in shape.split(",")
  ]
  assert not per_branch, per_branch
  # Whole sequences have one row of that many tokens, and are told apart.
  assert re.search(r"\[4,2,1536,16\]", text), "the state itself is there"


def test_one_compilation_a_bucket_of_prompts_and_of_tails():
  # A width of its own: no other test has compiled for it.
  decoder, params = tiny.model(dataclasses.replace(tiny.BASE, ffn_width=40))
  before = compiled_lib.forward._cache_size()
  for prompt in range(10, 30):  # prefixes of 9…28: buckets 16, 24, 32
    br.log_probs(decoder, params, tiny.group(prompt, (3, 4)))
  assert compiled_lib.forward._cache_size() - before == 3
  for tail in range(1, 17):  # buckets 8 and 16; the first is known
    br.log_probs(decoder, params, tiny.group(29, (tail, 1)))
  assert compiled_lib.forward._cache_size() - before == 4


def test_a_loss_and_its_gradient_compile_once_a_bucket():
  decoder, params = tiny.model(dataclasses.replace(tiny.BASE, ffn_width=40))
  function = br.value_and_grad(decoder, tiny.loss)
  before = compiled_lib.value_and_grad._cache_size()
  for prompt in (18, 20, 25):  # prefixes of 17, 19 and 24: bucket 24
    group = tiny.group(prompt, (3, 4))
    function(params, group, tiny.weights(group))
  assert compiled_lib.value_and_grad._cache_size() - before == 1


def test_buckets_waste_at_most_a_sixteenth():

  for length in range(1, 5000):
    padded = group_lib.bucket(length)
    assert length <= padded < length + max(8, length / 16)
  buckets = {group_lib.bucket(length) for length in range(1024, 2048)}
  assert len(buckets) <= 17


@pytest.mark.exhaustive
def test_the_budget_counts_what_autodiff_holds():
  # Between the forward and the backward pass of `replay` all tails' activations
  # would be held, so a budget for one of them must not choose to keep them.
  decoder = br.Decoder(CONFIG)
  params = jax.eval_shape(
      lambda: decoder.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  schedule = br.Schedule(
      chunk_size=256, branches_at_once=1, memory_budget=8 << 20
  )

  def temp(mode, branches):
    group = shapes(1024, branches)
    gradient = jax.grad(lambda params, group: br.log_probs(
        decoder, params, group, prefix_gradient=mode, schedule=schedule
    ).sum())
    lowered = jax.jit(gradient).lower(params, group)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  for mode in ("full", "exact"):
    assert temp(mode, 16) - temp(mode, 2) <= 1 << 20, mode
