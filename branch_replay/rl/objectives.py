# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Policy losses for `branch_replay.value_and_grad`: sums over branches.

    >>> import branch_replay as br
    >>> from branch_replay.rl import advantages, objectives
    >>> model = br.Decoder(br.ModelConfig(
    ...     vocab_size=64, width=32, num_layers=1, num_heads=2,
    ...     num_kv_heads=1, head_dim=16, ffn_width=48, max_positions=64))
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 1), int))["params"]
    >>> prompt = [5, 6, 7]
    >>> rollout = br.sample(
    ...     model, params, prompt, key=jax.random.key(1), branches=4,
    ...     max_tokens=12, stop_ids=tuple(range(16)))
    >>> rewards_G = [float(len(tail) > 2) for tail in rollout.tails()]
    >>> group = br.Group.create(prompt, rollout.tails(), config=model.config)
    >>> rollout.log_probs.shape, group.tails.shape  # answers that ended early
    ((4, 12), (4, 8))
    >>> objective = objectives.grpo(kl_coefficient=0.0)
    >>> answers = objective.answers(
    ...     group.mask(), advantages.group_relative(rewards_G),
    ...     old_log_probs=rollout.log_probs_of(group))
    >>> evaluation, grads = br.value_and_grad(model, objective)(
    ...     params, group, answers)
    >>> sorted(grads) == sorted(params)
    True

With a `kl_coefficient` above 0, `answers` also takes `reference_log_probs`:
`br.log_probs` of this group under the reference policy's parameters.

