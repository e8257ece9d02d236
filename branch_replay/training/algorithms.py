# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What is learnt from experience: objectives, and what they need to know.

An algorithm names a readout and a loss for `prefix_replay.value_and_grad`, and
makes from a batch of experience the groups that are run and the constants that
the loss is given. Weights are settled for the whole batch, so the gradients of
its groups add up to the gradient of the batch.
"""

from collections.abc import Sequence
import dataclasses
from typing import Literal
from typing import NamedTuple
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import readout as readout_lib
from branch_replay.rl import advantages
from branch_replay.rl import metrics
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.rl import reductions
from branch_replay.training import actor_critic
from branch_replay.training import experience as experience_lib

Advantage = Literal["group_relative", "group_centred", "leave_one_out"]


class Known(NamedTuple):
  """What was computed of the answers before any update; [G, T] a group.

  Attributes:
    reference: log-probs of the reference policy, or None.
    outputs: of the algorithm's readout under the parameters that sampled, or
      None.
  """

  reference: Sequence[jax.Array] | None = None
  outputs: Sequence | None = None


@dataclasses.dataclass(frozen=True)
class MaximumLikelihood:
  """−log p of given answers, mean over tokens; for models that know nothing."""

  readout: readout_lib.LogProbs = readout_lib.LogProbs()
  needs_reference = False
  needs_outputs = False

  @staticmethod  # one function: a method of each object would compile anew
  def loss(log_probs_GT, weights_GT):
    """Σ w (−log p)."""
    return -jnp.sum(weights_GT * log_probs_GT)

  def prepare(self, batch, known: Known):
    """The batch and its arguments; see `PolicyGradient.prepare`."""
    del known
    weights_NGT = reductions.token_weights(masks(batch), "token_mean")
    return batch, (weights_NGT,)

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """answer_loss: −log p in nats a token."""
    del sampled_NGT
    return {"answer_loss": self.loss(outputs_NGT, args[0])}


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  """GRPO and its kin: one advantage an answer, and a policy loss.

  Attributes:
    objective: see `rl.objectives`.
    advantage: "group_relative" divides by the group's standard deviation,
      "group_centred" does not, "leave_one_out" has the mean of the others.
    temperature: the sampler's.
  """

  objective: objectives.PolicyLoss
  advantage: Advantage = "group_relative"
  temperature: float = 1.0
  needs_outputs = False

  def __post_init__(self):
    if self.advantage not in get_args(Advantage):
      raise ValueError(
          f"Unknown advantage={self.advantage!r}: use one of "
          f"{', '.join(get_args(Advantage))}."
      )

  @property
  def readout(self) -> readout_lib.LogProbs:
    return readout_lib.LogProbs(self.temperature)

  @property
  def needs_reference(self) -> bool:
    return self.objective.kl_coefficient > 0

  @property
  def loss(self):
    return self.objective

  def prepare(self, batch, known: Known):
    """What is run, and the loss's arguments.

    Args:
      batch: N experiences of one shape.
      known: what the algorithm needs of them.

    Returns:
      The experiences to run, and a tuple of arguments whose leaves have the
      leading axes [N, G].
    """
    rewards_NG = jnp.asarray(np.stack([one.rewards for one in batch]))
    # An answer of no tokens is none: others are not compared with it.
    there_NG = jnp.stack([one.group.tail_lengths > 0 for one in batch])
    if self.advantage == "leave_one_out":
      advantages_NG = advantages.leave_one_out(rewards_NG, there_NG)
    else:
      advantages_NG = advantages.group_relative(
          rewards_NG, there_NG, normalize=self.advantage == "group_relative"
      )
    ratio = self.objective.ratio != "none"
    answers = self.objective.answers(
        masks(batch), advantages_NG,
        old_log_probs=log_probs(batch) if ratio else None,
        reference_log_probs=_stacked(known.reference),
    )
    return batch, (answers,)

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """Ratios, divergences and agreement with the sampler; see `rl.metrics`.

    Args:
      outputs_NGT: of the readout.
      sampled_NGT: log-probs of the sampler.
      args: of `prepare`.
    """
    (answers,) = args
    return policy_report(self.objective, outputs_NGT, sampled_NGT, answers)


@dataclasses.dataclass(frozen=True)
class ProximalPolicy:
  """PPO, arXiv 1707.06347: a value head, and advantages of every token.

  The reward of an answer sits on its last token. An answer that was cut off
  earns what its reward says, and nothing is hoped for behind it.

  Attributes:
    objective: see `rl.objectives.ppo`.
    discount: γ.
    trace: λ.
    value_coefficient: of the value loss.
    value_clip: ε of the value loss, or None.
    whiten: whether advantages are whitened over the groups of an update.
    temperature: the sampler's.
  """

  objective: objectives.PolicyLoss
  discount: float = 1.0
  trace: float = 0.95
  value_coefficient: float = 0.5
  value_clip: float | None = 0.2
  whiten: bool = True
  temperature: float = 1.0
  needs_outputs = True

  @property
  def readout(self) -> actor_critic.ActorCritic:
    return actor_critic.ActorCritic(self.temperature)

  @property
  def needs_reference(self) -> bool:
    return self.objective.kl_coefficient > 0

  @property
  def loss(self) -> actor_critic.Loss:
    return actor_critic.Loss(
        self.objective, self.value_coefficient, self.value_clip
    )

  def prepare(self, batch, known: Known):
    """See `PolicyGradient.prepare`."""
    mask_NGT = masks(batch)
    values_NGT = jnp.stack([outputs.values for outputs in known.outputs])
    lengths_NG = jnp.stack([one.group.tail_lengths for one in batch])
    at_T = jnp.arange(mask_NGT.shape[-1])
    last_NGT = at_T[None, None] == lengths_NG[..., None] - 1
    rewards_NG = jnp.asarray(np.stack([one.rewards for one in batch]))
    rewards_NGT = jnp.where(last_NGT, rewards_NG[..., None], 0)
    advantages_NGT, returns_NGT = _gae(
        rewards_NGT, values_NGT, mask_NGT, discount=self.discount,
        trace=self.trace,
    )
    if self.whiten:
      advantages_NGT = advantages.whiten(advantages_NGT, mask_NGT)
    answers = self.objective.answers(
        mask_NGT, advantages_NGT, old_log_probs=log_probs(batch),
        reference_log_probs=_stacked(known.reference),
    )
    return batch, (answers, actor_critic.Targets(values_NGT, returns_NGT))

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """As of `PolicyGradient`, and value_error, the mean of (V − R)²."""
    answers, targets = args
    report = policy_report(
        self.objective, outputs_NGT.log_probs, sampled_NGT, answers
    )
    error_NGT = jnp.square(outputs_NGT.values - targets.returns)
    return report | {"value_error": metrics.mean(error_NGT, answers.mask)}


@dataclasses.dataclass(frozen=True)
class Preference:
  """DPO or IPO on pairs of a group's own answers: better against worse.

  Answers are sorted by reward, and the best is paired with the worst, the
  second with the second worst, and so on; a pair of equal rewards is dropped.

  Attributes:
    loss: `rl.preference.Dpo` or `Ipo`.
  """

  loss: preference.Dpo | preference.Ipo
  needs_reference = True
  needs_outputs = False

  @property
  def readout(self) -> readout_lib.LogProbs:
    return readout_lib.LogProbs()

  def prepare(self, batch, known: Known):
    """See `PolicyGradient.prepare`; answers are in the order of pairs."""
    arranged, references, kept = [], [], []
    for one, reference in zip(batch, known.reference, strict=True):
      rows, real = pairs(
          one.rewards, np.asarray(one.group.tail_lengths) > 0
      )
      one, reference = experience_lib.take(one, rows, reference)
      arranged.append(one)
      references.append(reference)
      kept.append(real)
    mask_NGT = masks(arranged) & jnp.asarray(np.stack(kept))[..., None]
    return arranged, (
        preference.Pairs.create(mask_NGT, jnp.stack(references)),
    )

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """margin: mean of h; ordered: the share of pairs with h > 0."""
    del sampled_NGT
    (of_pairs,) = args
    margin_N = preference.margins(outputs_NGT, of_pairs)
    there_N = of_pairs.weights[..., ::2] > 0
    return {
        "margin": metrics.mean(margin_N, there_N),
        "ordered": metrics.mean(margin_N > 0, there_N),
    }


# Not under `jit`, its scan would be compiled anew by every call.
_gae = jax.jit(advantages.gae, static_argnames=("discount", "trace"))

Algorithm = MaximumLikelihood | PolicyGradient | ProximalPolicy | Preference


def pairs(
    rewards_G: np.ndarray, there_G: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Rows in pairs, a better answer and a worse one, and which pairs are real.

  Args:
    rewards_G: of an even number of answers.
    there_G: bool[G], the answers that are paired; None for all.

  Returns:
    rows, i[G], places of answers; real, bool[G], false for both rows of a pair
    of equal rewards, and for rows that have no partner.
  """
  if there_G is None:
    there_G = np.ones(rewards_G.shape, bool)
  order = np.argsort(-rewards_G, kind="stable")
  paired, rest = order[there_G[order]], order[~there_G[order]]
  half = paired.size // 2
  better, worse = paired[:half], paired[::-1][:half]
  real = np.zeros(order.size, bool)
  real[: 2 * half] = np.repeat(rewards_G[better] > rewards_G[worse], 2)
  rows = np.stack([better, worse], 1).reshape(-1)
  middle = paired[half : paired.size - half]
  return np.concatenate([rows, middle, rest]), real


def policy_report(objective, log_probs_NGT, sampled_NGT, answers) -> dict:
  """What there is to see of a policy loss; see `rl.metrics`."""
  found = metrics.mismatch(log_probs_NGT, sampled_NGT, answers.mask)
  if objective.ratio != "none":
    found |= metrics.ratios(
        objective.log_ratio(log_probs_NGT, answers), answers.advantages,
        answers.mask, clip_low=objective.clip_low,
        clip_high=objective.clip_high, dual_clip=objective.dual_clip,
    )
  if answers.reference_log_probs is not None:
    found |= metrics.kl_reference(
        log_probs_NGT, answers.reference_log_probs, answers.mask
    )
  return found


def masks(batch) -> jax.Array:
  """bool[N, G, T], the tokens of the answers."""
  return jnp.stack([one.group.mask() for one in batch])


def log_probs(batch) -> jax.Array:
  """f32[N, G, T], of the sampler."""
  return jnp.asarray(np.stack([one.log_probs for one in batch]))


def _stacked(arrays):
  return None if arrays is None else jnp.stack(arrays)
