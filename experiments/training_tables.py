# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of training and of rollouts, drawn from their results."""

import statistics

import numpy as np

from experiments import learning_curves
from experiments import staleness


def learned(results: dict) -> str:
  """Held-out reward after each phase of a training run."""
  head = "| after | step | held-out reward | s |\n|---|---|---|---|\n"
  names = {"before": "nothing"}
  return head + "".join(
      f"| {names.get(phase['name'], phase['name'])} | {phase['step']} "
      f"| {phase['reward']:.3f} | {phase['seconds']:.0f} |\n"
      for phase in results["phases"]
  )


def within(one: dict, seconds: float) -> float:
  """Held-out reward of a run at its last evaluation before so many seconds."""
  found = one["warmed_up"]
  for step, reward in one["evaluated"]:
    if one["seconds"][step - 1] <= seconds:
      found = reward
  return found


def _spread(values) -> str:
  return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def curves(results: dict) -> str:
  """Variants of a training run: reward by steps and by time, over seeds.

  Differences to the first variant, and the time that it took in all, are those
  of the same seed.
  """
  runs = learning_curves.by_variant(results)
  first = next(iter(runs))
  budget = {one["seed"]: one["seconds"][-1] for one in runs[first]}
  reached = {one["seed"]: learning_curves.final(one) for one in runs[first]}
  head = (
      f"| variant | seeds | warmed up | held-out reward | against “{first}” "
      f"| in the time of “{first}” | rollout s | drafter s | learning s |\n"
      "|---|---|---|---|---|---|---|---|---|\n"
  )
  rows = []
  for name, of in runs.items():
    seconds = [
        learning_curves.seconds_a_step(of, part)
        for part in ("rollout", "draft", "learn")
    ]
    ends = [learning_curves.final(one) for one in of]
    less = [
        end - reached[one["seed"]] for one, end in zip(of, ends, strict=True)
    ]
    rows.append(
        f"| {name} | {len(of)} "
        f"| {_spread([one['warmed_up'] for one in of])} "
        f"| {_spread(ends)} | {np.mean(less):+.3f} ± {np.std(less):.3f} "
        f"| {_spread([within(one, budget[one['seed']]) for one in of])} | "
        + " | ".join(f"{x:.2f}" if x else "–" for x in seconds) + " |\n"
    )
  return head + "".join(rows)


def drift(results: dict) -> str:
  """A stale replay against a fresh capture, by updates in between."""
  head = (
      "| updates | mean drift of log-probs | largest | answer loss "
      "| gradient: cosine | relative error |\n|---|---|---|---|---|---|\n"
  )
  return head + "".join(
      f"| {row['updates']} | {row['log_prob_drift_mean']['mean']:.1e} "
      f"| {row['log_prob_drift_max']['max']:.1e} "
      f"| {row['answer_loss_difference']['mean']:.1%} "
      f"| {row['gradient_cosine']['mean']:.4f} "
      f"± {row['gradient_cosine']['std'] or 0:.4f} "
      f"| {row['gradient_relative_error']['mean']:.2f} |\n"
      for row in staleness.summary(results)
  )


def parts(results: dict) -> str:
  """Seconds and operations of the parts of a step."""
  head = "| part | s | Gflop | Gflop/s |\n|---|---|---|---|\n"
  rows = []
  for name, part in results["parts"].items():
    rate = part["gflops_per_second"]
    rows.append(
        f"| {name} | {part['seconds']:.2f} | "
        + (f"{part['flops'] / 1e9:,.0f} | {rate:.0f} |\n" if rate
           else "– | – |\n")
    )
  return head + "".join(rows)


def less_time(results: dict) -> str:
  """Modes: less compute against less time."""
  head = (
      "| mode | gradient s | less compute | less time | step s "
      "| faster step |\n|---|---|---|---|---|---|\n"
  )
  return head + "".join(
      f"| {name} | {one['gradient_seconds']:.2f} | {one['less_compute']:.2f}× "
      f"| {one['less_time']:.2f}× | {one['step_seconds']:.2f} "
      f"| {one['step_speedup']:.2f}× |\n"
      for name, one in results["modes"].items()
  )


def rollouts(results: dict) -> str:
  """Tokens per second by compaction, drafter and draft length."""
  head = (
      "| compacted | drafter | drafts | tokens/s | speed-up | accept length "
      "| drafts accepted | rows that differ |\n"
      "|---|---|---|---|---|---|---|---|\n"
  )
  scanned = results["scanned"]
  first = results["runs"][0]["tokens_per_second"]
  runs = [*results["runs"], scanned | {
      "drafter": "none, layers scanned",
      "speedup": scanned["tokens_per_second"] / first,
  }]
  return head + "".join(
      f"| {'yes' if one['compact'] else 'no'} | {one['drafter']} "
      f"| {_drafts(one)} | {one['tokens_per_second']:.1f} "
      f"| {one['speedup']:.2f}× | {one['accept_length']:.2f} "
      f"| {one['accepted'] / max(1, one['drafted']):.0%} "
      f"| {one['rows_that_differ']} |\n"
      for one in runs
  )


def _drafts(run: dict) -> str:
  """The draft length, or those that a tuner took, largest bucket first."""
  if run["draft_length"] != "tuned":
    return str(run["draft_length"])
  return "tuned: " + ", ".join(map(str, run["bucket_draft_lengths"]))


def adapted(results: dict) -> str:
  """Accept lengths of a drafter that learns on and of the same one frozen."""
  head = (
      "| step | reward | frozen | adapting | frozen: accepted "
      "| adapting: accepted |\n|---|---|---|---|---|---|\n"
  )
  reward = {
      row["step"]: row["reward/mean"] for row in results["steps"]
      if "reward/mean" in row
  }
  rows = []
  for case in results["cases"]:
    frozen, adapting = case["frozen"], case["adapting"]
    near = [reward[s] for s in reward if case["step"] - 5 < s <= case["step"]]
    rows.append(
        f"| {case['step']} | {statistics.mean(near):.2f} "
        f"| {frozen['accept_length']:.2f} | {adapting['accept_length']:.2f} "
        f"| {frozen['accepted']:.0%} | {adapting['accepted']:.0%} |\n"
    )
  return head + "".join(rows)


def simulated(results: dict) -> str:
  """The simulated rollout of several workers."""
  plain, drafts = results["plain"], results["drafts"]
  after = plain["seconds"] / results["speedup_counted_training"]
  head = (
      "| simulated | s | speed-up | workers idle | updates that fit the waits "
      "|\n|---|---|---|---|---|\n"
  )
  return head + (
      f"| without drafts | {plain['seconds']:.1f} | 1.00× "
      f"| {plain['idle']:.0%} | {plain['updates_in_idle']:.0f} |\n"
      f"| with drafts, the drafter trained in waits | {drafts['seconds']:.1f} "
      f"| {results['speedup_free_training']:.2f}× | {drafts['idle']:.0%} "
      f"| {drafts['updates_in_idle']:.0f} |\n"
      f"| with drafts, {results['config']['updates']} updates after the "
      f"rollout | {after:.1f} | {results['speedup_counted_training']:.2f}× "
      "| – | – |\n"
  )
