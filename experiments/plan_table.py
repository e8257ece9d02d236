# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How far eight chips reach: plans of an 8B decoder, most of them compiled.

And of a 27B hybrid of gated delta layers and full attention.

  python -m experiments.plan_table

Cost: minutes a compilation, one at a time, in an environment with the TPU
compiler. What is done is kept in the result file and not compiled again.
"""

import json
import pathlib
import types

from absl import app
import tqdm

from experiments import cli
from experiments import plan as planner
from experiments import record

_FILE = pathlib.Path(__file__).parent / "results" / "plan.json"
_BASE = dict(
    model="qwen3-8b", prefix=2097152, branches=8, tail=8192, mode="exact",
    target="v5p:2x2x2", budget_gib=88.0, chunk=8192, branches_at_once=1,
    activations="recompute_layers", accumulator_dtype="bfloat16",
    param_dtype="bfloat16", moments_dtype="bfloat16", adapter_rank=0,
    compile=True, attention="loops",
)
# The published shape; what more branches cost; other reaches.
_COMPILED = (
    dict(),
    dict(mode="stop"),
    dict(branches=2),
    dict(adapter_rank=16),
    dict(mode="stop", adapter_rank=16),
    dict(prefix=262144),
    dict(prefix=262144, accumulator_dtype="float32"),
)
# The same by the platform's kernel.
_BY_KERNEL = (
    dict(attention="auto"),
    dict(attention="auto", mode="stop"),
    dict(attention="auto", prefix=262144),
)
# What does not fit at this length is planned and not compiled.
_PLANNED = tuple(
    dict(accumulator_dtype="float32", adapter_rank=rank, compile=False)
    for rank in (0, 16)
)
# Parameters in float32, as training stores them.
_FLOAT32 = tuple(
    dict(param_dtype="float32", compile=False, **changes)
    for changes in (
        dict(), dict(mode="stop"), dict(prefix=262144),
        dict(model="qwen3.5-27b"), dict(model="qwen3.5-27b", mode="stop"),
    )
)
_HYBRID = tuple(
    dict(
        model="qwen3.5-27b", prefix=prefix, mode=mode, adapter_rank=rank,
        compile=(prefix, mode, rank) != (4456448, "exact", 0),  # too large
    )
    for prefix in (2097152, 4456448)
    for rank in (0, 16)
    for mode in ("exact", "stop")
)


def run(_):
  """Fills the result file with the cases that it does not have."""
  found = json.loads(_FILE.read_text()) if _FILE.exists() else {"plans": []}
  done = [plan["flags"] for plan in found["plans"]]
  cases = _COMPILED + _BY_KERNEL + _PLANNED + _HYBRID + _FLOAT32
  for changes in tqdm.tqdm(cases, desc="plans"):
    flags = _BASE | changes
    if flags in done:
      continue
    plan = planner.run(types.SimpleNamespace(**flags))
    print(planner.table(plan))
    found["plans"].append({"flags": flags, **plan})
    if flags["compile"]:  # arithmetic is the same anywhere
      found["environment"] = record.environment()
    record.write_json(_FILE, found)
  print(f"Wrote {_FILE}.")


if __name__ == "__main__":
  app.run(cli.without_words(run))
