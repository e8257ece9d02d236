# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Results of training: curves, stale captures, drafters that adapt."""

import pathlib
import statistics

import numpy as np

from experiments.reporting import plots
from experiments.reporting import tables


def learned(results: dict) -> str:
  """Held-out reward after each phase of a training run."""
  def after(phase):
    return "nothing" if phase["name"] == "before" else phase["name"]

  return tables.markdown({
      "after": after, "step": "{step}", "held-out reward": "{reward:.3f}",
      "s": "{seconds:.0f}",
  }, results["phases"])


def learning(results: dict) -> str:
  """Held-out reward by step of a training run."""
  return tables.markdown({
      "step": "{step}", "held-out reward": "{reward:.3f}",
      "s": "{seconds:.0f}",
  }, results["curve"])


def by_variant(results: dict) -> dict[str, list[dict]]:
  """Runs by variant, in the config's order."""
  found = {name: [] for name, _ in results["config"]["variants"]}
  for one in results["runs"]:
    found[one["variant"]].append(one)
  return {name: runs for name, runs in found.items() if runs}


def final(one: dict) -> float:
  """Held-out reward at the end of a run."""
  return one["evaluated"][-1][1]


def within(one: dict, seconds: float) -> float:
  """Held-out reward of a run at its last evaluation before so many seconds."""
  found = one["warmed_up"]
  for step, reward in one["evaluated"]:
    if one["seconds"][step - 1] <= seconds:
      found = reward
  return found


def _spread(values, sign: str = "") -> str:
  return f"{np.mean(values):{sign}.3f} ± {np.std(values):.3f}"


def curves(results: dict) -> str:
  """Variants of a training run: reward by steps and by time, over seeds.

  Differences to the first variant, and the time that it took in all, are those
  of the same seed.
  """
  variants = by_variant(results)
  first = next(iter(variants))
  budget = {one["seed"]: one["seconds"][-1] for one in variants[first]}
  reached = {one["seed"]: final(one) for one in variants[first]}

  def over_seeds(value, sign=""):
    return lambda row: _spread([value(one) for one in row[1]], sign)

  def seconds_of(part):
    def cell(row):
      steps = [np.median(one[f"{part}_seconds"]) for one in row[1]]
      return f"{np.median(steps):.2f}" if np.median(steps) else "–"
    return cell

  return tables.markdown({
      "variant": lambda row: row[0], "seeds": lambda row: len(row[1]),
      "warmed up": over_seeds(lambda one: one["warmed_up"]),
      "held-out reward": over_seeds(final),
      f"against “{first}”": over_seeds(
          lambda one: final(one) - reached[one["seed"]], "+"
      ),
      f"in the time of “{first}”": over_seeds(
          lambda one: within(one, budget[one["seed"]])
      ),
      "rollout s": seconds_of("rollout"), "drafter s": seconds_of("draft"),
      "learning s": seconds_of("learn"),
  }, variants.items())


def draw_curves(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: held-out reward by step and by seconds of training."""
  with plots.axes(path, 1, 2, size=(11, 4.5), sharey=True) as (_, axes):
    left, right = axes
    for color, (name, runs) in enumerate(by_variant(results).items()):
      rewards = np.array([
          [one["warmed_up"], *(reward for _, reward in one["evaluated"])]
          for one in runs
      ])
      steps = [0, *(step for step, _ in runs[0]["evaluated"])]
      mean, spread = rewards.mean(axis=0), rewards.std(axis=0)
      left.plot(steps, mean, color=f"C{color}", label=name)
      left.fill_between(
          steps, mean - spread, mean + spread, color=f"C{color}", alpha=0.2
      )
      for one, curve in zip(runs, rewards, strict=True):
        seconds = [0, *(one["seconds"][at - 1] for at, _ in one["evaluated"])]
        right.plot(seconds, curve, color=f"C{color}", alpha=0.6)
    left.set_xlabel("step (mean, and standard deviation over seeds)")
    right.set_xlabel("seconds of sampling and learning (a line a seed)")
    left.set_ylabel("held-out reward")
    left.legend()


def drift(results: dict) -> list[dict]:
  """Means and spreads of a stale replay, by updates since its capture."""
  found = []
  for updates in results["config"]["updates"]:
    rows = [row for row in results["rows"] if row["updates"] == updates]
    found.append({"updates": updates, **{
        name: tables.spread([row[name] for row in rows])
        for name in rows[0] if name not in ("batch", "updates")
    }})
  return found


def drift_table(results: dict) -> str:
  """A stale replay against a fresh capture, by updates in between."""
  return tables.markdown({
      "updates": "{updates}",
      "mean drift of log-probs": "{log_prob_drift_mean[mean]:.1e}",
      "largest": "{log_prob_drift_max[max]:.1e}",
      "answer loss": "{answer_loss_difference[mean]:.1%}",
      "gradient: cosine": lambda r: tables.plus_minus(r["gradient_cosine"], 4),
      "relative error": "{gradient_relative_error[mean]:.2f}",
  }, drift(results))


def draw_drift(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: drift, loss and gradient against updates on a capture."""
  titles = {
      "log_prob_drift_mean": "mean |Δ log p| of an answer's token",
      "answer_loss_difference": "relative difference of the answer loss",
      "gradient_cosine": "cosine of the gradient with a fresh capture's",
  }
  rows = drift(results)
  with plots.axes(path, 1, 3, size=(11, 3.5)) as (_, axes):
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
      for one in results["rows"]:
        axis.plot(one["updates"], one[name], ".", color="C0", alpha=0.4)
      axis.plot(
          [row["updates"] for row in rows], [row[name]["mean"] for row in rows],
          marker="o", color="C0",
      )
      axis.set_title(title, fontsize=9)
      axis.set_xlabel("updates (a dot a batch; line: mean)")


def adapted(results: dict) -> str:
  """Accept lengths of a drafter that learns on and of the same one frozen."""
  reward = {
      row["step"]: row["reward/mean"] for row in results["steps"]
      if "reward/mean" in row
  }

  def recent(case):
    return statistics.mean(
        reward[s] for s in reward if case["step"] - 5 < s <= case["step"]
    )

  return tables.markdown({
      "step": "{step}", "reward": lambda case: f"{recent(case):.2f}",
      "frozen": "{frozen[accept_length]:.2f}",
      "adapting": "{adapting[accept_length]:.2f}",
      "frozen: accepted": "{frozen[accepted]:.0%}",
      "adapting: accepted": "{adapting[accepted]:.0%}",
  }, results["cases"])


def draw_adapted(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: accept length and reward by step."""
  with plots.axes(path, 1, 2, size=(11, 4)) as (_, (left, right)):
    for name in ("adapting", "frozen"):
      left.plot(
          [case["step"] for case in results["cases"]],
          [case[name]["accept_length"] for case in results["cases"]],
          marker="o", label=f"{name} drafter",
      )
    left.set_xlabel("step")
    left.set_ylabel("tokens of a row per forward pass")
    left.legend()
    rows = [row for row in results["steps"] if "reward/mean" in row]
    right.plot(
        [row["step"] for row in rows], [row["reward/mean"] for row in rows]
    )
    right.set_xlabel("step")
    right.set_ylabel("mean reward of the rollouts")
