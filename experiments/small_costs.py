# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What being sure costs: fingerprints of parameters, angles without rounding.

  python -m experiments.small_costs [--model=smollm2-135m] [--prefix=1024]

A capture with a given version takes no fingerprint; beside it, the fingerprint
of the same parameters. And one gradient of four tails of 32 tokens, with rotary
angles as they are and with products of float32, which are a quarter of a radian
off at four million positions. Each pair in turns; medians of wall time and of
the processor's. Random parameters: values do not change the work. A fingerprint
writes an eighth of the bytes that it reads: straight after a program that gave
much memory back, as a gradient does, the pages for that are new and it takes
longer; that figure is given too.
"""

import functools
import json
import statistics

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import fingerprint
from branch_replay import flops
from branch_replay.ops import rope
from branch_replay.weights import load as load_lib
from experiments import cli
from experiments.reporting import record
from experiments.reporting import timing


def run(model: str, prefix: int, repeats: int) -> dict:
  """Medians in seconds, ratios, and what a fingerprint has to do at least."""
  pretrained = load_lib.load(model)
  decoder, params = pretrained.model, pretrained.params
  config = decoder.config
  ids = np.random.default_rng(0).integers(0, config.vocab_size, prefix + 1)
  group = br.Group.create(ids, [ids[:32]] * 4, config=config)
  # Two losses, or the second would be given the programs of the first.
  exact = jax.jit(br.value_and_grad(decoder, lambda x: x.sum()))
  rounded = jax.jit(br.value_and_grad(decoder, lambda x: x.sum()))
  parts = {
      "capture": functools.partial(br.capture, decoder, params, ids, version=0),
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

  def times(*names):
    return timing.in_turns(
        {name: parts[name] for name in names}, repeats, warm=False
    )

  first, others = times("capture", "fingerprint"), times(*list(parts)[1:])
  seconds, processor = (
      timing.medians(theirs | mine)
      for mine, theirs in zip(first, others, strict=True)
  )
  ratios = [
      mine / other for mine, other in zip(
          others.wall["gradient"], others.wall["gradient, rounded angles"],
          strict=True,
      )
  ]
  return {
      "environment": record.environment(), "model": model, "prefix": prefix,
      "seconds": seconds, "processor_seconds": processor,
      "fingerprint_by_capture": seconds["fingerprint"] / seconds["capture"],
      "fingerprint_by_capture_processor":
          processor["fingerprint"] / processor["capture"],
      "fingerprint_after_gradients_seconds":
          statistics.median(others.wall["fingerprint"]),
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
  flags.DEFINE_string("model", "smollm2-135m", "See `weights.load.load`.")
  flags.DEFINE_integer("prefix", 1024, "P, captured positions.")
  flags.DEFINE_integer("repeats", 7, "Turns that are timed.")
  app.run(cli.without_words(_main))
