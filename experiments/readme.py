# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Redraws the tables of README and docs from experiments/results.

And numbers in sentences, between `<!--=file.name-->` and `<!---->`.

  python -m experiments.readme
"""

import json
import pathlib
import re
import statistics

from absl import app

from experiments import cli
from experiments import compare_trees
from experiments import prose
from experiments import speed_tables
from experiments import training_tables

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_VALUE = re.compile(r"<!--=([\w.]+)-->.*?<!---->")
_TABLE = re.compile(r"<!-- table: ([\w.]+) -->\n.*?<!-- end -->", re.DOTALL)


def comparison(results: dict) -> str:
  """A comparison as a Markdown table, a line a mode."""
  head = (
      "| mode | s | speed-up | ideal | temporaries | cosine | relative error "
      "| worst parameter |\n|---|---|---|---|---|---|---|---|\n"
  )
  lines = [
      f"| {run['mode']} | {run['seconds_median']:.2f} "
      f"| {run['speedup']:.2f}× | {run['ideal_speedup']:.2f}× "
      f"| {run['temp_bytes'] / 2**20:,.0f} MiB "
      f"| {run['gradient_cosine']:.4f} "
      f"| {run['gradient_relative_error']:.1e} "
      f"| {run['worst_parameter']['relative_error']:.1e} |\n"
      for run in results["runs"]
  ]
  return head + "".join(lines)


def _compiled(plan: dict, unit: str = "") -> str:
  """The compiler's peak, in GiB."""
  size = plan.get("compiled_bytes_per_device")
  return f"{size / 2**30:.1f}{unit}" if size else "–"


def plans(results: dict) -> str:
  """Plans of the 8B decoder, those that were compiled first."""
  head = (
      "| mode | trains | parameters | attention | G | P | accumulator "
      "| planned | compiled | longest P at 88 GiB |\n"
      f"|{'---|' * 10}\n"
  )
  rows = []
  for plan in results["plans"]:
    flags = plan["flags"]
    if plan["model"] != "qwen3-8b":
      continue
    rank = flags["adapter_rank"]
    rows.append(
        f"| {plan['mode']} | {f'adapters, rank {rank}' if rank else 'all'} "
        f"| {flags['param_dtype']} "
        f"| {'loops' if flags['attention'] == 'loops' else 'kernel'} "
        f"| {plan['branches']} | {plan['prefix']:,} "
        f"| {'–' if plan['mode'] == 'stop' else flags['accumulator_dtype']} "
        f"| {plan['bytes_per_device']['total'] / 2**30:.1f} GiB "
        f"| {_compiled(plan, ' GiB')} "
        f"| {plan['longest_prefix']:,} |\n"
    )
  return head + "".join(rows)


def hybrid_plans(results: dict) -> str:
  """Plans of the 27B hybrid: what each part of a device's memory holds."""
  kinds = "state", "accumulator", "kept", "working"
  head = (
      f"| mode | trains | parameters | P | weights | {' | '.join(kinds)} "
      "| planned | compiled | fits 88 GiB | longest P that does |\n"
      f"|{'---|' * (len(kinds) + 9)}\n"
  )
  rows = []
  mine = [one for one in results["plans"] if one["model"] == "qwen3.5-27b"]
  mine.sort(key=lambda one: (
      one["prefix"], one["flags"]["adapter_rank"],
      one["flags"]["param_dtype"], one["mode"],
  ))
  for plan in mine:
    rank, size = plan["flags"]["adapter_rank"], plan["bytes_per_device"]
    weights = size["parameters"] + size["gradients"] + size["optimizer"]
    rows.append(
        f"| {plan['mode']} | {f'adapters, rank {rank}' if rank else 'all'} "
        f"| {plan['flags']['param_dtype']} "
        f"| {plan['prefix']:,} | {weights / 2**30:.1f} "
        + "".join(f"| {size[kind] / 2**30:.1f} " for kind in kinds)
        + f"| {size['total'] / 2**30:.1f} | {_compiled(plan)} "
        f"| {'yes' if plan['fits'] else 'no'} | {plan['longest_prefix']:,} |\n"
    )
  return head + "".join(rows)


