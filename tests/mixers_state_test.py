# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers of several kinds in one model: states, sizes, samples."""

import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.engine import runs
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine import steps
from branch_replay.models import pattern
from branch_replay.planning import flops
from branch_replay.planning import plan
from branch_replay.rollout import drafters
from tests import memory_test
from tests import mixer_suite
from tests import mixers_test
from tests import tiny


@pytest.mark.exhaustive(but="deepseek")
@pytest.mark.parametrize(
    "name", ("gemma3", "deepseek", "qwen3.5", "expert groups")
)
def test_sampled_tokens_are_drawn_as_the_whole_model_would(x64, name):
  mixer_suite.decoding_is_the_forward_pass(mixers_test.config_of(name))


@pytest.mark.exhaustive(but="hybrid")
@pytest.mark.parametrize(
    "name", ("window and full", "latent", "hybrid", "experts")
)
def test_drafts_and_buckets_change_no_token(x64, name):
  decoder, params, group, _ = mixers_test.problem(name)
  prompt = group.prompt[: int(group.prompt_length)]

  def rollout(**options):
    return br.sample(
        decoder, params, prompt, key=jax.random.key(5), branches=4,
        max_tokens=12, stop_ids=(1, 2, 3, 4, 5, 6), **options,
    )

  plain = rollout(compact=False)
  assert len(set(plain.lengths.tolist())) > 1  # rows end at different places
  other = rollout(drafter=drafters.NGram(), draft_length=2)
  np.testing.assert_array_equal(other.tokens, plain.tokens)
  np.testing.assert_array_equal(other.finish, plain.finish)
  np.testing.assert_allclose(other.log_probs, plain.log_probs, rtol=1e-10)


def test_states_of_windows_and_recurrences_do_not_grow_with_the_prefix():
  def size(config, prompt, **options):
    group = tiny.group(prompt, config=config)
    state = jax.eval_shape(
        lambda params: br.capture(br.Decoder(config), params, group, **options),
        mixers_test.shapes_of(config),
    )
    return sum(x.size for x in jax.tree.leaves((state.mixer, state.saved)))

  config = tiny.ARCHITECTURES["delta"]
  delta = config.delta
  matrix = delta.value_heads * delta.key_dim * delta.value_dim
  last = delta.key_heads * delta.channels * (delta.conv_width - 1)
  schedule = br.Schedule(chunk_size=16)
  # In two layers: after the prefix, and before each of its chunks.
  for prompt, chunks in ((17, 1), (33, 2), (129, 8)):
    found = size(config, prompt, schedule=schedule)
    assert found == 2 * (1 + chunks) * (matrix + last)
  assert size(config, 129, capacity=140) == 2 * (matrix + last)
  # A window of 7 before: after the prefix, and what each chunk pushed out.
  window = dataclasses.replace(tiny.ARCHITECTURES["mistral"], window=8)
  of_position = 2 * 2 * window.num_kv_heads * window.head_dim
  for prompt, chunks in ((17, 1), (33, 2), (129, 8)):
    found = size(window, prompt, schedule=schedule)
    assert found == of_position * 7 * (1 + chunks)
  # Chunks shorter than the window are kept whole.
  found = size(window, 129, schedule=br.Schedule(chunk_size=4))
  assert found == of_position * (7 + 128)
  cotangent = jax.eval_shape(lambda: state_lib.accumulator(window, 128))
  assert sum(x.size for x in jax.tree.leaves(cotangent)) == of_position * 7


@pytest.mark.exhaustive
def test_a_gradient_holds_what_chunks_keep_of_a_window(monkeypatch):
  """Of 256 positions of a chunk 32, and no cotangent of them."""
  config = dataclasses.replace(
      memory_test.CONFIG, layer_pattern=("sliding",), window=33
  )
  monkeypatch.setattr(memory_test, "CONFIG", config)
  short, long = (memory_test.temporaries(n, 4) for n in (4096, 8192))
  of_all = memory_test.state_bytes(8192) - memory_test.state_bytes(4096)
  assert 0.9 * of_all / 8 <= long - short <= 1.2 * of_all / 8


