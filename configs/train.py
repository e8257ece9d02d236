# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A model learns from the rewards of its own answers.

SmolLM2-135M-Instruct, prompts of 256 tokens of real text with a fact and a
question about it; the reward is 1 if the answer holds the code asked for and no
other, else 0. The results are train_smollm2.json and train_smollm2_stop.json:

  python -m experiments.train --config=configs/train.py
  python -m experiments.train --config=configs/train.py \
    --config.prefix_gradient=stop --workdir=runs/train_stop

One's own prompts and reward (docs/data.md):

  python -m experiments.train --config.task.name=file \
    --config.task.train=prompts.jsonl --config.task.reward=reward.py:score

Cost: 35 minutes on two cores.

`:supervised` and `:pairs`: learns the answers, or the preference pairs, of a
file, --config.task.train=FILE, without sampling.

`:small`: a small decoder that knows nothing is shown right answers on short
documents, where that is cheap, until it finds some facts; on documents of 512
characters it is then trained by GRPO, with the exact gradient of branch replay.
Cost: seven minutes on two cores. Expect a held-out reward of at most 0.4 after
the supervised phases and of at least 0.9 at the end, with this seed: others
leave the warm-up between 0.03 and 0.70. The result is train_tiny.json.

  make train-tiny
  python -m experiments.train --config=configs/train.py:small

`:tiny`: the training loop in half a minute; nothing is learnt.
"""

import ml_collections

from branch_replay.training import run_config
from branch_replay.training import settings
from configs import variants

# An algorithm or task that is chosen by its flag has fields of its own.
switch, meanings = run_config.switch, run_config.meanings


def _smollm2() -> settings.RunSettings:
  return settings.RunSettings(
      pretrained="smollm2",
      task={
          "name": "retrieval", "prompt_tokens": 256, "distractors": 1,
          "train": 2048, "validation": 64, "test": 64,
      },
      phases={"reinforce": settings.ReinforceSettings(
          steps=40, max_tokens=24, hold="activations",
          optimizer=settings.OptimizerSettings(learning_rate=1e-5, warmup=2),
      )},
      checkpoint_every=10,
  )


def _supervised(steps: int, prompt_tokens: int, **changes):
  """A phase that learns from right answers to shorter prompts."""
  return settings.SupervisedSettings(**{
      "task": {"prompt_tokens": prompt_tokens}, "steps": steps, "prompts": 64,
      "max_tokens": 5,
      "optimizer": settings.OptimizerSettings(
          learning_rate=3e-3, warmup=20, b2=0.98, weight_decay=0.01
      ),
  } | changes)


def _supervised_file() -> settings.RunSettings:
  return settings.RunSettings(
      pretrained="smollm2", task={"name": "file"},
      phases={"supervised": settings.SupervisedSettings(
          max_tokens=512, optimizer=settings.OptimizerSettings(warmup=10)
      )},
  )


def _pairs() -> settings.RunSettings:
  return settings.RunSettings(
      pretrained="smollm2", task={"name": "file"},
      phases={"pairwise": settings.PairwiseSettings(
          optimizer=settings.OptimizerSettings(learning_rate=1e-6, warmup=10)
      )},
  )


def _small(**changes) -> settings.RunSettings:
  reinforce = settings.ReinforceSettings(
      steps=400, prompts=16, max_tokens=5, most_prompts=32, hold="activations",
      speculation=settings.SpeculationSettings(
          studies=settings.StudySettings(vocabulary=64)
      ),
      optimizer=settings.OptimizerSettings(
          learning_rate=2e-3, warmup=10, decay="linear", b2=0.98
      ),
  )
  return settings.RunSettings(**{
      "model": {
          "width": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
          "head_dim": 16, "ffn_width": 128, "max_positions": 2048,
          "tied_embeddings": True,
      },
      "task": {
          "name": "retrieval", "haystack": "letters", "naming": "letters",
          "fact": "{name}{code}", "distractors": 0, "train": 8192,
      },
      "phases": {
          "short": _supervised(400, 64), "longer": _supervised(60, 128),
          "long": _supervised(40, 256), "reinforce": reinforce,
      },
      "evaluation": settings.EvaluationSettings(prompts=128, every=50),
  } | changes)


def _tiny() -> settings.RunSettings:
  small = _small()
  return _small(
      task={
          **small.task, "prompt_tokens": 64, "train": 16, "validation": 4,
          "test": 4,
      },
      phases={
          "short": _supervised(
              2, 48, prompts=2,
              optimizer=settings.OptimizerSettings(learning_rate=3e-3),
          ),
          "reinforce": settings.ReinforceSettings(
              steps=2, prompts=2, max_tokens=5, most_prompts=32,
              hold="activations",
              speculation=settings.SpeculationSettings(
                  drafter="learned", draft_lengths=(0, 1),
                  studies=settings.StudySettings(
                      vocabulary=64, updates=1, width=8
                  ),
              ),
              optimizer=settings.OptimizerSettings(learning_rate=2e-3),
          ),
      },
      evaluation=settings.EvaluationSettings(prompts=2, every=2),
      checkpoint_every=1,
  )


_VARIANTS = {
    "": _smollm2, "supervised": _supervised_file, "pairs": _pairs,
    "small": _small, "tiny": _tiny,
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  return run_config.to_config(variants.chosen(_VARIANTS, variant)())
