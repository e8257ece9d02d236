# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Redraws tables and numbers of README and docs from experiments/results.

A table stands between `<!-- table: name -->` and `<!-- end -->`, a number in a
sentence between `<!--=name-->` and `<!---->`. The part of a name before a dot
is its result file.

  python -m experiments.reporting.readme
"""

import math
import pathlib
import re

from absl import app

from experiments import cli
from experiments.peers import report as peers
from experiments.reporting import bands
from experiments.reporting import bias
from experiments.reporting import comparisons
from experiments.reporting import plans
from experiments.reporting import record
from experiments.reporting import rollouts
from experiments.reporting import speed
from experiments.reporting import training

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_VALUE = re.compile(r"<!--=([\w.]+)-->.*?<!---->")
_TABLE = re.compile(r"<!-- table: ([\w.]+) -->\n.*?<!-- end -->", re.DOTALL)

TABLES = {
    "accumulator_error": comparisons.rounding, "adapting": training.adapted,
    "band_sweep": bands.table, "bench_rollout": rollouts.table,
    "bench_step.growth": speed.growth_table,
    "bench_step.rates": speed.rates, "bias_batch.groups": bias.groups,
    "bias_batch.sums": bias.sums, "bias_sweep.estimators": bias.by_estimator,
    "bias_sweep.overall": bias.over_shapes, "bias_sweep.stop": bias.by_shape,
    "bias_training": bias.training, "compare_architectures": comparisons.trees,
    "compare_smollm2": comparisons.table, "compare_trees": comparisons.trees,
    "learning_algorithms": training.curves, "learning_drafts": training.curves,
    "learning_modes": training.curves, "learning_stale": training.curves,
    "long_run": speed.long_run, "long_run_hybrid": speed.long_run,
    "long_run_hybrid_stop": speed.long_run, "long_run_stop": speed.long_run,
    "peers": peers.table, "plan": plans.table, "plan.hybrid": plans.hybrid,
    "simulate_rollouts": rollouts.simulated, "staleness": training.drift_table,
    "time_breakdown.modes": speed.less_time,
    "time_breakdown.parts": speed.parts, "train_smollm2": training.learned,
    "reasoning_products": training.learning,
    "reasoning_sums": training.learning,
    "train_smollm2_stop": training.learned, "train_tiny": training.learned,
}


def _cosines(results: dict, axis: str) -> list[float]:
  """Cosines of stop with exact, along an axis of the sweep."""
  return [row["cosine"]["mean"] for row in bias.along(results, axis)]


def _share_at_longest(results: dict) -> str:
  """Share of the squared cotangent in two sixteenths of long prompts."""
  row = bias.along(results, "prompt_tokens")[-1]
  return f"{100 * row['share_of_two_largest_sixteenths']['mean']:.0f} %"


def _within(name: str):
  """The largest distance from exact at the end of a seed, rounded up."""
  def value(results):
    ends = {
        variant: {one["seed"]: training.final(one) for one in runs}
        for variant, runs in training.by_variant(results).items()
    }
    largest = max(
        abs(reward - ends["exact"][seed]) for seed, reward in ends[name].items()
    )
    return f"{math.ceil(100 * largest) / 100:.2f}"
  return value


def _grouper(prompt: int, field: str, ours: str):
  """Ratio of Prefix Grouper to one of ours, in time; inverse in memory."""
  def value(results):
    (rows,) = (
        entry["peers"] for entry in results["prefixes"]
        if entry["prompt_tokens"] == prompt
    )
    (ratio,) = (
        row[field][ours] for row in rows if row["peer"] == "prefix_grouper"
    )
    return f"{ratio:.2f}×" if field == "time_ratio" else f"{1 / ratio:.2f}"
  return value


NUMBERS = {
    "bias_sweep.lowest":
        lambda results: f"{min(_cosines(results, 'prompt_tokens')):.2f}",
    "bias_sweep.highest":
        lambda results: f"{max(_cosines(results, 'prompt_tokens')):.2f}",
    "bias_sweep.long_answers":
        lambda results: f"{_cosines(results, 'tail_tokens')[-1]:.2f}",
    "bias_sweep.two_sixteenths": _share_at_longest,
    "learning_modes.full_within": _within("full"),
    "learning_modes.sampled_within": _within("sampled"),
    **{
        f"peers.exact_{prompt}":
            _grouper(prompt, "time_ratio", "ours_exact_keep")
        for prompt in (2048, 8192, 16384)
    },
    "peers.stop_8192": _grouper(8192, "time_ratio", "ours_stop"),
    **{
        f"peers.memory_{prompt}":
            _grouper(prompt, "memory_ratio", "ours_exact_recompute")
        for prompt in (8192, 16384)
    },
}


def render(text: str) -> str:
  """The text with every marked table and number drawn from its result file."""
  def drawn(forms, match):
    return forms[match[1]](record.committed(match[1].split(".")[0]))

  text = _TABLE.sub(
      lambda match: (
          f"<!-- table: {match[1]} -->\n{drawn(TABLES, match)}<!-- end -->"
      ),
      text,
  )
  return _VALUE.sub(
      lambda match: f"<!--={match[1]}-->{drawn(NUMBERS, match)}<!---->", text
  )


PAGES = (
    "README.md", "docs/planning.md", "docs/bias.md", "docs/training.md",
    "docs/rollouts.md", "docs/mathematics.md", "docs/speed.md",
)


def run(_):
  """Writes the pages anew."""
  for page in PAGES:
    file = _ROOT / page
    file.write_text(render(file.read_text()))
    print(f"Wrote {file}")


if __name__ == "__main__":
  app.run(cli.without_words(run))
