# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a rollout, by compaction and by draft length.

All variants sample the same groups (same prompt, same keys) from one captured
prefix, in a new random order every turn. Speculation changes no token in exact
arithmetic; where float32 does, the first token of a row that differs must be a
tie of the two, and its gap is written down. Drafting and noise are part of what
is timed; the noise of one round is also timed alone.

  python -m experiments.bench_rollout --config=configs/bench_rollout.py
"""

import functools
import pathlib
import random
import statistics
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.rollout import law as law_lib
from branch_replay.rollout.drafters import NGram
from branch_replay.weights import pretrained as pretrained_lib
from experiments import cli
from experiments import compare_backward
from experiments import prompts
from experiments import record


def prompt_of(
    config: ml_collections.ConfigDict, pretrained: pretrained_lib.Pretrained
) -> list[int]:
  """A document and a question on it; bytes for a model without tokenizer."""
  text = prompts.document(config.document)
  if pretrained.tokenizer is not None:
    return prompts.about_document(pretrained, text, config.prompt_tokens)
  data = text.encode()[: config.prompt_tokens]
  return [byte % pretrained.config.vocab_size for byte in data]


def gaps(key, plain: br.Rollout, other: br.Rollout, prompt: int, vocab: int):
  """How close the tokens were, where rows first differ; [] if none does.

  Both tokens were drawn at one place with the same noise, after the same
  tokens: their scores, log-prob plus noise, are all that told them apart.

  Args:
    key: of the rollouts.
    plain: one of them.
    other: the other, of the same rows.
    prompt: tokens of the prompt.
    vocab: V.

  Returns:
    |difference of the two scores| of every row that differs.
  """
  found = []
  for row, (mine, theirs) in enumerate(
      zip(plain.tails(), other.tails(), strict=True)
  ):
    shared = min(len(mine), len(theirs))
    differ = np.flatnonzero(
        np.asarray(mine[:shared]) != np.asarray(theirs[:shared])
    )
    if not differ.size:
      continue
    at = int(differ[0])
    noise_V = law_lib.noise(key, row, prompt + at, vocab, jnp.float32)
    scores = [
        float(x.log_probs[row, at] + noise_V[x.tokens[row, at]])
        for x in (plain, other)
    ]
    found.append(abs(scores[0] - scores[1]))
  return found


def noise_seconds(config, vocab: int) -> float:
  """Median time of one round's noise without drafts, [G, 1, V]."""
  shape = config.branches, 1
  draw = jax.jit(
      lambda key: law_lib.block_noise(
          br.Law(), key, jnp.arange(shape[0]), jnp.zeros(shape, jnp.int32),
          vocab, jnp.float32,
      )
  )
  seconds = []
  for turn in range(config.repeats + 1):
    start = time.perf_counter()
    jax.block_until_ready(draw(jax.random.key(turn)))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[1:])


def describe(rollouts: list[br.Rollout]) -> dict:
  """What the rollouts of one variant did, which no repeat changes."""
  def total(field):
    return sum(int(np.sum(getattr(one, field))) for one in rollouts)

  return {
      "tokens": total("lengths"),
      "finished": total("finished"),
      "accept_length": total("lengths") / total("rounds"),
      "drafted": total("drafted"),
      "accepted": total("accepted"),
      "buckets": rollouts[0].work.buckets.tolist(),
      "bucket_rounds": sum(one.work.rounds for one in rollouts).tolist(),
      "bucket_tokens": sum(one.work.tokens for one in rollouts).tolist(),
  }


def _check(config) -> None:
  if not config.variants or config.variants[0] != (False, 0):
    raise ValueError(
        f"variants={config.variants}: the first must be (False, 0), no "
        "compaction and no drafts, which the others are compared with."
    )
  if min(config.repeats, config.rollouts) < 1:
    raise ValueError(
        f"repeats={config.repeats} and rollouts={config.rollouts} must be at "
        "least 1."
    )


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Measures every variant; see the module.

  Args:
    config: configs/bench_rollout.py.
    workdir: where results.json goes.

  Returns:
    What it holds.

  Raises:
    ValueError: a config that cannot be run.
  """
  _check(config)
  pretrained = compare_backward.load(config.model, seed=config.seed)
  model, params = pretrained.model, pretrained.params
  prompt = prompt_of(config, pretrained)
  keys = [jax.random.key(config.seed + i) for i in range(config.rollouts)]
  sample = functools.partial(
      br.sample, model, params, prompt, branches=config.branches,
      max_tokens=config.tail_tokens, law=br.Law(config.temperature),
      stop_ids=pretrained.stop_ids,
      state=br.capture(model, params, prompt),
  )

  def rollouts(variant):
    compact, length = variant
    return [
        sample(
            key=key, compact=compact, draft_length=length,
            drafter=NGram(config.longest),
        )
        for key in keys
    ]

  runs, plain = [], None
  for variant in (bar := tqdm.tqdm(config.variants)):
    bar.set_description(f"compiling {variant}")
    first = rollouts(variant)
    plain = plain or first
    differ = [
        gap for key, mine, theirs in zip(keys, plain, first, strict=True)
        for gap in gaps(
            key, mine, theirs, len(prompt), model.config.vocab_size
        )
    ]
    runs.append({
        "compact": variant[0], "draft_length": variant[1],
        **describe(first), "rows_that_differ": len(differ),
        "largest_gap": max(differ, default=0.0), "seconds": [],
    })
  order = random.Random(config.seed)
  for _ in tqdm.trange(config.repeats, desc="turns"):
    for index in order.sample(range(len(runs)), len(runs)):
      start = time.perf_counter()
      rollouts(config.variants[index])
      runs[index]["seconds"].append(time.perf_counter() - start)
  for one in runs:
    one["seconds_median"] = statistics.median(one["seconds"])
    one["tokens_per_second"] = one["tokens"] / one["seconds_median"]
    one["speedup"] = one["tokens_per_second"] / runs[0]["tokens_per_second"]
  results = {
      "environment": record.environment(),
      "config": config.to_dict(),
      "noise_seconds": noise_seconds(config, model.config.vocab_size),
      "runs": runs,
  }
  record.write_json(workdir / "results.json", results)
  print(table(results))
  print(f"Wrote {workdir / 'results.json'}.")
  return results


def table(results: dict) -> str:
  """The runs as lines of text."""
  lines = ["compact  drafts  tokens/s  speed-up  accept length  rows differ"]
  for one in results["runs"]:
    lines.append(
        f"{str(one['compact']):7}  {one['draft_length']:6}  "
        f"{one['tokens_per_second']:8.1f}  {one['speedup']:7.2f}×  "
        f"{one['accept_length']:13.2f}  {one['rows_that_differ']:11}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  cli.main(run, "configs/bench_rollout.py")
