# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct learns tasks of reasoning-gym by reward.

Two data sets that it solves sometimes. Two solved questions stand before
every question, as turns of the conversation, so that it answers with the bare
result; with the prompt they are the prefix that eight answers share.

  python -m experiments.train --config=configs/reasoning.py
  python -m experiments.train --config=configs/reasoning.py:sums

As it stands, "Solve the following multiplication: 6 * 7", factors of one digit;
`:sums`, "4 - 7", a sum or difference of two digits; `:tiny`, one step of the
first, in minutes.

Cost: twenty minutes each on one core of two. The results are
reasoning_products.json and reasoning_sums.json: a held-out reward of 0.24 rises
to 0.66, and of 0.05 to 0.34, most of the latter by sums that were trained on in
the other order (docs/training.md).

The package is optional: pip install -c constraints.txt -e ".[reasoning]".
"""

import ml_collections

from branch_replay.training import run_config
from branch_replay.training import settings
from configs import variants

# An algorithm or task that is chosen by its flag has fields of its own.
switch, meanings = run_config.switch, run_config.meanings


def _run(
    dataset: str, parameters: str, rows: tuple[int, int, int], steps: int = 24,
    prompts: int = 8,
):
  train, validation, test = rows
  return settings.RunSettings(
      pretrained="smollm2",
      task={
          "name": "reasoning_gym", "dataset": dataset, "shots": 2,
          "parameters": parameters, "train": train, "validation": validation,
          "test": test,
      },
      phases={"reinforce": settings.ReinforceSettings(
          steps=steps, prompts=prompts, branches=8, max_tokens=8,
          hold="activations",
          optimizer=settings.OptimizerSettings(learning_rate=1e-5, warmup=2),
      )},
      evaluation=settings.EvaluationSettings(branches=8, every=8),
      checkpoint_every=8,
  )


_DIGITS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
_VARIANTS = {
    "": lambda: _run("products", _DIGITS, (40, 10, 8)),
    "sums": lambda: _run("chain_sum", _DIGITS, (72, 16, 8)),
    "tiny": lambda: _run("products", _DIGITS, (4, 2, 2), steps=1, prompts=2),
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  return run_config.to_config(variants.chosen(_VARIANTS, variant)())
