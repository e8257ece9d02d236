# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What being sure costs: fingerprints of parameters, angles without rounding.

  python -m experiments.small_costs [--model=smollm2-135m] [--prefix=1024]

A capture with a given version takes no fingerprint; beside it, the fingerprint
of the same parameters. And one gradient of four tails of 32 tokens, with rotary
angles as they are and with products of float32, which are a quarter of a radian
off at four million positions. Each pair in turns of random order; medians of
wall time and of the processor's. Random parameters: values do not change the
work. A fingerprint writes an eighth of the bytes that it reads: straight after
a program that gave much memory back, as a gradient does, the pages for that
are new and it takes longer; that figure is given too.
"""

import functools
import json
import random
import statistics
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import fingerprint
from branch_replay import flops
from branch_replay import presets
from branch_replay.ops import rope
from experiments import record


def in_turns(parts: dict, repeats: int) -> tuple[dict, dict]:
  """Times functions in turns of random order.

  Args:
    parts: functions without arguments, by name; each returns arrays.
    repeats: turns that are timed, after one that compiles.

  Returns:
    Seconds of wall time and of the processor's, a list for every name.
  """
  wall, processor = ({name: [] for name in parts} for _ in range(2))
  order = random.Random(0)
  for turn in range(repeats + 1):
    for name in order.sample(list(parts), len(parts)):
      start, start_cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(parts[name]())
      if turn:
        wall[name].append(time.perf_counter() - start)
        processor[name].append(time.process_time() - start_cpu)
  return wall, processor


def run(model: str, prefix: int, repeats: int) -> dict:
  """Times everything, see the module.

  Args:
    model: a preset, or a Hugging Face config.json.
    prefix: P, captured positions.
    repeats: of each.

  Returns:
    Medians in seconds, ratios, and what a fingerprint has to do at least.
  """
  config = presets.geometry(model)
  decoder = br.Decoder(config)
  params = jax.jit(decoder.init)(
      jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  ids = np.random.default_rng(0).integers(0, config.vocab_size, prefix + 1)
  group = br.Group.create(ids, [ids[:32]] * 4, config=config)
  # Two losses, or the second would be given the programs of the first.
  exact = jax.jit(br.value_and_grad(decoder, lambda x: x.sum()))
  rounded = jax.jit(br.value_and_grad(decoder, lambda x: x.sum()))
  parts = {
      "capture": functools.partial(
          br.capture, decoder, params, ids, version=0
      ),
      "fingerprint": functools.partial(fingerprint.of_params, params),
      "gradient": lambda: exact(params, group)[1],
      "gradient, rounded angles": lambda: rounded(params, group)[1],
  }
  angles = rope.angles
  parts["gradient"]()
  try:  # which angles a program has is settled when it is compiled
    rope.angles = rounded_angles
    parts["gradient, rounded angles"]()
  finally:
    rope.angles = angles
  wall, processor = in_turns(
      {name: parts[name] for name in ("capture", "fingerprint")}, repeats
  )
  others = in_turns(
      {name: part for name, part in parts.items() if name != "capture"}, repeats
  )
  cold = statistics.median(others[0].pop("fingerprint"))
  others[1].pop("fingerprint")
  wall |= others[0]
  processor |= others[1]
  seconds, cpu = (
      {name: statistics.median(x) for name, x in of.items()}
      for of in (wall, processor)
  )
  ratios = [
      mine / other for mine, other in zip(
          wall["gradient"], wall["gradient, rounded angles"], strict=True
      )
  ]
  return {
      "environment": record.environment(), "model": model, "prefix": prefix,
      "seconds": seconds, "processor_seconds": cpu,
      "fingerprint_by_capture": seconds["fingerprint"] / seconds["capture"],
      "fingerprint_by_capture_processor":
          cpu["fingerprint"] / cpu["capture"],
      "fingerprint_after_gradients_seconds": cold,
      "gradient_by_rounded": statistics.median(ratios),
      "gradient_by_rounded_range": [min(ratios), max(ratios)],
      "bytes_read": sum(x.nbytes for x in jax.tree.leaves(params)),
      "capture_flops": flops.forward(config, prefix, 0),
  }


def rounded_angles(positions_GT, inverse_H, dtype):
  """Position · frequency as a product of float32; see `rope.angles`."""
  return positions_GT[..., None].astype(dtype) * jnp.asarray(
      inverse_H, dtype
  )[None, None]


def _main(_):
  values = flags.FLAGS
  print(json.dumps(
      run(values.model, values.prefix, values.repeats), indent=1
  ))


if __name__ == "__main__":
  flags.DEFINE_string("model", "smollm2-135m", "A preset, or a config.json.")
  flags.DEFINE_integer("prefix", 1024, "P, captured positions.")
  flags.DEFINE_integer("repeats", 7, "Turns that are timed.")
  app.run(_main)
