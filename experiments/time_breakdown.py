# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: is less compute less time?

The parts of a step (capture, rollout, replay of the tails there and back, the
prefix pass, the optimizer, the gradient on whole sequences) are timed alone,
in a new random order every turn, and set beside the operations they need. What
a mode's step takes is the sum of its parts; the gradient of each mode is timed
whole as well, to see that the parts add up.

  python -m experiments.time_breakdown --config=configs/time_breakdown.py
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm

import branch_replay as br
from branch_replay.planning import flops
from branch_replay.training import step as step_lib
from branch_replay.weights import load as load_lib
from experiments import bench_step
from experiments import cli
from experiments.reporting import record
from experiments.reporting import speed
from experiments.reporting import timing

# Parts that a gradient consists of; sampling needs the capture in any mode.
_GRADIENT = {
    "full": ("whole sequences",), "exact": ("capture", "replay", "prefix pass"),
    "stop": ("capture", "replay"),
}


def operations(model: br.ModelConfig, shape: bench_step.Shape) -> dict:
  """Floating-point operations by part of a step, nothing computed twice.

  None of the optimizer, which is bound by memory.
  """
  prefix, branches, tail = shape
  full, exact, stop = (
      bench_step.useful_flops(model, shape, mode)
      for mode in ("full", "exact", "stop")
  )
  capture = flops.forward(model, prefix, 0)
  head = 2 * model.vocab_size * model.width
  rollout = branches * sum(
      flops.forward(model, 1, prefix + place) + head for place in range(tail)
  )
  return {
      "capture": capture, "rollout": rollout, "replay": stop - capture,
      "prefix pass": exact - stop, "whole sequences": full, "optimizer": None,
  }


def functions(model, params, group, config) -> dict:
  """Functions that run one part of a step each, on prepared inputs."""
  schedule = br.Schedule(chunk_size=config.chunk_size)
  prompt = np.asarray(group.prompt)[: int(group.prompt_length)]
  capture = functools.partial(
      br.capture, model, params, group, schedule=schedule, version=0, keep=True
  )
  kept = capture()
  advantages_G = jnp.asarray(
      np.random.default_rng(config.seed).normal(size=group.tails.shape[0]),
      jnp.float32,
  )
  gradients = {
      mode: functools.partial(
          br.value_and_grad(
              model, _loss, prefix_gradient=mode, schedule=schedule
          ), params, group, advantages_G,
      )
      for mode in speed.STEP_PARTS
  }
  optimizer = optax.adamw(1e-5)
  states = [step_lib.create(jax.tree.map(jnp.copy, params), optimizer)]
  update = jax.jit(
      functools.partial(step_lib.update, optimizer), donate_argnums=0
  )
  grads = jax.tree.map(jnp.zeros_like, params)

  def optimize():
    states[0], _ = update(states[0], grads, jnp.float32(0))
    return states[0]

  return {
      "capture": capture,
      "rollout": lambda: br.sample(
          model, params, prompt, key=jax.random.key(config.seed),
          branches=group.tails.shape[0], max_tokens=group.tails.shape[1],
          state=kept, version=0,
      ).tokens,
      "replay": lambda: gradients["stop"](state=kept, version=0),
      "replay and prefix pass":
          lambda: gradients["exact"](state=kept, version=0),
      "optimizer": optimize,
      **{f"gradient, {mode}": one for mode, one in gradients.items()},
  }


def _loss(log_probs_GT, advantages_G):
  return -jnp.sum(advantages_G[:, None] * log_probs_GT)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Times every part; ValueError for a config that cannot be run."""
  timing.check(config.repeats)
  shape = config.prefix, config.branches, config.tail
  pretrained = load_lib.load(config.model, seed=config.seed)
  model = pretrained.config
  group = bench_step.group_of(model, shape, config.seed)
  parts = functions(pretrained.model, pretrained.params, group, config)
  with tqdm.tqdm(total=(config.repeats + 1) * len(parts)) as bar:
    seconds = timing.in_turns(
        parts, config.repeats, seed=config.seed, warm=False,
        report=lambda *_: bar.update(),
    ).wall
  results = record.begin(
      config, seconds=seconds, **account(seconds, operations(model, shape))
  )
  return record.finish(
      workdir, results, table=speed.breakdown, draw=speed.draw_breakdown
  )


def account(seconds: dict, of: dict) -> dict:
  """Parts and modes from measured times and from operations by part.

  Returns:
    parts, by name seconds, flops and gflops_per_second; and modes, by name
    the step's seconds, its gradient's (whole, and as the sum of its parts),
    and how much less time and compute than "full" both take.
  """
  median = timing.medians(seconds)
  both = median.pop("replay and prefix pass")
  median["prefix pass"] = max(0.0, both - median["replay"])
  median["whole sequences"] = median["gradient, full"]
  parts = {
      name: {
          "seconds": median[name], "flops": count,
          "gflops_per_second": (
              count / median[name] / 1e9 if count and median[name] else None
          ),
      }
      for name, count in of.items()
  }
  modes = {}
  for mode, names in speed.STEP_PARTS.items():
    modes[mode] = {
        "step_seconds": sum(median[name] for name in names),
        "gradient_seconds": median[f"gradient, {mode}"],
        "gradient_seconds_of_parts": sum(
            median[name] for name in _GRADIENT[mode]
        ),
        "gradient_flops": sum(of[name] for name in _GRADIENT[mode]),
    }
  full = modes["full"]
  for one in modes.values():
    one["less_time"] = full["gradient_seconds"] / one["gradient_seconds"]
    one["less_compute"] = full["gradient_flops"] / one["gradient_flops"]
    one["step_speedup"] = full["step_seconds"] / one["step_seconds"]
  return {"parts": parts, "modes": modes}


if __name__ == "__main__":
  cli.main(run, "configs/time_breakdown.py")
