# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The bias of stopping at the prefix, and of estimators that do not stop.

For every case (document, seed, shape) the tails are run once; stop is the
gradient then, exact the gradient after the whole prefix pass, and every
estimator continues from the same accumulated cotangent. Cases are appended to
cases.jsonl as they finish; results.json summarises them.

  python -m experiments.bias_sweep --config=configs/bias_sweep.py
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.engine import compiled
from branch_replay.engine import estimators as estimators_lib
from branch_replay.engine import readout
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import steps
from branch_replay.planning import compare
from branch_replay.weights import load as load_lib
from branch_replay.weights import pretrained as pretrained_lib
from experiments import cli
from experiments import compare_backward
from experiments import prompts
from experiments.reporting import bias
from experiments.reporting import record

_BINS = 64  # of the profile over positions
_ANY = br.Sampling()
_BAND = br.Band()
_NEEDLE = "Note: the access code of the archive is {code}."
_ASK = "What is the access code of the archive? Answer with the number only."


@dataclasses.dataclass(frozen=True)
class Case:
  """One group to study; `depth` is set for retrieval prompts."""

  document: int
  seed: int
  prompt_tokens: int
  tail_tokens: int
  branches: int
  advantages: str
  depth: float | None = None


def cases(config: ml_collections.ConfigDict) -> list[Case]:
  """All cases of a config, seeds outermost: any prefix is a fair sample."""
  found = []
  for seed in range(max(seeds for *_, seeds in config.shapes)):
    for document in range(config.documents):
      for *shape, seeds in config.shapes:
        if seed < seeds:
          found.append(Case(document, seed, *shape))
      for prompt, tail, branches, seeds in config.retrieval:
        if seed < seeds:
          for depth in config.depths:
            found.append(
                Case(document, seed, prompt, tail, branches, "fact", depth)
            )
  return found


