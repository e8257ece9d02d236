# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What an accumulator in bfloat16 costs in accuracy, by number of chunks.

Each chunk's cotangent is added to once per later chunk and visit, so rounding
grows with their number. A random decoder, the exact gradient with a float32
accumulator as the reference.

  python -m experiments.accumulator_error

Cost: about two minutes.
"""

import pathlib

from absl import app
import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import compare
from experiments import cli
from experiments import record

_FILE = pathlib.Path(__file__).parent / "results" / "accumulator_error.json"
_PREFIX, _CHUNKS = 1088, (4, 32, 136)
_CONFIG = br.ModelConfig(
    vocab_size=256, width=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=176, max_positions=2048,
)


def _loss(log_probs_GT, advantages_G):
  return jnp.sum(log_probs_GT * advantages_G[:, None])


def run(seeds: int = 3) -> dict:
  """Relative error of the gradient, whole and worst parameter.

  Args:
    seeds: parameters and tokens to average over.

  Returns:
    What is written to the result file.
  """
  model = br.Decoder(_CONFIG)
  cases = []
  for chunks in _CHUNKS:
    errors = []
    for seed in range(seeds):
      rng = np.random.default_rng(seed)
      params = model.init(
          jax.random.key(seed), jnp.zeros((1, 1), jnp.int32)
      )["params"]
      group = br.Group.create(
          rng.integers(0, 256, _PREFIX + 1), rng.integers(0, 256, (4, 32)),
          config=_CONFIG,
      )
      advantages_G = jnp.asarray([1.0, -1.0, 0.5, -0.5])
      wanted, found = (
          br.value_and_grad(
              model, _loss, schedule=br.Schedule(
                  chunk_size=_PREFIX // chunks, accumulator_dtype=dtype
              ),
          )(params, group, advantages_G)[1]
          for dtype in (None, "bfloat16")
      )
      distance = compare.compare(found, wanted)
      errors.append((distance.relative_error, distance.worst_error))
    whole, worst = np.mean(errors, axis=0)
    cases.append({
        "chunks": chunks, "relative_error": float(whole),
        "worst_parameter": float(worst), "seeds": seeds,
    })
    print(cases[-1])
  found = {"environment": record.environment(), "cases": cases}
  record.write_json(_FILE, found)
  print(f"Wrote {_FILE}.")
  return found


def _main(_):
  run()


if __name__ == "__main__":
  app.run(cli.without_words(_main))
