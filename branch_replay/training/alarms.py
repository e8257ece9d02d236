# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Warnings for a run that goes on without learning anything, or goes wrong."""

from typing import NamedTuple

import jax.numpy as jnp

# Mean |log p_trainer − log p_sampler| of a token beyond what rounding explains.
# In float32 it is below 1e-4; 0.01 leaves room for matrix products that an
# accelerator makes in TF32. bfloat16 rounds a logit of 16 by up to 0.06; 0.1 is
# half of the usual clip range of 0.2.
MISMATCH_FLOAT32, MISMATCH_NARROW = 0.01, 0.1
CLIPPED = 0.5  # share of tokens without a gradient
FAR = 0.5  # nats a token from the reference; runs that go well stay below 0.1


class Streaks(NamedTuple):
  """How many steps in a row, up to the last, had something wrong.

  Attributes:
    dead: steps in which no group had answers that differ in reward.
    truncated: steps in which no answer stopped.
    share: share of answers that were truncated, summed over the `dead` steps.
    mismatch: steps in which sampler and trainer differed by more than rounding.
    clipped: steps in which more than `CLIPPED` of the tokens were clipped.
    far: steps in which the policy was more than `FAR` from its reference.
  """

  dead: int = 0
  truncated: int = 0
  share: float = 0.0
  mismatch: int = 0
  clipped: int = 0
  far: int = 0


def most_mismatch(compute_dtype: str) -> float:
  """The mean mismatch of a token from which on a run of this dtype warns."""
  if jnp.finfo(compute_dtype).nmant >= jnp.finfo(jnp.float32).nmant:
    return MISMATCH_FLOAT32
  return MISMATCH_NARROW


def observe(
    streaks: Streaks, scalars: dict[str, float], *, after: int,
    compares: bool = True, compute_dtype: str = "float32",
) -> tuple[Streaks, list[str]]:
  """Updates the streaks after a step, and says what to warn of.

  A warning comes after `after` steps in a row, and again each time that number
  has doubled. A mismatch of sampler and trainer is also warned of when it
  begins, and updates that were skipped in every step that has some.

  Args:
    streaks: the streaks before the step.
    scalars: the step's scalars, as they are logged. A streak whose scalars are
      missing, as in a step without sampling, is left as it is.
    after: number of steps in a row; 0 for no warnings.
    compares: whether the algorithm learns only from differences within a group.
    compute_dtype: the model's, which decides how far log-probs may be rounded.

  Returns:
    The streaks after the step, and the warnings as text.
  """
  if not after:
    return streaks, []
  found = []
  if scalars.get("skipped_updates", 0) > 0:
    found.append(
        f"{scalars['skipped_updates']:.0f} of its updates skipped, because "
        "loss or gradient is not finite; the parameters stayed as they were. "
        "Lower learning_rate or clip_norm if this goes on, or look at the "
        "rewards. After most_skipped in a row the run stops."
    )
  for notice in (_nothing_to_learn, _mismatch, _clipped, _far):
    streaks, said = notice(
        streaks, scalars, after=after, compares=compares,
        compute_dtype=compute_dtype,
    )
    found += said
  return streaks, found


def _nothing_to_learn(streaks, scalars, *, after, compares, **_):
  if "dead_groups" not in scalars:
    return streaks, []
  found = []
  truncated = scalars["truncated"]
  dead = scalars["dead_groups"] == 1
  streaks = streaks._replace(
      dead=streaks.dead + 1 if dead and compares else 0,
      truncated=streaks.truncated + 1 if truncated == 1 else 0,
      share=streaks.share + truncated if dead else 0.0,
  )
  if _due(streaks.dead, after):
    found.append(
        f"{streaks.dead} steps in a row without anything to learn from: in no "
        "group did answers differ in reward; "
        f"{streaks.share / streaks.dead:.0%} of the answers were truncated. "
        "Raise max_tokens if that is many; else take easier prompts, a reward "
        "with partial credit, or more branches."
    )
  if _due(streaks.truncated, after):
    found.append(
        f"In {streaks.truncated} steps in a row no answer stopped before "
        "max_tokens. Raise max_tokens, check the task's stop_ids, or say with "
        "`truncated` what such answers are worth."
    )
  return streaks, found


def _mismatch(streaks, scalars, *, after, compute_dtype, **_):
  if "mismatch_mean" not in scalars:
    return streaks, []
  mean, most = scalars["mismatch_mean"], most_mismatch(compute_dtype)
  streaks = streaks._replace(
      mismatch=0 if mean <= most else streaks.mismatch + 1  # NaN is above
  )
  if streaks.mismatch != 1 and not _due(streaks.mismatch, after):
    return streaks, []
  advice = (
      "Set compute_dtype='float32' and see whether it goes away."
      if most == MISMATCH_NARROW else
      "That is no rounding: set schedule.attention='loops' and the drafter to "
      "'none', one after the other, to find what differs."
  )
  return streaks, [
      f"Sampler and trainer differ by {mean:.3g} nats a token on average; "
      f"rounding of compute_dtype={compute_dtype!r} stays below {most}. "
      f"Ratios and clipping are wrong by that much. {advice}"
  ]


def _clipped(streaks, scalars, *, after, **_):
  names = ("clipped_low", "clipped_high", "clipped_dual")
  if not all(name in scalars for name in names):
    return streaks, []
  share = sum(scalars[name] for name in names)
  streaks = streaks._replace(
      clipped=streaks.clipped + 1 if share > CLIPPED else 0
  )
  if not _due(streaks.clipped, after):
    return streaks, []
  return streaks, [
      f"In {streaks.clipped} steps in a row more than {CLIPPED:.0%} of the "
      f"tokens were clipped at the last update, now {share:.0%}: they have no "
      "gradient. Lower learning_rate, or epochs and updates, the updates made "
      "from one batch."
  ]


def _far(streaks, scalars, *, after, **_):
  if "kl_reference" not in scalars:
    return streaks, []
  distance = scalars["kl_reference"]
  streaks = streaks._replace(far=streaks.far + 1 if distance > FAR else 0)
  if not _due(streaks.far, after):
    return streaks, []
  return streaks, [
      f"For {streaks.far} steps in a row the policy was more than {FAR} nats a "
      f"token from its reference, now {distance:.3g}. Raise kl_coefficient or "
      "lower learning_rate, or take no reference if it may go that far."
  ]


def _due(steps: int, after: int) -> bool:
  if not steps or steps % after:
    return False
  times = steps // after
  return times & (times - 1) == 0
