# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Time of a fingerprint of parameters, beside that of a capture.

  python -m experiments.small_costs [--model=smollm2-135m] [--prefix=1024]

A capture with a given version takes no fingerprint; beside it, the fingerprint
of the same parameters, in turns; medians of wall time and of the processor's. A
fingerprint writes an eighth of the bytes that it reads: straight after a
program that gave much memory back, as a gradient does, the pages for that are
new and it takes longer; that figure, after a gradient of four tails of 32
tokens, is given too.
"""

import functools
import json

from absl import app
from absl import flags
import jax
import numpy as np

import branch_replay as br
from branch_replay.engine import fingerprint
from branch_replay.weights import load as load_lib
from experiments import cli
from experiments.reporting import record
from experiments.reporting import timing


def run(model: str, prefix: int, repeats: int) -> dict:
  """Medians in seconds and their ratios, for a model of `load`."""
  pretrained = load_lib.load(model)
  decoder, params = pretrained.model, pretrained.params
  ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, prefix)
  group = br.Group.create(ids, [ids[:32]] * 4, config=decoder.config)
  gradient = jax.jit(br.value_and_grad(decoder, lambda x: x.sum()))
  parts = {
      "capture": functools.partial(br.capture, decoder, params, ids, version=0),
      "fingerprint": functools.partial(fingerprint.of_params, params),
  }
  wall, processor = map(
      timing.medians, timing.in_turns(parts, repeats, warm=False)
  )
  cold = []
  for _ in range(repeats):
    jax.block_until_ready(gradient(params, group))
    cold.append(timing.seconds(parts["fingerprint"]))
  return {
      "environment": record.environment(), "model": model, "prefix": prefix,
      "seconds": wall, "processor_seconds": processor,
      "fingerprint_by_capture": wall["fingerprint"] / wall["capture"],
      "fingerprint_after_gradients_seconds": float(np.median(cold)),
      "bytes_read": sum(x.nbytes for x in jax.tree.leaves(params)),
  }


def _main(_):
  values = flags.FLAGS
  print(json.dumps(
      run(values.model, values.prefix, values.repeats), indent=1
  ))


if __name__ == "__main__":
  flags.DEFINE_string("model", "smollm2-135m", "See `weights.load.load`.")
  flags.DEFINE_integer("prefix", 1024, "Tokens that are captured.")
  flags.DEFINE_integer("repeats", 7, "Turns that are timed.")
  app.run(cli.without_words(_main))
