# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of a group's branches from one captured prefix.

A rollout is a pure function of parameters, prompt and key: how it is computed
(buckets, schedule, a state given) does not enter, see docs/rollouts.md.

  law.py     the distribution of a token, and its draw
  block.py   new tokens of every row through the decoder
  round.py   one round of the rows
  loop.py    rounds in batch buckets
  result.py  what comes back
"""

import dataclasses

import jax.numpy as jnp

from branch_replay import group as group_lib
from branch_replay import prefix
from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import loop
from branch_replay.rollout import round as round_lib
from branch_replay.rollout.result import Rollout
from branch_replay.schedule import Schedule


def sample(
    model: decoder.Decoder,
    params,
    prompt,
    *,
    key,
    branches: int,
    max_tokens: int,
    law: law_lib.Law = law_lib.Law(),
    stop_ids: tuple[int, ...] = (),
    compact: bool = True,
    state: state_lib.PrefixState | None = None,
    version=None,
    schedule: Schedule = Schedule(),
) -> Rollout:
  """Samples G answers to one prompt, which is run once.

  Compiles what it needs; not to be called under `jit` itself.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: ids, at least one.
    key: a PRNG key.
    branches: G.
    max_tokens: T, the most tokens of an answer.
    law: temperature and truncation.
    stop_ids: ids that end an answer.
    compact: whether rows go on in smaller batches as others finish; which
      never changes them.
    state: of this prompt and these parameters, if captured before.
    version: what that state is marked with, if not by a fingerprint.
    schedule: of the capture.

  Returns:
    The rollout, with the state to learn from.

  Raises:
    ValueError: an empty prompt or group, ids outside the vocabulary, or more
      positions than the model has.
  """
  config = model.config
  if branches < 1 or max_tokens < 1:
    raise ValueError(
        f"branches={branches} and max_tokens={max_tokens} must be at least 1."
    )
  group_lib.check_tokens(stop_ids, config, "stop ids")
  group = group_lib.Group.create(prompt, [[]], config=config)
  length = int(group.prompt_length)
  group_lib.check_positions(length + max_tokens, config)
  if schedule.layout.devices > 1:
    raise ValueError("Sampling runs on one device.")
  if state is None:
    state = prefix.capture(model, params, group, schedule=schedule)
  else:
    prefix.check_samplable(state, params, group, version)
  inputs = round_lib.Inputs(
      params, state, group.prompt[length - 1], key,
      jnp.asarray(stop_ids, jnp.int32), jnp.int32(max_tokens),
  )
  rollout = loop.run(
      model, law, inputs, branches=branches, compact=compact,
      room=group_lib.bucket(max_tokens),
  )
  return dataclasses.replace(
      rollout,
      tokens=rollout.tokens[:, :max_tokens],
      log_probs=rollout.log_probs[:, :max_tokens],
      state=state,
  )
