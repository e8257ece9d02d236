# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Says what a training step needs before anyone runs it.

  python -m experiments.plan --model=qwen3-8b --prefix=2097152 --branches=8 \\
    --tail=8192 --mode=exact --target=v5p:2x2x2

Analytic and instant, for TPU slices and for GPUs by number (--target=h100:8).
With --compile the real training step is lowered and
compiled for the target, which needs no such device but the TPU compiler:
pip install "jax[tpu]" in an environment of its own.

  python -m experiments.plan --committed

fills experiments/results/plan.json: how far eight chips reach with an 8B
decoder, and with a 27B hybrid of gated delta layers and full attention. Cases
that the file has are kept. Minutes a compilation.
"""

import dataclasses
import json
import sys
import types
import typing

from absl import app
from absl import flags
import tqdm

from branch_replay import config as config_lib
from branch_replay.ops.attention import kernels
from branch_replay.planning import plan
from branch_replay.planning import presets
from experiments import cli
from experiments import compile_step
from experiments.reporting import record

_GIB = plan.GIB
_BASE = dict(
    model="qwen3-8b", prefix=2097152, branches=8, tail=8192, mode="exact",
    target="v5p:2x2x2", budget_gib=88.0, chunk=8192, branches_at_once=1,
    activations="recompute_layers", accumulator_dtype="bfloat16",
    param_dtype="bfloat16", moments_dtype="bfloat16", adapter_rank=0,
    compile=True, attention="loops",
)
# The published shape; what more branches cost; other reaches.
_COMPILED = (
    dict(), dict(mode="stop"), dict(branches=2), dict(adapter_rank=16),
    dict(mode="stop", adapter_rank=16), dict(prefix=262144),
    dict(prefix=262144, accumulator_dtype="float32"),
)
# The same by the platform's kernel.
_BY_KERNEL = (
    dict(attention="auto"), dict(attention="auto", mode="stop"),
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


def _define_flags():
  for name, default, text in (
      ("model", "qwen3-8b",
       f"A preset ({', '.join(presets.PRESETS)}), or a config.json."),
      ("target", "v5p:2x2x2",
       f"Devices to plan for: {', '.join(compile_step.NAMES)}."),
      ("accumulator_dtype", "bfloat16",
       "Of the prefix's cotangent: bfloat16 or float32."),
      ("param_dtype", None,
       "Of stored parameters. By default float32 where all are trained, as "
       "training does, and bfloat16 below adapters."),
      ("moments_dtype", "bfloat16", "Of Adam's two moments."),
  ):
    flags.DEFINE_string(name, default, text)
  for name, default, text in (
      ("prefix", 2097152, "P, captured positions."),
      ("branches", 8, "G, tails of the group."),
      ("tail", 8192, "T, tokens of a tail."),
      ("chunk", 8192, "Positions run at a time."),
      ("branches_at_once", 1, "Tails run at a time."),
      ("adapter_rank", 0, "Train adapters of this rank; 0 trains everything."),
  ):
    flags.DEFINE_integer(name, default, text)
  for name, default, values, text in (
      ("mode", "exact", ("exact", "sampled", "stop"), "Prefix gradient."),
      ("activations", "recompute_layers",
       ("keep", "recompute", "recompute_layers"), "What a segment keeps."),
      ("attention", "auto", typing.get_args(kernels.Name),
       "What attention is compiled with."),
  ):
    flags.DEFINE_enum(name, default, values, text)
  flags.DEFINE_float(
      "budget_gib", None, "Memory of a device to fit; the target's by default."
  )
  flags.DEFINE_bool("compile", False, "Ask the target's compiler too.")
  flags.DEFINE_bool("json", False, "Print one JSON object.")
  flags.DEFINE_bool("committed", False, "Fill results/plan.json instead.")


def step_of(values) -> plan.Step:
  """The step of the flags; ValueError for one that cannot be."""
  config = presets.geometry(values.model)
  adapter = None
  if values.adapter_rank:
    adapter = config_lib.Adapter(values.adapter_rank, 2.0 * values.adapter_rank)
  param_dtype = values.param_dtype
  if param_dtype is None:
    param_dtype = "bfloat16" if adapter else "float32"
  config = dataclasses.replace(
      config, param_dtype=param_dtype, compute_dtype="bfloat16",
      adapter=adapter,
      max_positions=max(config.max_positions, values.prefix + values.tail + 1),
  )
  return plan.Step(
      config, values.prefix, values.branches, values.tail, values.mode,
      devices=compile_step.target(values.target).devices,
      chunk_size=values.chunk, branches_at_once=values.branches_at_once,
      activations=values.activations,
      accumulator_dtype=values.accumulator_dtype,
      moments_dtype=values.moments_dtype,
      trainable="adapters" if adapter else "all",
      attention=values.attention,
  )


def run(values) -> dict:
  """The plan of the flags as one object; see docs/formats.md."""
  step = step_of(values)
  target = compile_step.target(values.target)
  budget = target.bytes if values.budget_gib is None else int(
      values.budget_gib * _GIB
  )
  per_device = plan.bytes_per_device(step)
  longest = plan.longest_prefix(step, budget)
  context = presets.geometry(values.model).max_positions
  found = {
      "model": values.model, "mode": values.mode, "target": values.target,
      "prefix": step.prefix, "branches": step.branches, "tail": step.tail,
      "trainable": step.trainable, "budget_bytes": budget,
      "bytes_per_device": per_device, **plan.work(step),
      "fits": per_device["total"] <= budget, "longest_prefix": longest,
      "model_positions": context,
      "longest_prefix_in_context": max(0, min(longest, context - step.tail)),
  }
  if values.compile:
    found |= compile_step.compile_step(step, target)
  return found


def table(found: dict) -> str:
  """The plan as text."""
  per_device = found["bytes_per_device"]
  lines = [
      f"{found['model']}, {found['mode']}, P={found['prefix']:,} "
      f"G={found['branches']} T={found['tail']:,} on {found['target']}, "
      f"trains {found['trainable']}"
  ]
  lines += [
      f"  {kind:<12} {size / _GIB:8.2f} GiB a device"
      for kind, size in per_device.items()
  ]
  lines += [
      f"  fits {found['budget_bytes'] / _GIB:.1f} GiB: "
      f"{'yes' if found['fits'] else 'no'}; longest prefix that does: "
      f"{found['longest_prefix']:,}",
      *_context(found),
      f"  {found['flops']:.3g} operations; ideal speed-up over full "
      f"{found['ideal_speedup']:.2f}×",
  ]
  if "compiled_bytes_per_device" in found:
    lines.append(
        f"  compiled: {found['compiled_bytes_per_device'] / _GIB:.2f} GiB a "
        f"device, in {found['compile_seconds']:.0f} s; copies of the state in "
        f"another layout: {found['state_layout_copies']}"
    )
  return "\n".join(lines)


def _context(found: dict) -> list[str]:
  """A line if a plan exceeds the positions that the model was made for."""
  positions, tail = found["model_positions"], found["tail"]
  beyond = [
      what for what, prefix in (
          ("this plan", found["prefix"]),
          ("the longest", found["longest_prefix"]),
      ) if prefix + tail > positions
  ]
  if not beyond:
    return []
  return [
      f"  the model has {positions:,} positions, {' and '.join(beyond)} more: "
      "they need a model trained or scaled for it. Within them the longest "
      f"prefix is {found['longest_prefix_in_context']:,}"
  ]


def committed() -> None:
  """Adds the cases that the result file does not have."""
  file = record.RESULTS / "plan.json"
  found = json.loads(file.read_text()) if file.exists() else {"plans": []}
  done = [one["flags"] for one in found["plans"]]
  cases = [
      _BASE | changes
      for changes in _COMPILED + _BY_KERNEL + _PLANNED + _HYBRID + _FLOAT32
  ]
  for case in tqdm.tqdm([one for one in cases if one not in done]):
    one = run(types.SimpleNamespace(**case))
    print(table(one))
    found["plans"].append({"flags": case, **one})
    if case["compile"]:  # arithmetic is the same anywhere
      found["environment"] = record.environment()
    record.write_json(file, found)
  print(f"{file} has {len(found['plans'])} plans.")


def _main(_):
  values = flags.FLAGS
  if values.committed:
    committed()
    return
  try:
    found = run(values)
  except ValueError as error:
    sys.exit(f"error: {error}")
  print(json.dumps(found) if values.json else table(found))


if __name__ == "__main__":
  _define_flags()
  app.run(cli.without_words(_main))