def test_plan_and_flops_count_what_there_is():
  config = dataclasses.replace(
      mixers_test.QWEN3_NEXT,
      layer_pattern=("delta", "delta", "latent", "full"),
      latent=br.LatentAttention(12, 8, 4, 10, query_rank=9), output_gate=True,
  )
  prefix, chunk = 64, 16
  step = plan.Step(
      config, prefix, branches=2, tail=8, devices=1, chunk_size=chunk
  )
  found = plan.bytes_per_device(step)
  # A full layer, one of latents of 16 numbers, and two delta layers of 3 heads
  # of 8 × 4 and 2 inputs of 20 channels, after the prefix and before each of
  # its 4 chunks.
  full, latent = 4 * 2 * 2 * 16 * prefix, 4 * 16 * prefix
  delta = 4 * 2 * 3 * (8 * 4 + 2 * 20)
  assert found["state"] == full + latent + 5 * delta
  assert found["accumulator"] == full + 2 * latent + delta
  params = mixers_test.shapes_of(config)
  matrices = sum(
      x.size for path, x in traverse_util.flatten_dict(params["layers"]).items()
      if path[-1] in ("kernel", "filter", "key_up", "value_up")
  )
  assert flops.layer_parameters(config) == matrices
  # Delta layers do the same work whatever came before.
  grown = flops.forward(config, 10, 1000) - flops.forward(config, 10, 0)
  assert grown == 4 * (4 * 16 + 4 * 16) * 10 * 1000
  *_, (_, kept) = jax.eval_shape(
      lambda params: steps.push(
          spec_lib.Spec(br.Decoder(config)), params,
          state_lib.empty(config, chunk),
          runs.chunk(jnp.zeros(chunk, int), chunk, 0, chunk), keep="stages",
      ), params,
  )
  assert schedule_lib.layers_bytes(config) * chunk == sum(
      x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)
  )


@pytest.mark.exhaustive(but="hybrid")
@pytest.mark.parametrize("name", ("window and full", "hybrid"))
def test_an_extended_state_is_replayed_but_not_popped(x64, name):
  decoder, params, group, _ = mixers_test.problem(name)
  length = int(group.prompt_length)
  schedule = br.Schedule(chunk_size=3)
  state = br.capture(
      decoder, params, group.prompt[:5], capacity=length, schedule=schedule
  )
  state = br.extend(
      decoder, params, state, group.prompt[4 : length - 1], schedule=schedule
  )
  np.testing.assert_allclose(
      br.log_probs(decoder, params, group, state=state, prefix_gradient="stop"),
      br.dense_log_probs(decoder, params, group), atol=1e-12,
  )
  with pytest.raises(ValueError, match="does not keep what precedes"):
    br.log_probs(decoder, params, group, state=state)


@pytest.mark.exhaustive
def test_a_state_of_other_chunks_is_refused():
  decoder, params = tiny.model(tiny.ARCHITECTURES["hybrid"])
  group = tiny.group(20)
  state = br.capture(decoder, params, group, schedule=br.Schedule(chunk_size=5))
  with pytest.raises(ValueError, match="chunk_size=8.*3 chunks of 8"):
    br.log_probs(
        decoder, params, group, state=state, schedule=br.Schedule(chunk_size=8)
    )


def test_layers_of_a_pattern_are_stacked_by_place():
  config = dataclasses.replace(
      tiny.BASE, num_layers=8, layer_pattern=("sliding", "sliding", "full"),
      window=4,
  )
  assert pattern.layers(config) == [
      "sliding", "sliding", "full", "sliding", "sliding", "full",
      "sliding", "sliding",
  ]
  periods, rest = pattern.parts(config)
  assert [list(periods.layers(j)) for j in range(3)] == [
      [0, 3], [1, 4], [2, 5]
  ]
  assert [list(rest.layers(j)) for j in range(2)] == [[6], [7]]
  tree = pattern.build(config, lambda kind, count: (kind, count))
  assert tree == {
      "periods": {
          "0": ("sliding", 2), "1": ("sliding", 2), "2": ("full", 2)
      },
      "rest": {"0": ("sliding", 1), "1": ("sliding", 1)},
  }
  assert pattern.join(config, pattern.split(config, tree)) == tree
  # Parts of a tree, as where only some layers are trained, stay parts.
  part = {"periods": {"1": {"a": 1}}}
  assert pattern.join(config, pattern.split(config, part)) == part
