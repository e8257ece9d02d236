# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of how fast a gradient is, drawn from results."""

import statistics

_SYSTEMS = {
    "torch_full": "PyTorch, whole sequences, one at a time",
    "torch_full_batched": "PyTorch, whole sequences, all at once",
    "prefix_grouper": "Prefix Grouper",
    "tunix": "Tunix, whole sequences",
    "ours_full": "`full`",
    "ours_exact_keep": "`exact`, activations kept",
    "ours_exact_recompute": "`exact`, recomputed",
    "ours_stop": "`stop`",
}


def _why_not(row: dict | None, limit: float) -> str:
  """In a word, why there is no time of a system."""
  reason = "" if row is None else row.get("not_run", "")
  if "out of memory" in reason:
    return "out of memory"
  return f"over {limit:.0f} s" if "would take" in reason else "–"


def peers(results: dict) -> str:
  """Seconds and memory by system and prompt length, or why there are none."""
  entries = [entry for entry in results["prefixes"] if entry["finished"]]
  head = (
      "| system | "
      + " | ".join(f"{entry['prompt_tokens']:,} tokens" for entry in entries)
      + f" |\n|---|{'---|' * len(entries)}\n"
  )
  rows = []
  for name, words in _SYSTEMS.items():
    cells = []
    for entry in entries:
      row = next((r for r in entry["peers"] if r["peer"] == name), None)
      if row is None or "seconds_median" not in row:
        cells.append(_why_not(row, results["config"]["limit_seconds"]))
      else:
        cells.append(
            f"{row['seconds_median']:.1f} s, "
            f"{row['extra_rss_bytes'] / 2**30:.1f} GiB"
        )
    rows.append(f"| {words} | {' | '.join(cells)} |\n")
  return head + "".join(rows)


def growth(results: dict) -> str:
  """Measured against analytic growth, worst step of every variant and axis."""
  head = (
      "| axis | mode | activations | steps | time over FLOPs, median | least "
      "| most |\n|---|---|---|---|---|---|---|\n"
  )
  found = {}
  for row in results["growth"]:
    key = row["axis"], row["mode"], row["activations"]
    found.setdefault(key, []).append(row["excess"])
  return head + "".join(
      f"| {axis.split('_')[0]} | {mode} | {policy} | {len(excess)} "
      f"| {statistics.median(excess):.2f} | {min(excess):.2f} "
      f"| {max(excess):.2f} |\n"
      for (axis, mode, policy), excess in found.items()
  )


def rates(results: dict) -> str:
  """One line a variant and prefix length, at the group of most cases."""
  head = (
      "| P | mode | activations | s | useful GFLOP/s | of a matrix product "
      "| temporaries |\n|---|---|---|---|---|---|---|\n"
  )
  shapes = [(one["branches"], one["tail_tokens"]) for one in results["cases"]]
  usual = statistics.mode(shapes)
  return head + "".join(
      f"| {case['prefix_tokens']:,} | {run['mode']} | {run['activations']} "
      f"| {run['seconds_median']:.2f} "
      f"| {run['useful_flops_per_second'] / 1e9:.0f} "
      f"| {run['share_of_matrix']:.2f} "
      f"| {run['temp_bytes'] / 2**20:,.0f} MiB |\n"
      for case in results["cases"] for run in case["runs"]
      if "left_out" not in run
      and (case["branches"], case["tail_tokens"]) == usual
  )


def long_run(results: dict) -> str:
  """A table of one run over a very long prefix."""
  of, model = results["config"], results["config"]["model"]
  layers = ", ".join(model.get("layer_pattern", ("full",)))
  return (
      "| P | mode | layers | CPU time | resident at the peak | before "
      "| gradient norm |\n|---|---|---|---|---|---|---|\n"
      f"| {of['prefix']:,} | {of['mode']} | {model['num_layers']}: {layers} "
      f"| {results['cpu_seconds'] / 60:.1f} min "
      f"| {results['peak_rss_bytes'] / 2**30:.2f} GiB "
      f"| {results['rss_before_bytes'] / 2**30:.2f} GiB "
      f"| {results['gradient_norm']:,.0f} |\n"
  )