def rounding(results: dict) -> str:
  """Errors of a bfloat16 accumulator as a Markdown table."""
  head = "| chunks | relative error | worst parameter |\n|---|---|---|\n"
  return head + "".join(
      f"| {case['chunks']} | {case['relative_error']:.1e} "
      f"| {case['worst_parameter']:.1e} |\n"
      for case in results["cases"]
  )


def groups(results: dict) -> str:
  """Estimators on single groups, mean, spread and extremes."""
  head = (
      "| estimator | chunks of 16 | relative error | range | cosine |\n"
      "|---|---|---|---|---|\n"
  )
  chunks = {"stop": 0.0} | results["config"]["estimators"]
  rows = []
  for name, expected in chunks.items():
    far = [group["estimators"][name] for group in results["groups"]
           if not group.get("dead")]
    errors = [one["relative_error"] for one in far]
    cosines = [one["cosine"] for one in far]
    rows.append(
        f"| {name} | {expected:.1f} | {statistics.mean(errors):.2f} "
        f"± {statistics.stdev(errors):.2f} | {min(errors):.2f} to "
        f"{max(errors):.2f} | {statistics.mean(cosines):.2f} "
        f"± {statistics.stdev(cosines):.2f} |\n"
    )
  return head + "".join(rows)


def sums(results: dict) -> str:
  """Estimators on sums of groups: relative error, cosine of Adam."""
  names = ["stop", *results["config"]["estimators"]]
  head = (
      f"| groups | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
  )
  return head + "".join(
      f"| {row['n']} | " + " | ".join(
          f"{row['estimators'][name]['relative_error']:.2f}, "
          f"{row['estimators'][name]['adam_cosine']:.2f}"
          for name in names
      ) + " |\n"
      for row in results["sums"]
  )


def training(results: dict) -> str:
  """The bias in a model that is trained, means over training seeds."""
  head = (
      "| step | nats a byte | stop: cosine | stop | importance | uniform | top "
      "| first 1/16 | last 1/16 |\n|---|---|---|---|---|---|---|---|---|\n"
  )
  rows = []
  for step in results["config"]["steps"]:
    records = [r for r in results["records"] if r["step"] == step]

    def mean(value, records=records):
      return statistics.mean(value(record) for record in records)

    def error(law, mean=mean):
      return mean(lambda record: next(
          one["relative_error"]["mean"] for one in record["estimators"]
          if one["law"] == law
      ))

    rows.append(
        f"| {step} | {mean(lambda r: r['validation_loss']):.2f} "
        f"| {mean(lambda r: r['stop']['cosine']['mean']):.2f} "
        f"| {mean(lambda r: r['stop']['relative_error']['mean']):.2f} | "
        + " | ".join(
            f"{error(law):.2f}" for law in ("importance", "uniform", "top")
        )
        + f" | {mean(lambda r: r['shares']['profile']['first']['mean']):.2f} "
        f"| {mean(lambda r: r['shares']['profile']['last']['mean']):.2f} |\n"
    )
  return head + "".join(rows)


def _shape(row: dict) -> str:
  kind = row["advantages"]
  if row["depth"] is not None:
    kind = f"fact at depth {row['depth']}"
  return (
      f"| {row['prompt_tokens']} | {row['tail_tokens']} | {row['branches']} "
      f"| {kind} "
  )


def _spread(of: dict) -> str:
  return f"{of['mean']:.2f} ± {of['std'] or 0:.2f}"


def by_shape(results: dict) -> str:
  """Stop against exact by shape, mean and spread over groups."""
  head = (
      "| prompt | T | G | advantages | n | cosine | relative error "
      "| norm ratio | key | value | Adam | two largest of 16 |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
  )
  rows = sorted(
      results["summary"]["stop"],
      key=lambda row: (
          row["depth"] is not None, row["advantages"], row["tail_tokens"] != 32,
          row["branches"] != 4, row["prompt_tokens"], row["tail_tokens"],
          row["branches"], row["depth"] or 0,
      ),
  )
  return head + "".join(
      f"{_shape(row)}| {row['cosine']['n']} | {_spread(row['cosine'])} "
      f"| {_spread(row['relative_error'])} | {_spread(row['norm_ratio'])} | "
      + " | ".join(
          f"{row['per_matrix_cosine'][f'layers/project/{x}/kernel']['mean']:.2f}"
          for x in ("key", "value")
      )
      + f" | {row['adam_cosine']['mean']:.2f} "
      f"| {_spread(row['share_of_two_largest_sixteenths'])} |\n"
      for row in rows
  )


