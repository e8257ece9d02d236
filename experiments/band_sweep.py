# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""How wrong is the gradient whose attention in the prefix is cut to a band?

For every case the tails are run once; stop is the gradient then, and exact and
every band continue from the same accumulated cotangent. Cases are appended to
cases.jsonl as they finish; results.json summarises them.

  python -m experiments.band_sweep --config=configs/band_sweep.py
"""

import dataclasses
import pathlib

import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

import branch_replay as br
from branch_replay.planning import compare
from branch_replay.tasks import text as text_lib
from branch_replay.weights import pretrained as pretrained_lib
from experiments import bias_sweep
from experiments import cli
from experiments import prompts
from experiments.reporting import bands
from experiments.reporting import record

_DEFINITION = "Note: the number of the {name} room is {code}."
_REFERENCE = "Note: the vault opens with the number of the {name} room."
_ASK = "With which number does the vault open? Answer with the number only."
_ROOMS = ("green", "red", "blue", "white")


@dataclasses.dataclass(frozen=True)
class Case:
  """One group to study.

  Attributes:
    kind: "random", sampled answers with random advantages, or "two hops": four
      given answers, the right one and three numbers of other rooms. The right
      one can be found only by way of the reference to it late in the prompt.
    document, seed, prompt_tokens, tail_tokens, branches: as in `bias_sweep`.
  """

  kind: str
  document: int
  seed: int
  prompt_tokens: int
  tail_tokens: int
  branches: int


def cases(config: ml_collections.ConfigDict) -> list[Case]:
  """All cases of a config, in the order of its shapes."""
  return [
      Case(kind, index % config.documents, index // config.documents, *shape)
      for kind, *shape, groups in config.shapes for index in range(groups)
  ]


def two_hops(pretrained: pretrained_lib.Pretrained, case: Case, text: str):
  """Group and advantages: definitions early, a reference to one of them late.
  """
  random = np.random.default_rng((case.seed, case.document))
  codes = random.choice(np.arange(1000, 10000), len(_ROOMS), replace=False)
  right = int(random.integers(len(_ROOMS)))
  definitions = "\n".join(
      _DEFINITION.format(name=name, code=code)
      for name, code in zip(_ROOMS, codes, strict=True)
  )
  prompt = _two_hops_prompt(
      pretrained, text, case.prompt_tokens, definitions,
      _REFERENCE.format(name=_ROOMS[right]),
  )
  tails = [
      pretrained.tokenizer.encode(str(code)) + [pretrained.stop_ids[0]]
      for code in codes
  ]
  advantages_G = np.where(np.arange(len(codes)) == right, 3, -1) / np.sqrt(3)
  group = br.Group.create(prompt, tails, config=pretrained.config)
  return group, jnp.asarray(advantages_G, jnp.float32)


def _two_hops_prompt(pretrained, text, tokens, early, late):
  """A prompt of `tokens` ids, or the most characters of text that fit in."""
  def prompt(size):
    first, second = text[: size // 10], text[size // 10 : size * 9 // 10]
    third = text[size * 9 // 10 : size]
    document = "\n\n".join((first, early, second, late, third))
    return text_lib.prompt_of(pretrained, _ASK, document).ids

  low, high = 0, len(text)
  while high - low > 1:  # the longest that is not too long
    middle = (low + high) // 2
    low, high = (
        (middle, high) if len(prompt(middle)) <= tokens else (low, middle)
    )
  return prompt(low)


def _group(pretrained, case: Case, texts):
  if case.kind == "two hops":
    return two_hops(pretrained, case, texts[case.document])
  error = None
  # Not every length can be had of every text: then one or two tokens less.
  for tokens in range(case.prompt_tokens, case.prompt_tokens - 8, -1):
    shape = (case.document, case.seed, tokens, case.tail_tokens, case.branches,
             "random")
    try:
      group, advantages_G, _ = bias_sweep.group_of(
          pretrained, bias_sweep.Case(*shape), texts
      )
      return group, advantages_G
    except ValueError as refused:
      error = refused
  raise error


def study(config, pretrained, case: Case, texts, parts) -> dict:
  """Everything that is measured on one case."""
  params = pretrained.params
  group, advantages_G = _group(pretrained, case, texts)
  state = parts.capture(params, group)
  stop, accumulator = parts.visit(params, state, group, advantages_G)

  def finish(mode, band=br.Band()):
    spec = parts.spec(group, mode, band=band)
    return parts.finish(spec, params, stop, accumulator, state, None)[0]

  exact = finish("exact")
  result = dataclasses.asdict(case) | {
      "stop": bias_sweep.distance(stop, exact), "bands": []
  }
  for window, sinks in config.bands:
    if window >= case.prompt_tokens and (window, sinks) != config.bands[0]:
      continue
    gradient = finish("banded", br.Band(window, sinks))
    far = bias_sweep.distance(gradient, exact)
    far["adam_cosine"] = compare.compare(
        bias_sweep.adam_update(gradient), bias_sweep.adam_update(exact)
    ).cosine
    result["bands"].append({"window": window, "sinks": sinks, **far})
    del gradient
  return result


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict:
  """Runs the cases that are not done yet.

  Raises:
    ValueError: a model without a tokenizer, or a workdir of another config.
  """
  workdir = pathlib.Path(workdir).resolve()
  done = record.resume(workdir, config)
  names = [field.name for field in dataclasses.fields(Case)]
  known = {tuple(case[name] for name in names) for case in done}
  waiting = [
      case for case in cases(config)
      if dataclasses.astuple(case) not in known
  ]
  pretrained, texts = bias_sweep.load(config.model), prompts.texts()
  parts = bias_sweep.Study(
      pretrained.model, br.Schedule(chunk_size=config.chunk_size)
  )
  for case in tqdm.tqdm(waiting, desc="cases"):
    done.append(study(config, pretrained, case, texts, parts))
    record.append(workdir, done[-1])
  results = record.begin(config, summary=bands.summarize(done))
  return record.finish(workdir, results, table=bands.table)


if __name__ == "__main__":
  cli.main(run, "configs/band_sweep.py")
