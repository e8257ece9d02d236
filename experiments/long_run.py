# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient over a very long prefix, chunk by chunk from the host.

  python -m experiments.long_run --config=configs/long_run.py

A progress bar counts chunks, there and back, and visits. An interrupt stops
between two of them; results.json then says how far it came.
"""

import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.planning import flops
from branch_replay.weights import load
from experiments import cli
from experiments.reporting import record
from experiments.reporting import speed

# Virtual devices of one machine take turns: without these, XLA ends a process
# whose devices wait for each other longer than forty seconds.
_PATIENCE = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
)


def _loss(log_probs_GT, advantages_G):
  return -jnp.sum(log_probs_GT * advantages_G[:, None])


def _geometry(model: ml_collections.ConfigDict) -> br.ModelConfig:
  fields = model.to_dict()
  if "delta" in fields:
    fields["delta"] = br.GatedDelta(**fields["delta"])
  return br.ModelConfig(**fields)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs it, interrupted or not writes results.json, and returns what it holds.
  """
  geometry = _geometry(config.model)
  rng = np.random.default_rng(config.seed)
  model, params = load.random(geometry, config.seed)
  shape = config.branches, config.tail_tokens
  group = br.Group.create(
      rng.integers(0, geometry.vocab_size, config.prefix + 1),
      rng.integers(0, geometry.vocab_size, shape), config=geometry,
  )
  advantages_G = jnp.asarray(rng.normal(size=config.branches), jnp.float32)
  layout = sharding.sharded(params, config.devices)
  params = layout.place(params)
  gradient = br.value_and_grad(
      model, _loss, prefix_gradient=config.mode,
      hosted=br.Hosted(progress=True, offload=config.offload),
      schedule=br.Schedule(
          chunk_size=config.chunk_size, activations="recompute",
          accumulator_dtype=config.accumulator_dtype, layout=layout,
      ),
  )
  results = record.begin(
      config, finished=False, rss_before_bytes=record.peak_rss_bytes(),
      flops=flops.gradient(
          geometry, prefix=config.prefix, branches=config.branches,
          tail=config.tail_tokens, mode=config.mode, policy="recompute",
      ),
  )
  start = time.perf_counter()
  try:
    evaluation, grads = jax.block_until_ready(
        gradient(params, group, advantages_G)
    )
    norms = [float(jnp.linalg.norm(x.ravel())) for x in jax.tree.leaves(grads)]
    results |= {
        "finished": True, "loss": float(evaluation.loss),
        "gradient_norm": float(np.linalg.norm(norms)),
        "finite": bool(np.isfinite(norms).all()),
    }
  except KeyboardInterrupt:
    print(f"Interrupted after {time.perf_counter() - start:.0f} s.",
          file=sys.stderr)
    raise
  finally:
    results |= {
        "seconds": time.perf_counter() - start,  # compilation included
        "cpu_seconds": time.process_time(),
        "peak_rss_bytes": record.peak_rss_bytes(),
    }
    record.save(workdir, results)
  return record.finish(workdir, results, table=speed.long_run)


if __name__ == "__main__":
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = " ".join((flags, *_PATIENCE))
  cli.main(run, "configs/long_run.py")
