# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model must pass whatever its layers are: run it on a new mixer.

  mixer_suite.check(config)  # a ModelConfig of a small vocabulary

Each check takes a config, runs it in float64 against the dense model, and
raises AssertionError with what differs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.rollout import law as law_lib
from tests import tiny

TOLERANCE = 1e-11  # of the worst parameter
SCHEDULE = br.Schedule(chunk_size=4, activations="recompute")


def problem(config: br.ModelConfig, prompt=12, tails=(5, 1, 3)):
  """Decoder, parameters, group and weights of its tokens, in float64."""
  config = tiny.in_float64(config)
  decoder, params = tiny.model(config)
  group = tiny.group(prompt, tails, config)
  return decoder, params, group, tiny.weights(group)


def gradient(decoder, params, group, weights, **options):
  """Of `tiny.loss`, by `value_and_grad`."""
  return br.value_and_grad(decoder, tiny.loss, **options)(
      params, group, weights
  )[1]


def check(config: br.ModelConfig) -> None:
  """Everything below."""
  with jax.enable_x64(True):
    exact_is_full(config)
    siblings_are_independent(config)
    decoding_is_the_forward_pass(config)


def exact_is_full(config: br.ModelConfig, schedule=SCHEDULE) -> None:
  """The gradient through a replayed prefix is that of whole sequences.

  Chunks of the prefix are uneven and tails ragged, one of them of one token.
  """
  arguments = problem(config)
  wanted = tiny.dense_gradient(*arguments)
  error = tiny.worst(gradient(*arguments, schedule=schedule), wanted)
  assert error <= TOLERANCE, f"exact differs from full by {error:.1e}"


def siblings_are_independent(config: br.ModelConfig) -> None:
  """Perturbing one branch leaves the others bit-equal."""
  decoder, params, *_ = problem(config)
  group = tiny.group(tails=(5, 6, 7), config=config)
  changed = (group.tails[1] + 1) % config.vocab_size
  other = dataclasses.replace(group, tails=group.tails.at[1].set(changed))
  before, after = (
      np.asarray(br.log_probs(decoder, params, x)) for x in (group, other)
  )
  for sibling in (0, 2):
    np.testing.assert_array_equal(before[sibling], after[sibling])
  assert (before[1, :6] != after[1, :6]).all(), "the branch does not see itself"


def decoding_is_the_forward_pass(config: br.ModelConfig) -> None:
  """Sampled tokens are drawn as the whole model would draw them.

  And the trainer, from the sampler's state, gives them the same log-probs.
  """
  decoder, params, group, _ = problem(config)
  prompt = group.prompt[: int(group.prompt_length)]
  schedule = br.Schedule(chunk_size=5)
  result = br.sample(
      decoder, params, prompt, key=jax.random.key(3), branches=3,
      max_tokens=9, law=br.Law(0.9), schedule=schedule,
  )
  rows = jnp.concatenate(
      [jnp.tile(prompt, (3, 1)), result.tokens[:, :-1]], axis=1
  )
  logits_GTV = jax.jit(decoder.apply)({"params": params}, rows)
  log_probs_GTV = jax.nn.log_softmax(logits_GTV[:, len(prompt) - 1 :] / 0.9)
  noise_GTV = jnp.stack([
      jnp.stack([
          law_lib.noise(
              jax.random.key(3), row, len(prompt) + t, config.vocab_size,
              jnp.float64,
          )
          for t in range(9)
      ])
      for row in range(3)
  ])
  np.testing.assert_array_equal(
      result.tokens, jnp.argmax(log_probs_GTV + noise_GTV, axis=-1)
  )
  np.testing.assert_allclose(
      result.log_probs,
      jnp.take_along_axis(log_probs_GTV, result.tokens[..., None], -1)[..., 0],
      rtol=1e-12,
  )
  sampled = br.Group.create(prompt, result.tails(), config=decoder.config)
  replayed = br.log_probs(
      decoder, params, sampled, state=result.state, temperature=0.9,
      schedule=schedule, prefix_gradient="stop",
  )[:, :9]
  np.testing.assert_allclose(replayed, result.log_probs, atol=1e-12)
