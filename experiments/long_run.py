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
from branch_replay import flops
from branch_replay import host_loop
from branch_replay import sharding
from experiments import cli
from experiments import record

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
  """Runs it; see the module.

  Args:
    config: configs/long_run.py.
    workdir: where results.json goes.

  Returns:
    What is written: seconds, operations, peak memory, and norms that show the
    gradient is there and finite.

  Raises:
    KeyboardInterrupt: interrupted; what there is of the results is written.
  """
  geometry = _geometry(config.model)
  model = br.Decoder(geometry)
  rng = np.random.default_rng(config.seed)
  params = model.init(
      jax.random.key(config.seed), jnp.zeros((1, 1), jnp.int32)
  )["params"]
  shape = config.branches, config.tail_tokens
  group = br.Group.create(
      rng.integers(0, geometry.vocab_size, config.prefix + 1),
      rng.integers(0, geometry.vocab_size, shape),
      config=geometry,
  )
  advantages_G = jnp.asarray(rng.normal(size=config.branches), jnp.float32)
  layout = sharding.sharded(params, config.devices)
  params = layout.place(params)
  schedule = br.Schedule(
      chunk_size=config.chunk_size, activations="recompute",
      accumulator_dtype=config.accumulator_dtype, layout=layout,
  )
  before = record.peak_rss_bytes()
  start = time.perf_counter()

  def so_far(finished: bool) -> dict:
    return {
        "environment": record.environment(),
        "config": config.to_dict(),
        "finished": finished,
        "seconds": time.perf_counter() - start,  # compilation included
        "cpu_seconds": time.process_time(),
        "flops": flops.gradient(
            geometry, prefix=config.prefix, branches=config.branches,
            tail=config.tail_tokens, mode=config.mode, policy="recompute",
        ),
        "peak_rss_bytes": record.peak_rss_bytes(),
        "rss_before_bytes": before,
    }

  gradient = host_loop.value_and_grad(
      model, _loss, prefix_gradient=config.mode, schedule=schedule,
      offload=config.offload,
  )
  try:
    evaluation, grads = gradient(params, group, advantages_G)
    jax.block_until_ready(grads)
  except KeyboardInterrupt:
    stopped = so_far(finished=False)
    record.write_json(workdir / "results.json", stopped)
    print(
        f"Interrupted after {stopped['seconds']:.0f} s; wrote "
        f"{workdir / 'results.json'}.", file=sys.stderr,
    )
    raise
  results = so_far(finished=True)
  norms = [float(jnp.linalg.norm(x.ravel())) for x in jax.tree.leaves(grads)]
  results |= {
      "loss": float(evaluation.loss),
      "gradient_norm": float(np.linalg.norm(norms)),
      "finite": bool(np.isfinite(norms).all()),
  }
  record.write_json(workdir / "results.json", results)
  print(
      f"{config.mode}, P={config.prefix:,}: {results['seconds']:.1f} s, "
      f"{results['peak_rss_bytes'] / 2**30:.2f} GiB resident at the peak, "
      f"{before / 2**30:.2f} before; gradient norm "
      f"{results['gradient_norm']:.4g}"
  )
  print(f"Wrote {workdir / 'results.json'}.")
  return results


if __name__ == "__main__":
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = " ".join((flags, *_PATIENCE))
  cli.main(run, "configs/long_run.py")
