# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Results that README and docs name in a sentence, by the name of a marker."""

import math

from experiments import bias_matrices
from experiments import learning_curves


def _lengths(results: dict) -> list[float]:
  rows = bias_matrices.along(results, "prompt_tokens")
  return [row["cosine"]["mean"] for row in rows]


def lowest_cosine(results: dict) -> str:
  """Of stop, over prompt lengths."""
  return f"{min(_lengths(results)):.2f}"


def highest_cosine(results: dict) -> str:
  """Of stop, over prompt lengths."""
  return f"{max(_lengths(results)):.2f}"


def cosine_of_long_answers(results: dict) -> str:
  """Of stop, at the longest answers."""
  row = bias_matrices.along(results, "tail_tokens")[-1]
  return f"{row['cosine']['mean']:.2f}"


def share_at_longest(results: dict) -> str:
  """Of the squared cotangent in two sixteenths of the longest prompts."""
  row = bias_matrices.along(results, "prompt_tokens")[-1]
  return f"{100 * row['share_of_two_largest_sixteenths']['mean']:.0f} %"


def _by_seed(results: dict, name: str) -> dict[int, float]:
  runs = learning_curves.by_variant(results)[name]
  return {one["seed"]: learning_curves.final(one) for one in runs}


def _within(results: dict, name: str) -> str:
  """The largest distance from exact at the end of a seed, rounded up."""
  exact = _by_seed(results, "exact")
  largest = max(
      abs(reward - exact[seed])
      for seed, reward in _by_seed(results, name).items()
  )
  return f"{math.ceil(100 * largest) / 100:.2f}"


def full_within(results: dict) -> str:
  """Of exact, in held-out reward."""
  return _within(results, "full")


def sampled_within(results: dict) -> str:
  """Of exact, in held-out reward."""
  return _within(results, "sampled")


def _grouper(results: dict, prompt: int, field: str, ours: str) -> float:
  """What Prefix Grouper takes over what one of ours does."""
  entry = next(
      e for e in results["prefixes"] if e["prompt_tokens"] == prompt
  )
  row = next(r for r in entry["peers"] if r["peer"] == "prefix_grouper")
  return row[field][ours]


def faster_than_grouper(prompt: int, ours: str):
  """The value of how many times faster than Prefix Grouper one of ours is."""
  return lambda results: (
      f"{_grouper(results, prompt, 'time_ratio', ours):.2f}×"
  )


def memory_of_grouper(prompt: int):
  """The value of our share of its memory, with recomputation."""
  ours = "ours_exact_recompute"
  return lambda results: (
      f"{1 / _grouper(results, prompt, 'memory_ratio', ours):.2f}"
  )


# Of a marker's name, the part before a dot is its result file.
VALUES = {
    "bias_sweep.lowest": lowest_cosine,
    "bias_sweep.highest": highest_cosine,
    "bias_sweep.long_answers": cosine_of_long_answers,
    "bias_sweep.two_sixteenths": share_at_longest,
    "learning_modes.full_within": full_within,
    "learning_modes.sampled_within": sampled_within,
    **{
        f"peers.exact_{prompt}": faster_than_grouper(prompt, "ours_exact_keep")
        for prompt in (2048, 8192, 16384)
    },
    "peers.stop_8192": faster_than_grouper(8192, "ours_stop"),
    "peers.memory_8192": memory_of_grouper(8192),
    "peers.memory_16384": memory_of_grouper(16384),
}
