# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers to a prompt, sampled by a model.

  python -m experiments.generate --model=smollm2 --prompt="Name three colours."

A chat model gets the prompt as the message of a user, unless --raw is given.
Without --prompt it is read from the standard input.
"""

import sys
import time

from absl import app
from absl import flags
import jax

import branch_replay as br
from branch_replay import tasks
from branch_replay.weights.pretrained import Pretrained
from experiments import cli

_MODEL = flags.DEFINE_string(
    "model", "smollm2", "A name, a GGUF file or a Hugging Face directory."
)
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt; else it is read.")
_SYSTEM = flags.DEFINE_string("system", "", "A system message before it.")
_RAW = flags.DEFINE_bool("raw", False, "Without the model's chat template.")
_BRANCHES = flags.DEFINE_integer("branches", 1, "Answers.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Most tokens of an answer.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "0 takes the likeliest token.", lower_bound=0.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the sampling noise.")


def ids_of(text, prompt: str, *, system: str = "", raw: bool = False):
  """The ids of a prompt, as the model was trained to see it.

  Raises:
    ValueError: an empty prompt, or a system message without a template.
  """
  if not prompt.strip():
    raise ValueError("The prompt is empty: --prompt=... or the standard input.")
  if raw or isinstance(text, tasks.Characters):
    if system:
      raise ValueError(
          "A system message needs a chat template: leave out --raw or --system."
      )
    return text.plain(prompt).ids
  if not system:
    return text.prompt(prompt).ids
  return text.conversation([
      {"role": "system", "content": system},
      {"role": "user", "content": prompt},
  ]).ids


def generate(
    model: Pretrained, prompt: str, *, system: str = "",
    raw: bool = False, branches: int = 1, max_tokens: int = 256,
    temperature: float = 0.0, seed: int = 0,
) -> list[str]:
  """Samples and prints answers, and returns them as text.

  Raises:
    ValueError: a prompt that is empty or too long.
  """
  text = tasks.Chat(model) if model.tokenizer is not None else (
      tasks.Characters()
  )
  ids = ids_of(text, prompt, system=system, raw=raw)
  start = time.monotonic()
  rollout = br.sample(
      model.model, model.params, ids, key=jax.random.key(seed),
      branches=branches, max_tokens=max_tokens, law=br.Law(temperature),
      stop_ids=text.stop_ids,
  )
  tails, finished = rollout.tails(), jax.device_get(rollout.finished)
  seconds = time.monotonic() - start
  answers = []
  for number, (tail, done) in enumerate(zip(tails, finished, strict=True)):
    answers.append(text.decode(
        [int(x) for x in tail if int(x) not in text.stop_ids]
    ))
    why = "stopped by itself" if done else f"cut off at {max_tokens} tokens"
    print(f"--- answer {number + 1}, {len(tail)} tokens, {why}")
    print(answers[-1])
  count = sum(map(len, tails))
  print(f"--- {len(ids)} ids of prompt, {count} sampled in {seconds:.1f} s, "
        "compilation included")
  return answers


def _main(argv):
  del argv
  try:
    prompt = sys.stdin.read() if _PROMPT.value is None else _PROMPT.value
    generate(
        br.load(_MODEL.value), prompt, system=_SYSTEM.value, raw=_RAW.value,
        branches=_BRANCHES.value, max_tokens=_MAX_TOKENS.value,
        temperature=_TEMPERATURE.value, seed=_SEED.value,
    )
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  app.run(cli.without_words(_main))