def group_of(pretrained: pretrained_lib.Pretrained, case: Case, texts):
  """The group of a case, its advantages, and its rewards."""
  text, code = texts[case.document], None
  start = (case.seed * 7919) % max(1, len(text) // 2)
  text = text[start:]
  if case.depth is None:
    prompt = prompts.about_document(pretrained, text, case.prompt_tokens)
  else:
    code = str(1000 + (case.seed * 613 + case.document * 389) % 9000)
    prompt = prompts.about_document(
        pretrained, text, case.prompt_tokens, question=_ASK,
        needle=_NEEDLE.format(code=code), depth=case.depth,
    )
  key = jax.random.fold_in(jax.random.key(case.seed), case.document)
  rollout = br.sample(
      pretrained.model, pretrained.params, prompt, key=key,
      branches=case.branches, max_tokens=case.tail_tokens,
      stop_ids=pretrained.stop_ids,
  )
  tails = rollout.tails()
  rewards_G = np.asarray(jax.random.normal(
      jax.random.fold_in(key, case.branches), (case.branches,)
  ))
  if case.advantages == "words":
    rewards_G = np.array([
        compare_backward.reward(pretrained.tokenizer, tail, text)
        for tail in tails
    ])
  elif case.advantages == "fact":
    rewards_G = np.array([
        float(code in pretrained.tokenizer.decode(np.asarray(tail).tolist()))
        for tail in tails
    ])
  spread = rewards_G.std()
  advantages_G = (rewards_G - rewards_G.mean()) / (spread or 1.0)
  # One shape a case: answers that all end early would be padded to less.
  width = jnp.zeros((case.branches, case.tail_tokens), jnp.int32)
  group = br.Group.create(prompt, tails, config=pretrained.config)
  tokens = min(case.tail_tokens, group.tails.shape[1])
  group = dataclasses.replace(
      group, tails=width.at[:, :tokens].set(group.tails[:, :tokens])
  )
  return group, jnp.asarray(advantages_G, jnp.float32), rewards_G


class Study:
  """Compiled pieces for one shape."""

  def __init__(self, model, schedule: br.Schedule):
    self._model, self._schedule = model, schedule
    self.visit = jax.jit(self._visit)
    self.finish = jax.jit(self._finish, static_argnums=0)

  def spec(self, group, mode, sampling=_ANY, band=_BAND):
    return spec_lib.of_group(
        self._model, group, readout.LogProbs(), mode, self._schedule, sampling,
        band,
    )

  def capture(self, params, group):
    keep = self._schedule.activations == "keep"
    return br.capture(
        self._model, params, group, schedule=self._schedule, keep=keep
    )

  def _visit(self, params, state, group, advantages_G):
    weight = 1.0 / jnp.maximum(jnp.sum(group.tail_lengths), 1)
    weights_G = jnp.full(advantages_G.shape, weight)
    accumulator = tuple(jnp.zeros_like(x) for x in state.mixer)
    cotangent = spec_lib.cotangent_of(compare_backward.policy_gradient_loss)
    return compiled.visit_branches(
        self.spec(group, "exact"), params, spec_lib.zero_grads(params),
        accumulator, state, group,
        steps.Pull(cotangent, (advantages_G, weights_G)),
    )[:2]

  def _finish(self, spec, params, grads, accumulator, state, uniform_N):
    return compiled.pop_chunks(
        spec, params, grads, accumulator, state, spec.chunks(state.capacity),
        uniform_N=uniform_N,
    )


def distance(gradient, reference) -> dict:
  """Cosine, relative error and norm ratio, whole, by matrix and by layer."""
  far = compare.compare(gradient, reference)
  return {
      **{name: getattr(far, name) for name in bias.MEASURES},
      "per_matrix_cosine": {
          name: round(x, 4) for name, x in far.per_matrix_cosine.items()
      },
      "per_layer_cosine": {
          name: [round(x, 4) for x in layers]
          for name, layers in far.per_layer_cosine.items()
          if name.endswith("kernel")
      },
  }


@jax.jit
def adam_update(grads):
  """The first step of Adam: with no history, g / (|g| + ε)."""
  return jax.tree.map(lambda g: g / (jnp.abs(g) + 1e-8), grads)


def profile(accumulator, length: int) -> list[float]:
  """Share of the squared cotangent in equal bins of the prefix."""
  squares_P = sum(
      np.asarray(jnp.sum(jnp.square(x), axis=(0, 1, 3)))[:length]
      for x in accumulator
  )
  bins = np.array_split(squares_P, _BINS)
  total = max(float(squares_P.sum()), 1e-300)
  return [round(float(part.sum()) / total, 6) for part in bins]


def draw_key(case: Case):
  """A key of its own for every case: shared draws would be shared luck."""
  key = jax.random.key(case.seed + 1)
  depth = 0 if case.depth is None else 1 + int(100 * case.depth)
  for part in (case.document, case.prompt_tokens, case.tail_tokens,
               case.branches, len(case.advantages), depth):
    key = jax.random.fold_in(key, part)
  return key


def estimators(config, case: Case):
  """The estimators studied on a case."""
  if case.prompt_tokens < 16 * config.chunks:
    return
  yield br.Sampling(chunks=config.chunks / 3)
  yield br.Sampling(chunks=float(config.top), law="top")
  shape = dataclasses.astuple(case)[2:6]
  if case.seed == 0 and shape in map(tuple, config.budget_shapes):
    for budget in config.budgets:
      for law in bias.LAWS:
        yield br.Sampling(chunks=float(budget), law=law)


def check_chunks(config, group: br.Group, parts: Study) -> None:
  """Raises ValueError unless the prompt makes as many chunks as asked for."""
  count = parts.spec(group, "exact").chunks(group.prompt.shape[0] - 1).count
  if count != config.chunks:
    raise ValueError(
        f"A prompt of {int(group.prompt_length)} tokens makes {count} chunks, "
        f"not {config.chunks}: take a multiple of {config.chunks}."
    )


def study(config, pretrained, case: Case, texts, parts: Study) -> dict:
  """Everything that is measured on one case."""
  params = pretrained.params
  group, advantages_G, rewards_G = group_of(pretrained, case, texts)
  check_chunks(config, group, parts)
  length = int(group.prompt_length) - 1
  result = dataclasses.asdict(case) | {
      "rewards": [round(float(r), 4) for r in rewards_G], "estimators": []
  }
  if not np.asarray(advantages_G).any():
    return result | {"dead": True}
  state = parts.capture(params, group)
  stop, accumulator = parts.visit(params, state, group, advantages_G)
  result["profile_tails"] = profile(accumulator, length)
  finish = functools.partial(
      parts.finish, params=params, grads=stop, accumulator=accumulator,
      state=state,
  )
  exact, whole, _ = finish(parts.spec(group, "exact"), uniform_N=None)
  result["profile"] = profile(whole, length)
  del whole
  result["stop"] = distance(stop, exact)
  result["stop_adam_cosine"] = compare.compare(
      adam_update(stop), adam_update(exact)
  ).cosine
  uniform_N = estimators_lib.uniforms(draw_key(case), config.chunks)
  for sampling in estimators(config, case):
    spec = parts.spec(group, "sampled", sampling)
    gradient, _, report = finish(spec, uniform_N=uniform_N)
    far = compare.compare(gradient, exact)
    result["estimators"].append({
        "law": sampling.law, "budget": sampling.chunks,
        "chunks_run": int(report.drawn.sum()),
        **{name: getattr(far, name) for name in bias.MEASURES},
    })
    del gradient
  return result


def study_of(model: br.Decoder, prompt_tokens: int, chunks: int) -> Study:
  """The pieces for prompts of one length, in so many chunks."""
  size = -(-(prompt_tokens - 1) // chunks)
  return Study(model, br.Schedule(chunk_size=size, activations="keep"))


def load(name: str) -> pretrained_lib.Pretrained:
  """A model with a tokenizer; ValueError for one without."""
  pretrained = load_lib.load(name)
  if pretrained.tokenizer is None:
    raise ValueError(f"model={name!r} has no tokenizer.")
  return pretrained


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the cases that are not done yet.

  Raises:
    ValueError: a model without a tokenizer, lengths that do not make the chunks
      asked for, or a workdir of another config.
  """
  workdir = pathlib.Path(workdir).resolve()
  done = record.resume(workdir, config)
  names = [field.name for field in dataclasses.fields(Case)]
  known = {tuple(case[name] for name in names) for case in done}
  waiting = [
      case for case in cases(config)
      if dataclasses.astuple(case) not in known
  ]
  pretrained, texts = load(config.model), prompts.texts()
  studies = {}
  for case in tqdm.tqdm(waiting, desc="cases"):
    length = case.prompt_tokens
    if length not in studies:
      studies[length] = study_of(pretrained.model, length, config.chunks)
    done.append(study(config, pretrained, case, texts, studies[length]))
    record.append(workdir, done[-1])
  results = record.begin(config, summary=bias.summarize(done))
  return record.finish(workdir, results, table=bias.table, draw=bias.draw)


if __name__ == "__main__":
  cli.main(run, "configs/bias_sweep.py")
