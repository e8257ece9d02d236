# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What telling parameters apart costs, beside the capture that it is for.

  python -m experiments.fingerprint_cost [--model=smollm2-135m] [--prefix=1024]

Captures a prompt with a given version, which takes no fingerprint, and takes
the fingerprint of the same parameters; in turns, medians of wall time and of
the processor's. Random parameters: their values do not change the work.
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
from experiments import record


def run(model: str, prefix: int, repeats: int) -> dict:
  """Times both, see the module.

  Args:
    model: a preset, or a Hugging Face config.json.
    prefix: P, captured positions.
    repeats: of each.

  Returns:
    Medians in seconds, their ratios, and what both have to do at least.
  """
  config = presets.geometry(model)
  decoder = br.Decoder(config)
  params = jax.jit(decoder.init)(
      jax.random.key(0), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  prompt = np.random.default_rng(0).integers(0, config.vocab_size, prefix + 1)
  parts = {
      "capture": functools.partial(
          br.capture, decoder, params, prompt, version=0
      ),
      "fingerprint": functools.partial(fingerprint.of_params, params),
  }
  wall, processor = ({name: [] for name in parts} for _ in range(2))
  order = random.Random(0)
  for turn in range(repeats + 1):
    for name in order.sample(list(parts), len(parts)):
      start, start_cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(parts[name]())
      if turn:  # the first one compiles
        wall[name].append(time.perf_counter() - start)
        processor[name].append(time.process_time() - start_cpu)
  seconds, cpu = (
      {name: statistics.median(x) for name, x in of.items()}
      for of in (wall, processor)
  )
  return {
      "environment": record.environment(), "model": model, "prefix": prefix,
      "seconds": seconds, "processor_seconds": cpu,
      "share_of_seconds": seconds["fingerprint"] / seconds["capture"],
      "share_of_processor_seconds": cpu["fingerprint"] / cpu["capture"],
      "bytes_read": sum(x.nbytes for x in jax.tree.leaves(params)),
      "capture_flops": flops.forward(config, prefix, 0),
  }


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