`answers` computes the weight w of every token for all branches at once. The
loss of any part is then Σ w · loss, and splitting the batch does not change the
gradient. Objectives with the same constants are equal, and compile once. To add
a value loss or an entropy bonus, write a function of the readout's whole output
that calls the objective and adds sums of its own.
"""

import dataclasses
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.rl import checks
from branch_replay.rl import divergences
from branch_replay.rl import reductions
from branch_replay.rl import surrogates

Ratio = Literal["none", "token", "sequence"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Answers:
  """The constants of a policy loss, all with the leading axis G.

  Attributes:
    advantages: [..., G], or [..., G, T] for one advantage per token.
    mask: bool[..., G, T], the tokens that are trained.
    weights: [..., G, T], weights w of the tokens in the loss, computed by
      `reductions.token_weights` for the whole batch.
    old_log_probs: [..., G, T], of the policy that sampled, at its temperature.
    reference_log_probs: [..., G, T], of the reference policy of the KL penalty.
  """

  advantages: jax.Array
  mask: jax.Array
  weights: jax.Array
  old_log_probs: jax.Array | None = None
  reference_log_probs: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """Σ w (surrogate + β KL), a sum over branches of log-probs and `Answers`.

  Attributes:
    ratio: "none" for −A log π, "token" for the clipped surrogate with a ratio
      per token, "sequence" for one ratio per answer.
    reduction: how tokens are averaged, see `reductions.shares`.
    max_tokens: L_max of the reduction "constant".
    clip_low: ε_low.
    clip_high: ε_high.
    dual_clip: c, which limits the loss of tokens (or answers) with A < 0 to
      c |A|; None for e²⁰, see `surrogates.ppo_clip`.
    kl_coefficient: β.
    kl_estimator: see `divergences`; each estimator has another gradient.
  """

  ratio: Ratio
  reduction: reductions.Reduction
  max_tokens: int | None = None
  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float | None = surrogates.DUAL_CLIP
  kl_coefficient: float = 0.0
  kl_estimator: divergences.Estimator = "k3"

  def __post_init__(self):
    checks.check_choice("ratio", self.ratio, Ratio)
    checks.check_choice(
        "kl_estimator", self.kl_estimator, divergences.Estimator
    )
    reductions.check_reduction(self.reduction, self.max_tokens)
    surrogates.check_clip(self.clip_low, self.clip_high, self.dual_clip)
    if not self.kl_coefficient >= 0:
      raise ValueError(
          f"kl_coefficient must be ≥ 0, not {self.kl_coefficient}."
      )

  def answers(
      self, mask_GT, advantages, *, old_log_probs=None,
      reference_log_probs=None,
  ) -> Answers:
    """The second argument of the loss, computed for all branches at once.

    Args:
      mask_GT: bool[..., G, T], the tokens that are trained: `group.mask()`, or
        some of them.
      advantages: [..., G], or [..., G, T].
      old_log_probs: `rollout.log_probs_of(group)`, if the loss has a ratio.
      reference_log_probs: log π_ref, if the loss has a KL penalty.

    Returns:
      The answers with their token weights.

    Raises:
      ValueError: log-probs are missing or not needed, or shapes do not fit.
    """
    for name, value, wanted in (
        ("old_log_probs", old_log_probs, self.ratio != "none"),
        ("reference_log_probs", reference_log_probs, self.kl_coefficient > 0),
    ):
      if wanted != (value is not None):
        need = "needs" if wanted else "has no use for"
        raise ValueError(
            f"A loss of ratio={self.ratio!r} and kl_coefficient="
            f"{self.kl_coefficient} {need} {name}."
        )
      if wanted and jnp.shape(value)[:-1] == jnp.shape(mask_GT)[:-1] and (
          jnp.shape(value)[-1:] != jnp.shape(mask_GT)[-1:]
      ):
        raise ValueError(
            f"{name} has shape {jnp.shape(value)} and mask "
            f"{jnp.shape(mask_GT)}: a group pads its answers to a length of "
            "its own. rollout.log_probs_of(group) is as long as it."
        )
      if wanted:
        checks.check_mask(mask_GT, **{name: value})
    weights_GT = reductions.token_weights(
        mask_GT, self.reduction, max_tokens=self.max_tokens
    )
    checks.by_token(advantages, mask_GT)
    if self.ratio == "sequence" and jnp.ndim(advantages) == jnp.ndim(mask_GT):
      raise ValueError(
          "ratio='sequence' takes one advantage an answer, [..., G], not "
          f"{jnp.shape(advantages)}: its tokens have no ratios of their own."
      )
    return Answers(
        jnp.asarray(advantages), jnp.asarray(mask_GT), weights_GT,
        old_log_probs, reference_log_probs,
    )

  def log_ratio(self, log_probs_GT, answers: Answers) -> jax.Array:
    """log r of every token, or log s of its answer; 0 outside the mask."""
    of = log_probs_GT, answers.old_log_probs, answers.mask
    if self.ratio == "sequence":
      return surrogates.sequence_log_ratio(*of)
    return divergences.log_ratio(*of)

  def per_token(self, log_probs_GT, answers: Answers) -> jax.Array:
    """Unweighted loss of every token, [..., G, T], 0 outside the mask."""
    if self.ratio == "none":
      loss_GT = surrogates.reinforce(
          log_probs_GT, answers.advantages, answers.mask
      )
    else:
      loss_GT = surrogates.ppo_clip(
          self.log_ratio(log_probs_GT, answers), answers.advantages,
          answers.mask, clip_low=self.clip_low, clip_high=self.clip_high,
          dual_clip=self.dual_clip,
      )
    if not self.kl_coefficient:
      return loss_GT
    return loss_GT + self.kl_coefficient * divergences.penalty(
        log_probs_GT, answers.reference_log_probs, answers.mask,
        estimator=self.kl_estimator,
    )

  def __call__(self, log_probs_GT, answers: Answers) -> jax.Array:
    """The sum over the given branches, a scalar."""
    return jnp.sum(answers.weights * self.per_token(log_probs_GT, answers))


def linear(log_probs_GT, coefficients_GT) -> jax.Array:
  """Σ c · log π with constant c: the second of two passes, for any loss.

  If a first pass over all branches gave c = jax.grad(loss)(log_probs_GT, ...),
  then the gradient of this sum is that of `loss`, and it is a sum over branches
  even if `loss` is not. Its value means nothing.
  """
  return jnp.sum(lax.stop_gradient(coefficients_GT) * log_probs_GT)


def reinforce() -> PolicyLoss:
  """REINFORCE: the sum over an answer's tokens, averaged over answers.

  With `advantages.leave_one_out` it is RLOO, arXiv 2402.14740.
  """
  return PolicyLoss("none", "sequence_sum")


def ppo(
    *, clip: float = 0.2, dual_clip: float | None = surrogates.DUAL_CLIP,
    kl_coefficient: float = 0.0,
) -> PolicyLoss:
  """PPO, arXiv 1707.06347: a mean over tokens, for `advantages.gae`.

  Add `surrogates.value_loss` yourself. RLHF puts the KL penalty in the reward;
  the one here is part of the loss.

  Args:
    clip: ε on both sides.
    dual_clip: c > 1, limits the loss of tokens with A < 0; see `PolicyLoss`.
    kl_coefficient: β.

  Returns:
    The loss.
  """
  return PolicyLoss(
      "token", "token_mean", clip_low=clip, clip_high=clip,
      dual_clip=dual_clip, kl_coefficient=kl_coefficient,
  )


def grpo(
    *, clip: float = 0.2, dual_clip: float | None = surrogates.DUAL_CLIP,
    kl_coefficient: float = 0.04,
) -> PolicyLoss:
  """GRPO, arXiv 2402.03300, equation 3, for `advantages.group_relative`.

  The paper's loss has no dual clip; it has no effect while r ≤ c.

  Args:
    clip: ε on both sides.
    dual_clip: c > 1, see `PolicyLoss`.
    kl_coefficient: β.

  Returns:
    The loss.
  """
  return PolicyLoss(
      "token", "sequence_mean", clip_low=clip, clip_high=clip,
      dual_clip=dual_clip, kl_coefficient=kl_coefficient,
  )


def dr_grpo(
    *, max_tokens: int, clip: float = 0.2,
    dual_clip: float | None = surrogates.DUAL_CLIP,
) -> PolicyLoss:
  """Dr. GRPO, arXiv 2503.20783, which has no bias by the length of answers.

  For `advantages.group_relative` with normalize=False.

  Args:
    max_tokens: L_max, the same for the whole run.
    clip: ε on both sides.
    dual_clip: c > 1, see `PolicyLoss`.

  Returns:
    The loss.
  """
  return PolicyLoss(
      "token", "constant", max_tokens, clip_low=clip, clip_high=clip,
      dual_clip=dual_clip,
  )


def dapo(
    *, clip_low: float = 0.2, clip_high: float = 0.28,
    dual_clip: float | None = surrogates.DUAL_CLIP,
) -> PolicyLoss:
  """DAPO, arXiv 2503.14476: a mean over tokens, with ε_high above ε_low.

  Sampling until no group is dead (`advantages.is_dead`) is up to the caller.
  """
  return PolicyLoss(
      "token", "token_mean", clip_low=clip_low, clip_high=clip_high,
      dual_clip=dual_clip,
  )


def gspo(
    *, clip_low: float = 3e-4, clip_high: float = 4e-4,
    dual_clip: float | None = surrogates.DUAL_CLIP,
) -> PolicyLoss:
  """GSPO, arXiv 2507.18071, equation 5: ratio and clipping of whole answers.

  The log ratio is a mean over the answer's tokens. So one token whose log ratio
  is 200 takes an answer of fewer than 180 tokens beyond the dual clip of 3,
  where it has no gradient.
  """
  return PolicyLoss(
      "sequence", "sequence_mean", clip_low=clip_low, clip_high=clip_high,
      dual_clip=dual_clip,
  )
