# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a rollout: what compaction and drafts save.

All variants sample the same groups (same prompt, same keys) from one captured
prefix, in a new random order every turn. Speculation changes no token in exact
arithmetic; where float32 does, the first token of a row that differs must be a
tie of the two, and its gap is written down. Drafting and noise are part of what
is timed; the noise of one round is also timed alone, and so is the training of
the drafter, on answers to other prompts. All variants run layers one by one
(`rollout.unstacked`); one more, without drafts, scans them.

  python -m experiments.bench_rollout --config=configs/bench_rollout.py
"""

import dataclasses
import functools
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import tqdm

import branch_replay as br
from branch_replay.rollout import law as law_lib
from branch_replay.rollout import loop
from branch_replay.rollout import tuner as tuner_lib
from branch_replay.rollout import unstacked
from branch_replay.rollout.drafters import Learned
from branch_replay.rollout.drafters import NGram
from branch_replay.rollout.drafters import vocabulary
from branch_replay.training.drafting import buffer as buffer_lib
from branch_replay.training.drafting import lessons as lessons_lib
from branch_replay.training.drafting import trainer as trainer_lib
from branch_replay.weights import chat
from branch_replay.weights import load as load_lib
from branch_replay.weights import pretrained as pretrained_lib
from experiments import cli
from experiments import prompts
from experiments.reporting import record
from experiments.reporting import rollouts
from experiments.reporting import timing

_CONTEXT = 64  # tokens before a piece of text that a drafter learns from
_DRAFTERS = ("none", "ngram", "untrained", "learned")


def prompt_of(
    config: ml_collections.ConfigDict, pretrained: pretrained_lib.Pretrained,
    number: int = 0,
) -> list[int]:
  """A part of a document and a question on it; no two numbers share text."""
  characters = 10 * config.prompt_tokens  # more than a prompt can hold
  text = prompts.document(config.document)[number * characters :]
  return prompts.about_document(pretrained, text, config.prompt_tokens)


def rest_of(
    config, pretrained: pretrained_lib.Pretrained, parts: int
) -> list[int]:
  """Ids of the document after so many parts of `prompt_of`."""
  text = prompts.document(config.document)[parts * 10 * config.prompt_tokens :]
  if pretrained.tokenizer is not None:
    return chat.encode_text(pretrained, text).ids
  return prompts.bytes_of(pretrained, text)


def gaps(key, plain: br.Rollout, other: br.Rollout, prompt: int, vocab: int):
  """Gaps between the scores of two tokens where rows first differ.

  Both tokens were drawn at one place with the same noise, after the same
  tokens: their scores, log-prob plus noise, are all that told them apart.

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
      lambda key: law_lib.noise_of_rows(
          br.Law(), key, jnp.arange(shape[0]), jnp.zeros(shape, jnp.int32),
          vocab, jnp.float32,
      )
  )
  times = timing.in_turns(
      {"noise": lambda: draw(jax.random.key(0))}, config.repeats, warm=False
  )
  return statistics.median(times.wall["noise"])


@dataclasses.dataclass(frozen=True)
class Problem:
  """A model, and how groups are sampled from it."""

  config: ml_collections.ConfigDict
  pretrained: pretrained_lib.Pretrained

  def sample(self, prompt, key, **options) -> br.Rollout:
    """One group of answers."""
    config = self.config
    return br.sample(
        self.pretrained.model, self.pretrained.params, prompt, key=key,
        branches=config.branches, max_tokens=config.tail_tokens,
        law=br.Law(config.temperature), stop_ids=self.pretrained.stop_ids,
        **options,
    )


