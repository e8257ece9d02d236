# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampled answers as rows, to write and to look at.

Training knows ids alone. A run may be given a function from ids to text;
without one, the "text" is the ids as numbers between spaces.
"""

from collections.abc import Callable
from collections.abc import Sequence

import numpy as np

from branch_replay.training import algorithms
from branch_replay.training import experience as experience_lib

Decode = Callable[[list[int]], str]
MOST_PROMPT = 1024  # tokens of a prompt that are written


def numbers(ids: list[int]) -> str:
  """The ids as numbers between spaces."""
  return " ".join(map(str, ids))


def rows(
    step: int, phase: str, sampled: Sequence[experience_lib.Experience], *,
    algorithm: algorithms.Algorithm, prompts: int, decode: Decode | None = None,
) -> list[dict]:
  """Describes the answers to the first few prompts of a step.

  Args:
    step: number of the step.
    phase: name of the phase.
    sampled: all that was sampled in the step.
    algorithm: the phase's algorithm. If it gives every answer one advantage, it
      is in the rows.
    prompts: most prompts that are described.
    decode: function from ids to text; None for `numbers`.

  Returns:
    One JSON object a prompt: `step`; `phase`; `example`, its id; `prompt`, its
    text, of which the middle is left out if it is longer than `MOST_PROMPT`
    tokens; `prompt_length`, all its tokens; `left_out`, how many of these are
    not in the text; and `answers`, each with `text` (without the stop id),
    `reward`, `length` in tokens (with the stop id), `finished` (whether a stop
    id ended it) and, from some algorithms, `advantage`.
  """
  decode = decode or numbers
  advantages = [None] * len(sampled)
  if sampled and isinstance(algorithm, algorithms.PolicyGradient):
    learnt = [experience_lib.learnt(one) for one in sampled]
    advantages = np.asarray(algorithm.advantages(learnt)).tolist()
  return [
      {
          "step": step, "phase": phase, "example": one.id,
          **_prompt(one, decode),
          "answers": _answers(one, of_answers, decode),
      }
      for one, of_answers in zip(
          sampled[:prompts], advantages[:prompts], strict=True
      )
  ]


def _prompt(one: experience_lib.Experience, decode: Decode) -> dict:
  length = int(one.group.prompt_length)
  ids = np.asarray(one.group.prompt)[:length].tolist()
  left_out = max(0, length - MOST_PROMPT)
  if not left_out:
    text = decode(ids)
  else:
    half = MOST_PROMPT // 2
    text = (
        f"{decode(ids[:half])} […{left_out} tokens left out…] "
        f"{decode(ids[-half:])}"
    )
  return {"prompt": text, "prompt_length": length, "left_out": left_out}


def _answers(one: experience_lib.Experience, advantages, decode: Decode):
  tails, lengths = map(np.asarray, (one.group.tails, one.group.tail_lengths))
  found = []
  for place, (ids, length, reward, finished) in enumerate(
      zip(tails, lengths, one.rewards, one.finished, strict=True)
  ):
    ids = ids[: length - bool(finished)].tolist()
    answer = {
        "text": decode(ids), "reward": float(reward), "length": int(length),
        "finished": bool(finished),
    }
    if advantages is not None:
      answer["advantage"] = advantages[place]
    found.append(answer)
  return found
