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
import random
import statistics
import time

import jax
import jax.numpy as jnp
import matplotlib
import ml_collections
import numpy as np
import optax
import tqdm

import branch_replay as br
from branch_replay import flops
from branch_replay.training import step as step_lib
from experiments import bench_step
from experiments import cli
from experiments import compare_backward
from experiments import record

MODES = {
    "full": ("capture", "rollout", "whole sequences", "optimizer"),
    "exact": ("capture", "rollout", "replay", "prefix pass", "optimizer"),
    "stop": ("capture", "rollout", "replay", "optimizer"),
}
# Parts that a gradient consists of; sampling needs the capture in any mode.
_GRADIENT = {
    "full": ("whole sequences",),
    "exact": ("capture", "replay", "prefix pass"),
    "stop": ("capture", "replay"),
}


def operations(model: br.ModelConfig, shape: bench_step.Shape) -> dict:
  """Floating-point operations of every part, nothing computed twice.

  Args:
    model: geometry.
    shape: P, G, T.

  Returns:
    By part; None of the optimizer, which is bound by memory.
  """
  prefix, branches, tail = shape
  gradient = functools.partial(bench_step.useful_flops, model, shape)
  capture = flops.forward(model, prefix, 0)
  head = 2 * model.vocab_size * model.width
  rollout = branches * sum(
      flops.forward(model, 1, prefix + place) + head for place in range(tail)
  )
  return {
      "capture": capture,
      "rollout": rollout,
      "replay": gradient("stop") - capture,
      "prefix pass": gradient("exact") - gradient("stop"),
      "whole sequences": gradient("full"),
      "optimizer": None,
  }


class Parts:
  """Functions that run one part each, on prepared inputs.

  Args:
    model: the decoder.
    params: its parameters.
    group: prompt and tails.
    config: of the experiment.
  """

  def __init__(self, model, params, group, config):
    self._model, self._params, self._group = model, params, group
    schedule = br.Schedule(chunk_size=config.chunk_size)
    prompt = np.asarray(group.prompt)[: int(group.prompt_length)]
    self._capture = functools.partial(
        br.capture, model, params, group, schedule=schedule, version=0
    )
    kept = self._capture(keep=True)
    advantages = jnp.asarray(
        np.random.default_rng(config.seed).normal(size=group.tails.shape[0]),
        jnp.float32,
    )
    gradients = {
        mode: br.value_and_grad(
            model, _loss, prefix_gradient=mode, schedule=schedule
        )
        for mode in MODES
    }

    def gradient(mode, state=None):
      options = {} if state is None else {"state": state, "version": 0}
      return gradients[mode](params, group, advantages, **options)

    optimizer = optax.adamw(1e-5)
    self._train_state = step_lib.create(
        jax.tree.map(jnp.copy, params), optimizer
    )
    update = jax.jit(
        functools.partial(step_lib.update, optimizer), donate_argnums=0
    )
    grads = jax.tree.map(jnp.zeros_like, params)

    def optimize():
      self._train_state, _ = update(self._train_state, grads, jnp.float32(0))
      return self._train_state

    self.run = {
        "capture": functools.partial(self._capture, keep=True),
        "rollout": lambda: br.sample(
            model, params, prompt, key=jax.random.key(config.seed),
            branches=group.tails.shape[0], max_tokens=group.tails.shape[1],
            state=kept, version=0,
        ).tokens,
        "replay": lambda: gradient("stop", kept),
        "replay and prefix pass": lambda: gradient("exact", kept),
        "optimizer": optimize,
        **{
            f"gradient, {mode}": functools.partial(gradient, mode)
            for mode in MODES
        },
    }


def _loss(log_probs_GT, advantages_G):
  return -jnp.sum(advantages_G[:, None] * log_probs_GT)


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Times every part; see the module.

  Args:
    config: configs/time_breakdown.py.
    workdir: where results.json and the figure go.

  Returns:
    What results.json holds.

  Raises:
    ValueError: a config that cannot be run.
  """
  if config.repeats < 1:
    raise ValueError(f"repeats must be at least 1, not {config.repeats}.")
  shape = config.prefix, config.branches, config.tail
  pretrained = compare_backward.load(config.model, seed=config.seed)
  model = pretrained.config
  group = bench_step.group_of(model, shape, config.seed)
  parts = Parts(pretrained.model, pretrained.params, group, config)
  seconds = {name: [] for name in parts.run}
  order = random.Random(config.seed)
  for turn in tqdm.trange(config.repeats + 1, desc="turns"):
    for name in order.sample(list(parts.run), len(parts.run)):
      start = time.perf_counter()
      jax.block_until_ready(parts.run[name]())
      if turn:  # the first one compiles
        seconds[name].append(time.perf_counter() - start)
  results = {
      "environment": record.environment(), "config": config.to_dict(),
      "seconds": seconds, **account(seconds, operations(model, shape)),
  }
  workdir = pathlib.Path(workdir)
  record.write_json(workdir / "results.json", results)
  draw(results, workdir / "time_breakdown.png")
  print(table(results))
  print(f"Wrote {workdir / 'results.json'} and time_breakdown.png beside it.")
  return results


def account(seconds: dict, of: dict) -> dict:
  """Parts and modes from measured times.

  Args:
    seconds: lists by what was run.
    of: operations by part.

  Returns:
    parts, by name seconds, flops and gflops_per_second; and modes, by name
    the step's seconds, its gradient's (whole, and as the sum of its parts),
    and how much less time and compute than "full" both take.
  """
  median = {name: statistics.median(x) for name, x in seconds.items()}
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
  for mode, names in MODES.items():
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


def table(results: dict) -> str:
  """Parts and modes as lines of text."""
  lines = ["part             s       GFLOP/s"]
  for name, part in results["parts"].items():
    rate = part["gflops_per_second"]
    lines.append(
        f"{name:15}  {part['seconds']:6.2f}  {rate:7.0f}" if rate
        else f"{name:15}  {part['seconds']:6.2f}        –"
    )
  lines.append("mode   gradient: s  less time  less compute  step: s  speed-up")
  for name, one in results["modes"].items():
    lines.append(
        f"{name:5}  {one['gradient_seconds']:11.2f}  {one['less_time']:8.2f}×  "
        f"{one['less_compute']:11.2f}×  {one['step_seconds']:7.2f}  "
        f"{one['step_speedup']:7.2f}×"
    )
  return "\n".join(lines)


def draw(results: dict, path: pathlib.Path) -> None:
  """Writes a figure: a bar a mode, a colour a part."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt  # after the backend is chosen

  figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
  names = list(results["parts"])
  for place, (mode, mine) in enumerate(reversed(MODES.items())):
    at = 0.0
    for name in mine:
      width = results["parts"][name]["seconds"]
      axis.barh(place, width, left=at, color=f"C{names.index(name)}")
      at += width
    axis.text(at, place, f" {results['modes'][mode]['step_speedup']:.1f}×",
              va="center")
  axis.set_yticks(range(len(MODES)), list(reversed(MODES)))
  axis.legend(
      [plt.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))],
      names, loc="lower right", fontsize=8,
  )
  axis.set_xlabel("seconds of a training step on one group")
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  cli.main(run, "configs/time_breakdown.py")