def learned_drafters(problem: Problem) -> tuple[dict, dict]:
  """A drafter before and after training, and what that took.

  It is trained on answers to prompts of its own, none of which is timed, and on
  the rest of the document: there the model's own law after every token is known
  too, at the price of a forward pass.

  Returns:
    The drafters by name; prompts, updates, seconds of reading, of sampling and
    of training (without the first update, which compiles), and the loss at both
    ends.
  """
  config, pretrained = problem.config, problem.pretrained
  of, model, params = config.studies, pretrained.model, pretrained.params
  began, lessons, seen = time.perf_counter(), [], []
  text = rest_of(config, pretrained, 1 + of.prompts)
  if len(text) < of.text_tokens + _CONTEXT:
    raise ValueError(
        f"text_tokens={of.text_tokens}: the document has {len(text)} more than "
        "its prompts take."
    )
  for start in tqdm.trange(0, of.text_tokens, of.width, desc="text"):
    head, tail = np.split(text[start :][: _CONTEXT + of.width], [_CONTEXT])
    state = br.capture(model, params, head)
    group = br.Group.create(head, [tail], config=model.config)
    lessons.append(lessons_lib.of_answers(model, params, group, state, step=0))
  read = time.perf_counter()
  for number in tqdm.trange(of.prompts, desc="answers to learn from"):
    prompt = prompt_of(config, pretrained, 1 + number)
    key = jax.random.key(config.seed + 1000 + number)
    rollout = problem.sample(prompt, key)
    group = br.Group.create(prompt, rollout.tails(), config=model.config)
    lessons.append(
        lessons_lib.of_answers(model, params, group, rollout.state, step=0)
    )
    seen += [prompt, *rollout.tails()]
  sampled = time.perf_counter()
  ids_U = vocabulary.most_frequent(
      np.concatenate(seen), of.vocabulary, model.config.vocab_size
  )
  untrained = Learned.create(model, params, ids_U, jax.random.key(config.seed))
  trainer = trainer_lib.Trainer(
      model,
      optax.chain(
          optax.clip_by_global_norm(1.0),
          optax.adam(optax.cosine_decay_schedule(of.learning_rate, of.updates)),
      ),
      of.rows, of.width, config.temperature,
  )
  buffer = buffer_lib.add(buffer_lib.Buffer(10**9), lessons)
  trained, rng = trainer.create(untrained), np.random.default_rng(config.seed)
  losses = []
  for number in tqdm.trange(of.updates, desc="updates of the drafter"):
    trained, loss = trainer.update(
        trained, untrained.vocabulary, params, buffer_lib.draw(buffer, rng)
    )
    losses.append(float(loss))
    if not number:
      compiled = time.perf_counter()
  learned = dataclasses.replace(untrained, params=trained.params)
  few = max(1, of.updates // 10)
  return {"untrained": untrained, "learned": learned}, {
      "prompts": of.prompts, "updates": of.updates,
      "text_tokens": of.text_tokens,
      "answer_tokens": sum(map(len, seen)) - of.prompts * config.prompt_tokens,
      "reading_seconds": read - began,
      "sampling_seconds": sampled - read,
      "seconds_per_update": (
          (time.perf_counter() - compiled) / max(1, of.updates - 1)
      ),
      "loss_first": float(np.mean(losses[:few])),
      "loss_last": float(np.mean(losses[-few:])),
  }


class Variant:
  """One way to sample, with its tuner if it has one."""

  def __init__(self, problem: Problem, settings, drafters: dict, layers):
    """Takes (compact, drafter, draft length); layers=None scans them."""
    self.settings = self.compact, self.name, self.length = settings
    self._problem, self._drafter = problem, drafters[self.name]
    self._layers = layers
    self._tuner = None
    if self.length == "tuned":
      self._tuner = tuner_lib.Tuner(
          tuple(problem.config.draft_lengths),
          epsilon=problem.config.epsilon, seed=problem.config.seed,
      )

  def sample(self, prompt, state, key) -> br.Rollout:
    """One group; a tuner decides before it and learns from it."""
    lengths = self.length
    if self._tuner is not None:
      sizes = loop.buckets(self._problem.config.branches)
      self._tuner, lengths, _ = tuner_lib.choose(self._tuner, sizes)
    rollout = self._problem.sample(
        prompt, key, state=state, compact=self.compact, drafter=self._drafter,
        draft_length=lengths, layers=self._layers,
    )
    if self._tuner is not None:
      self._tuner = tuner_lib.observe(self._tuner, rollout.work)
    return rollout


def describe(rollouts: list[br.Rollout]) -> dict:
  """Counts over the rollouts of one variant."""
  def total(field):
    return sum(int(np.sum(getattr(one, field))) for one in rollouts)

  return {
      "tokens": total("lengths"),
      "finished": total("finished"),
      "accept_length": total("lengths") / total("rounds"),
      "drafted": total("drafted"),
      "accepted": total("accepted"),
      "buckets": rollouts[0].work.buckets.tolist(),
      "bucket_draft_lengths": rollouts[-1].work.draft_lengths.tolist(),
      "bucket_rounds": sum(one.work.rounds for one in rollouts).tolist(),
      "bucket_tokens": sum(one.work.tokens for one in rollouts).tolist(),
      "bucket_seconds": sum(one.work.seconds for one in rollouts).tolist(),
  }


def _check(config) -> None:
  if not config.variants or tuple(config.variants[0]) != (False, "none", 0):
    raise ValueError(
        f"variants={config.variants}: the first must be (False, 'none', 0), no "
        "compaction and no drafts, which the others are compared with."
    )
  for _, name, _ in config.variants:
    if name not in _DRAFTERS:
      raise ValueError(
          f"Unknown drafter {name!r}: use one of {', '.join(_DRAFTERS)}."
      )
  if min(config.repeats, config.rollouts, config.tuning) < 1:
    raise ValueError(
        f"repeats={config.repeats}, rollouts={config.rollouts} and tuning="
        f"{config.tuning} must be at least 1."
    )
  tuned = any(length == "tuned" for _, _, length in config.variants)
  # A first run compiles; then whole rollouts, without drafts and with them.
  needed = 2 * len(config.draft_lengths) + 2
  if tuned and config.tuning * config.rollouts < needed:
    raise ValueError(
        f"tuning={config.tuning} turns of {config.rollouts} rollouts leave the "
        f"tuner trying {len(config.draft_lengths)} draft lengths when it is "
        f"timed: it needs {needed} rollouts."
    )


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Measures every variant; ValueError for a config that cannot be run."""
  _check(config)
  pretrained = load_lib.load(config.model, seed=config.seed)
  problem, vocab = Problem(config, pretrained), pretrained.config.vocab_size
  prompt = prompt_of(config, pretrained)
  keys = [jax.random.key(config.seed + i) for i in range(config.rollouts)]
  drafters, training = {"none": None, "ngram": NGram(config.longest)}, None
  if {name for _, name, _ in config.variants} & {"untrained", "learned"}:
    made, training = learned_drafters(problem)
    drafters |= made
  state = br.capture(pretrained.model, pretrained.params, prompt)
  layers = unstacked.layers(pretrained.config, pretrained.params)
  variants = [
      Variant(problem, one, drafters, layers) for one in config.variants
  ]
  variants.append(Variant(problem, (True, "none", 0), drafters, layers=None))

  def sample(variant: Variant) -> list[br.Rollout]:
    return [variant.sample(prompt, state, key) for key in keys]

  runs, plain, last = [], None, {}
  for variant in (bar := tqdm.tqdm(variants)):
    bar.set_description(f"compiling {variant.settings}")
    first = sample(variant)
    for _ in range(config.tuning if variant.length == "tuned" else 0):
      sample(variant)
    plain = plain or first
    differ = [
        gap for key, mine, theirs in zip(keys, plain, first, strict=True)
        for gap in gaps(key, mine, theirs, len(prompt), vocab)
    ]
    runs.append({
        "compact": variant.compact, "drafter": variant.name,
        "draft_length": variant.length, "rows_that_differ": len(differ),
        "largest_gap": max(differ, default=0.0),
    })

  def again(index):
    last[index] = sample(variants[index])

  seconds = timing.in_turns(
      {i: functools.partial(again, i) for i in range(len(runs))},
      config.repeats, seed=config.seed,
  ).wall
  for index, one in enumerate(runs):
    one |= {"seconds": seconds[index], **describe(last[index])}
    one["seconds_median"] = statistics.median(one["seconds"])
    one["tokens_per_second"] = one["tokens"] / one["seconds_median"]
    one["speedup"] = one["tokens_per_second"] / runs[0]["tokens_per_second"]
  *runs, scanned = runs
  results = record.begin(
      config, noise_seconds=noise_seconds(config, vocab), training=training,
      lengths=[one.lengths.tolist() for one in plain], runs=runs,
      scanned=scanned,
  )
  return record.finish(
      workdir, results, table=rollouts.table, draw=rollouts.draw
  )


if __name__ == "__main__":
  cli.main(run, "configs/bench_rollout.py")
