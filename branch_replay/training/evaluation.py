# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What sampled answers say of a model: mean reward and pass@k, with confidence.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
  """A mean over prompts.

  Attributes:
    mean: the mean.
    margin: half the width of its 95 % confidence interval; None for fewer than
      two prompts.
  """

  mean: float
  margin: float | None


def estimate(values_N: Sequence[float]) -> Estimate:
  """Mean of one number a prompt, and how far it may be off by the choice of
  prompts.

  Prompts are taken to be independent draws, answers to one prompt are not. The
  margin is 1.96 · s / √N, with s the standard deviation over prompts (N − 1 in
  its denominator): the normal approximation, too narrow for few prompts.

  Args:
    values_N: at least one number.

  Raises:
    ValueError: no numbers.
  """
  values_N = np.asarray(values_N, np.float64)
  if not values_N.size:
    raise ValueError("There are no prompts to take a mean over.")
  if values_N.size == 1:
    return Estimate(float(values_N[0]), None)
  error = values_N.std(ddof=1) / math.sqrt(values_N.size)
  return Estimate(float(values_N.mean()), float(1.96 * error))


def pass_at_k(answers: int, right: int, k: int) -> float:
  """Probability that at least one of k answers is right, without bias.

  1 − C(n − c, k) / C(n, k) of n answers, c of them right: the share of all
  choices of k among the n that hold a right one.

  Args:
    answers: n, answers that were sampled to one prompt.
    right: c, those that are right.
    k: answers that one may look at, at most n.

  Raises:
    ValueError: numbers that contradict each other.

  Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374.
  """
  if not (0 <= right <= answers and 1 <= k <= answers):
    raise ValueError(
        f"pass@{k} of {right} right answers among {answers}: k must be 1 to "
        "the number of answers."
    )
  return 1 - math.comb(answers - right, k) / math.comb(answers, k)
