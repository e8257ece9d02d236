# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct learns tasks of reasoning-gym by reward.

Two data sets that it solves sometimes. Two solved questions stand before
every question, as turns of the conversation, so that it answers with the bare
result; with the prompt they are the prefix that eight answers share.

  python -m experiments.train --config=configs/reasoning.py:products

products: "Solve the following multiplication: 6 * 7", factors of one digit.
sums: "4 - 7", a sum or difference of two digits.

The package is optional: pip install -c constraints.txt -e ".[reasoning]".
"""

import ml_collections

from branch_replay.training import run_config
from branch_replay.training import settings
from configs import variants

# An algorithm or task that is chosen by its flag has fields of its own.
switch, meanings = run_config.switch, run_config.meanings


def _run(dataset: str, parameters: str, rows: tuple[int, int, int]):
  train, validation, test = rows
  return settings.RunSettings(
      pretrained="smollm2",
      task={
          "name": "reasoning_gym", "dataset": dataset, "shots": 2,
          "parameters": parameters, "train": train, "validation": validation,
          "test": test,
      },
      phases={"reinforce": settings.ReinforceSettings(
          steps=24, prompts=8, branches=8, max_tokens=8, hold="activations",
          optimizer=settings.OptimizerSettings(learning_rate=1e-5, warmup=2),
      )},
      evaluation=settings.EvaluationSettings(branches=8, every=8),
      checkpoint_every=8,
  )


_VARIANTS = {
    "products": lambda: _run(
        "products",
        '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}',
        (40, 10, 8),
    ),
    "sums": lambda: _run(
        "chain_sum",
        '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}',
        (72, 16, 8),
    ),
}


def get_config(variant: str = "products") -> ml_collections.ConfigDict:
  return run_config.to_config(variants.chosen(_VARIANTS, variant)())