def by_estimator(results: dict) -> str:
  """Estimators by shape: error, and how often it is below that of stop."""
  head = (
      "| prompt | T | G | advantages | n | law | chunks of 16 | relative error "
      "| stop | closer than stop |\n|---|---|---|---|---|---|---|---|---|---|\n"
  )
  rows = [
      row for row in results["summary"]["estimators"]
      if row["depth"] is None and row["advantages"] == "random"
      and (row["tail_tokens"], row["branches"]) == (32, 4)
  ]
  rows.sort(key=lambda row: (row["prompt_tokens"], row["law"], row["budget"]))
  return head + "".join(
      f"{_shape(row)}| {row['relative_error']['n']} | {row['law']} "
      f"| {row['chunks_run']['mean']:.1f} | {_spread(row['relative_error'])} "
      f"| {row['stop_relative_error']['mean']:.2f} "
      f"| {row['closer_than_stop']:.0%} |\n"
      for row in rows
  )


def over_shapes(results: dict) -> str:
  """Estimators over all shapes together."""
  head = (
      "| estimator | chunks of 16 | n | relative error | median | cosine "
      "| closer than stop |\n|---|---|---|---|---|---|---|\n"
  )
  return head + "".join(
      f"| {row['law']} | {row['budget']:.1f} | {row['relative_error']['n']} "
      f"| {_spread(row['relative_error'])} "
      f"| {row['median_relative_error']:.2f} | {_spread(row['cosine'])} | "
      + ("–" if row["law"] == "stop" else f"{row['closer_than_stop']:.0%}")
      + " |\n"
      for row in results["summary"]["overall"]
  )


# Of a table's name, the part before a dot is its result file.
_FORMS = {
    "plan": plans,
    "plan.hybrid": hybrid_plans,
    "accumulator_error": rounding,
    "bias_batch.groups": groups,
    "bias_batch.sums": sums,
    "bias_sweep.stop": by_shape,
    "bias_sweep.estimators": by_estimator,
    "bias_sweep.overall": over_shapes,
    "bias_training": training,
    "adapting": training_tables.adapted,
    "compare_trees": compare_trees.table,
    "compare_architectures": compare_trees.table,
    "bench_rollout": training_tables.rollouts,
    "bench_step.growth": speed_tables.growth,
    "bench_step.rates": speed_tables.rates,
    "learning_algorithms": training_tables.curves,
    "learning_drafts": training_tables.curves,
    "learning_modes": training_tables.curves,
    "learning_stale": training_tables.curves,
    "long_run": speed_tables.long_run,
    "long_run_hybrid_stop": speed_tables.long_run,
    "long_run_hybrid": speed_tables.long_run,
    "long_run_stop": speed_tables.long_run,
    "peers": speed_tables.peers,
    "simulate_rollouts": training_tables.simulated,
    "staleness": training_tables.drift,
    "time_breakdown.modes": training_tables.less_time,
    "time_breakdown.parts": training_tables.parts,
    "train_smollm2": training_tables.learned,
    "train_smollm2_stop": training_tables.learned,
    "train_tiny": training_tables.learned,
}


def _results(name: str) -> dict:
  """The result file of a table or a value."""
  file = _ROOT / "experiments" / "results" / f"{name.split('.')[0]}.json"
  return json.loads(file.read_text())


def render(text: str) -> str:
  """The text with every marked table and value drawn from its result file."""
  def table(match):
    form = _FORMS.get(match[1], comparison)
    drawn = form(_results(match[1]))
    return f"<!-- table: {match[1]} -->\n{drawn}<!-- end -->"

  def value(match):
    drawn = prose.VALUES[match[1]](_results(match[1]))
    return f"<!--={match[1]}-->{drawn}<!---->"

  return _VALUE.sub(value, _TABLE.sub(table, text))


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
