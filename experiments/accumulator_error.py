# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What an accumulator in bfloat16 costs in accuracy, by number of chunks.

Each chunk's cotangent is added to once per later chunk and visit, so rounding
grows with their number. A random decoder, the exact gradient with a float32
accumulator as the reference.

  python -m experiments.accumulator_error

Writes experiments/results/accumulator_error.json. Cost: about two minutes.
"""

from absl import app
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay.planning import compare
from branch_replay.weights import load
from experiments import cli
from experiments.reporting import comparisons
from experiments.reporting import record

_PREFIX, _CHUNKS = 1088, (4, 32, 136)
_CONFIG = br.ModelConfig(
    vocab_size=256, width=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=176, max_positions=2048,
)


def _errors(chunks: int, seed: int) -> tuple[float, float]:
  """Relative error of the gradient, whole and of the worst parameter."""
  rng = np.random.default_rng(seed)
  model, params = load.random(_CONFIG, seed)
  group = br.Group.create(
      rng.integers(0, 256, _PREFIX + 1), rng.integers(0, 256, (4, 32)),
      config=_CONFIG,
  )
  advantages_G = jnp.asarray([1.0, -1.0, 0.5, -0.5])
  wanted, found = (
      br.value_and_grad(
          model, lambda log_probs_GT, a_G: jnp.sum(log_probs_GT * a_G[:, None]),
          schedule=br.Schedule(
              chunk_size=_PREFIX // chunks, accumulator_dtype=dtype
          ),
      )(params, group, advantages_G)[1]
      for dtype in (None, "bfloat16")
  )
  distance = compare.compare(found, wanted)
  return distance.relative_error, distance.worst_error


def run(seeds: int = 3) -> dict:
  """Writes and returns the errors, averaged over so many models."""
  cases = []
  for chunks in _CHUNKS:
    whole, worst = np.mean(
        [_errors(chunks, seed) for seed in range(seeds)], axis=0
    )
    cases.append({
        "chunks": chunks, "relative_error": float(whole),
        "worst_parameter": float(worst), "seeds": seeds,
    })
  found = {"environment": record.environment(), "cases": cases}
  record.write_json(record.RESULTS / "accumulator_error.json", found)
  print(comparisons.rounding(found))
  return found


if __name__ == "__main__":
  app.run(cli.without_words(lambda _: run()))
