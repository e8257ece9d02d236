# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Samples the branches of a group from one captured prefix.

A rollout is a function of parameters, prompt and key. Drafts, buckets, schedule
and a given state change how it is computed and not its result, see
docs/rollouts.md.

  law.py        the distribution of a token, and drawing from it
  problem.py    what a rollout is a function of
  decode.py     runs new tokens of every row through the decoder
  round.py      draft, run, draw, accept
  loop.py       rounds in smaller and smaller batches
  result.py     what is returned
  drafters/     what guesses tokens ahead
  tuner.py      how many tokens to guess
  unstacked.py  layers one by one, for long rollouts on CPU
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay.data import group as group_lib
from branch_replay.engine import prefix
from branch_replay.engine import schedule as schedule_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.schedule import Schedule
from branch_replay.models import decoder
from branch_replay.models import params as params_lib
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import loop
from branch_replay.rollout import unstacked
from branch_replay.rollout.drafters.drafter import Drafter
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.result import Rollout


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
    drafter: Drafter | None = None,
    draft_length: int | Mapping[int, int] = 0,
    compact: bool = True,
    state: state_lib.PrefixState | None = None,
    version=None,
    schedule: Schedule = Schedule(),
    layers: unstacked.Layers | None = None,
) -> Rollout:
  """Samples G answers to one prompt, which is run once.

  Compiles what it needs. Do not call it under `jit`.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: ids, at least one.
    key: a PRNG key.
    branches: G.
    max_tokens: T, the most tokens of an answer.
    law: temperature and truncation.
    stop_ids: ids that end an answer.
    drafter: guesses tokens ahead, see `rollout.drafters`. It changes the number
      of forward passes and no token.
    draft_length: k, tokens to guess in a round: one number, or one for every
      batch bucket as `tuner.choose` returns them. If all are 0 the drafter is
      not used.
    compact: whether the batch shrinks as rows finish; it changes no token.
    state: captured state of this prompt under these parameters; None to capture
      it here.
    version: u32 that the state was marked with; None if it was marked with a
      fingerprint of the parameters.
    schedule: chunk size and policies of the capture.
    layers: `rollout.unstacked.layers` of these parameters, made once for many
      rollouts; rounds on CPU are faster with them.

  Returns:
    The rollout, with the state to learn from.

  Raises:
    ValueError: an empty prompt or group, ids outside the vocabulary, more
      positions than the model has, drafts without a drafter, a state or layers
      of other parameters, or log-probs that are not finite.
  """
  params_lib.check(model, params)
  config = model.config
  checks.key(key)
  checks.instance(law, "law", law_lib.Law)
  checks.flag(compact, "compact")
  if layers is not None:
    checks.instance(layers, "layers", unstacked.Layers)
  schedule_lib.check(schedule)
  if isinstance(prompt, group_lib.Group):
    raise ValueError(
        "sample draws token by token after a prompt's ids; it takes no Group, "
        f"and no tails in blocks (block={prompt.block})."
    )
  checks.integer(branches, "branches", 1)
  checks.integer(max_tokens, "max_tokens", 1)
  sizes = loop.buckets(branches) if compact else (branches,)
  draft_lengths = _draft_lengths(draft_length, sizes, drafter)
  stop_ids = group_lib.as_ids(stop_ids, "stop_ids")
  group_lib.check_tokens(stop_ids, config, "stop ids")
  group = group_lib.Group.create(prompt, [[]], config=config)
  length = int(group.prompt_length)
  group_lib.check_positions(length + max_tokens, config)
  if schedule.layout.devices > 1:
    raise ValueError("Sampling runs on one device.")
  if state is None:
    state = prefix.capture(model, params, group, schedule=schedule)
  else:
    prefix.check_samplable(state, model, params, group, version)
  if layers is not None:
    unstacked.check(layers, params, version)
  inputs = RolloutInputs(
      # Without what only learning reads: a state that has it would compile
      # every round again.
      params, dataclasses.replace(state.unmarked(), kept=None, attended={}),
      group.prompt[length - 1], key,
      jnp.asarray(stop_ids, jnp.int32), jnp.int32(max_tokens),
      None if layers is None else layers.parts,
  )
  rollout = loop.run(
      model, law, inputs, drafter if any(draft_lengths.values()) else None,
      draft_lengths, branches=branches, room=group_lib.bucket(max_tokens),
  )
  _check_finite(rollout, params, state)
  return dataclasses.replace(
      rollout,
      tokens=rollout.tokens[:, :max_tokens],
      log_probs=rollout.log_probs[:, :max_tokens],
      state=state,
  )


def _check_finite(rollout: Rollout, params, state) -> None:
  """Raises ValueError if log-probs are not finite; says where NaN comes from.
  """
  fine_GT = np.isfinite(np.asarray(rollout.log_probs))
  if fine_GT.all():
    return
  row, token = np.argwhere(~fine_GT)[0].tolist()
  bad = [
      f"{where}{jax.tree_util.keystr(path)}"
      for where, tree in (("params", params), ("state", state.mixer))
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
      if not bool(jnp.all(jnp.isfinite(leaf)))
  ]
  why = (
      f"NaN or infinity in {', '.join(bad[:4])}" if bad else
      "the parameters are finite, so the model overflows in its compute_dtype"
  )
  raise ValueError(
      f"{int((~fine_GT).sum())} log-probs of sampled tokens are not finite, "
      f"the first one of branch {row}, token {token}: {why}. Nothing can be "
      "sampled from them."
  )


def _draft_lengths(draft_length, sizes, drafter) -> dict[int, int]:
  """k for every batch bucket, the largest bucket first."""
  if drafter is not None:
    lacks = [
        name for name in ("init", "propose", "observe", "select")
        if not hasattr(drafter, name)
    ]
    if lacks or isinstance(drafter, type):
      raise TypeError(
          "drafter must be one of rollout.drafters, made as in NGram(), or "
          f"have their methods, not {drafter!r}."
      )
  if not isinstance(draft_length, Mapping):
    draft_length = dict.fromkeys(sizes, draft_length)
  missing = [size for size in sizes if size not in draft_length]
  if missing:
    raise ValueError(
        f"draft_length has no entry for the batch buckets {missing}; it needs "
        f"one for each of {list(sizes)}."
    )
  lengths = {size: draft_length[size] for size in sizes}
  for length in lengths.values():
    checks.integer(length, "draft_length", 0)
  if drafter is None and any(lengths.values()):
    raise ValueError(
        f"Draft lengths {lengths} without a drafter: pass drafter=, for "
        "instance rollout.drafters.NGram()."
    )
  return lengths
