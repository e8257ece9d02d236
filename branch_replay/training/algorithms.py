# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Training algorithms: the loss of each, and how its constants are computed.

An algorithm names a readout and a loss for `gradients.value_and_grad`. Its
`prepare` turns a batch of experience into the groups to run and the constant
arguments of the loss (advantages, weights). Token weights are computed for the
whole batch at once, so the sum of the groups' gradients is the gradient of the
batch.
"""

from collections.abc import Sequence
import dataclasses
from typing import Literal
from typing import NamedTuple
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.engine import readout as readout_lib
from branch_replay.rl import advantages
from branch_replay.rl import metrics
from branch_replay.rl import objectives
from branch_replay.rl import preference
from branch_replay.rl import reductions
from branch_replay.training import actor_critic
from branch_replay.training import experience as experience_lib

Advantage = Literal["group_relative", "group_centred", "leave_one_out"]


class Known(NamedTuple):
  """What is computed of a batch before its first update.

  Attributes:
    reference: log-probs under the reference policy, one [G, T] array for each
      experience; None if the algorithm has no reference.
    outputs: the algorithm's readout under the parameters that sampled, one
      [G, T] pytree for each experience; None if it does not need them.
  """

  reference: Sequence[jax.Array] | None = None
  outputs: Sequence | None = None


@dataclasses.dataclass(frozen=True)
class MaximumLikelihood:
  """Supervised learning: the mean of −log p over the tokens of given answers.
  """

  readout: readout_lib.LogProbs = readout_lib.LogProbs()
  needs_reference = False
  needs_outputs = False

  @staticmethod  # a bound method would compile anew per object
  def loss(log_probs_GT, weights_GT):
    """Σ w (−log p), summed over the given branches."""
    return -jnp.sum(weights_GT * log_probs_GT)

  def prepare(self, batch, known: Known):
    """Returns the batch and the token weights; see `PolicyGradient.prepare`."""
    del known
    weights_NGT = reductions.token_weights(masks(batch), "token_mean")
    return batch, (weights_NGT,)

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """Returns answer_loss, the mean of −log p in nats per token."""
    del sampled_NGT
    return {"answer_loss": self.loss(outputs_NGT, args[0])}


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
  """GRPO and related algorithms: one advantage per answer and a policy loss.

  Attributes:
    objective: the policy loss, made by one of the functions of `rl.objectives`.
    advantage: how rewards become advantages. "group_relative" subtracts the
      group's mean and divides by its standard deviation, "group_centred" only
      subtracts the mean, "leave_one_out" subtracts the mean of the others.
    temperature: the temperature the answers were sampled at.
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

  def advantages(self, batch) -> jax.Array:
    """f32[N, G]: the advantage of every answer of N experiences."""
    rewards_NG = jnp.asarray(np.stack([one.rewards for one in batch]))
    # Others are not compared with an answer of no tokens.
    there_NG = jnp.stack([one.group.tail_lengths > 0 for one in batch])
    if self.advantage == "leave_one_out":
      return advantages.leave_one_out(rewards_NG, there_NG)
    return advantages.group_relative(
        rewards_NG, there_NG, normalize=self.advantage == "group_relative"
    )

  def prepare(self, batch, known: Known):
    """Computes advantages and token weights for a batch.

    Args:
      batch: N experiences, all with tails of the same shape [G, T].
      known: reference log-probs, if the objective has a KL penalty.

    Returns:
      The experiences to run, and a tuple of arguments for the loss whose leaves
      have the leading axes [N, G].
    """
    ratio = self.objective.ratio != "none"
    answers = self.objective.answers(
        masks(batch), self.advantages(batch),
        old_log_probs=log_probs(batch) if ratio else None,
        reference_log_probs=_stacked(known.reference),
    )
    return batch, (answers,)

  def report(self, outputs_NGT, sampled_NGT, args) -> dict:
    """Scalars to log: ratios, divergences, and agreement with the sampler.

    Args:
      outputs_NGT: the readout before the update.
      sampled_NGT: log-probs that the sampler recorded.
      args: the arguments that `prepare` returned.

    Returns:
      Scalars by name, described in `rl.metrics`.
    """
    (answers,) = args
    return policy_report(self.objective, outputs_NGT, sampled_NGT, answers)


@dataclasses.dataclass(frozen=True)
class ProximalPolicy:
  """PPO, arXiv 1707.06347: a value head, and one advantage per token.

  The reward of an answer is placed on its last token. The value after the last
  token is taken to be 0, for answers that were truncated too.

  Attributes:
    objective: the policy loss, see `rl.objectives.ppo`.
    discount: γ of generalised advantage estimation.
    trace: λ of generalised advantage estimation.
    value_coefficient: factor of the value loss.
    value_clip: ε of the clipped value loss; None for no clipping.
    whiten: whether advantages are whitened over all tokens of an update.
    temperature: the temperature the answers were sampled at.
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
    """Computes advantages, returns and weights; see `PolicyGradient.prepare`.
    """
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
    """As `PolicyGradient.report`, and value_error, the mean of (V − R)²."""
    answers, targets = args
    report = policy_report(
        self.objective, outputs_NGT.log_probs, sampled_NGT, answers
    )
    error_NGT = jnp.square(outputs_NGT.values - targets.returns)
    return report | {"value_error": metrics.mean(error_NGT, answers.mask)}


@dataclasses.dataclass(frozen=True)
class Preference:
  """DPO or IPO on pairs made of a group's own answers.

  Answers are sorted by reward. The best is paired with the worst, the second
  best with the second worst, and so on. Pairs of equal reward are dropped.

  Attributes:
    loss: `rl.preference.Dpo` or `rl.preference.Ipo`.
  """

  loss: preference.Dpo | preference.Ipo
  needs_reference = True
  needs_outputs = False

  @property
  def readout(self) -> readout_lib.LogProbs:
    return readout_lib.LogProbs()

  def prepare(self, batch, known: Known):
    """Orders answers in pairs and weighs them; see `PolicyGradient.prepare`."""
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
    """Scalars to log: margin, the mean of h; ordered, the share with h > 0."""
    del sampled_NGT
    (of_pairs,) = args
    margin_N = preference.margins(outputs_NGT, of_pairs)
    there_N = of_pairs.weights[..., ::2] > 0
    return {
        "margin": metrics.mean(margin_N, there_N),
        "ordered": metrics.mean(margin_N > 0, there_N),
    }


# Outside of `jit` every call would compile its scan anew.
_gae = jax.jit(advantages.gae, static_argnames=("discount", "trace"))

Algorithm = MaximumLikelihood | PolicyGradient | ProximalPolicy | Preference


def pairs(
    rewards_G: np.ndarray, there_G: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Pairs a group's answers: a better and a worse one by turns.

  Args:
    rewards_G: rewards of the G answers; G is even.
    there_G: bool[G], the answers that may be paired; None for all.

  Returns:
    rows: i[G], indices of answers. Rows 2i and 2i + 1 are the better and the
      worse answer of pair i.
    real: bool[G], false for both rows of a pair of equal rewards and for rows
      without a partner. These rows must have no weight in the loss.
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
  """Scalars that describe a policy loss before its update; see `rl.metrics`."""
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
  """bool[N, G, T]: which entries are tokens of an answer and not padding."""
  return jnp.stack([one.group.mask() for one in batch])


def log_probs(batch) -> jax.Array:
  """f32[N, G, T]: log-probs that the sampler recorded."""
  return jnp.asarray(np.stack([one.log_probs for one in batch]))


def _stacked(arrays):
  return None if arrays is None else jnp.stack(arrays)
