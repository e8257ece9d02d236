# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves: several ways to train one model, over several seeds.

The model of configs/train.py:small, warmed up on short documents, learns to
find a fact in 512 characters by reward. All ways see the same prompts.

  python -m experiments.learning_curves --config=configs/learning.py:modes

modes: GRPO with the full, the exact, the sampled and the stopped gradient; five
  seeds. Does it matter how the prefix's gradient is taken? An hour on one core.
algorithms: PPO with a value head, and DPO on pairs of its own answers, each
  with the exact gradient and on full sequences. Half an hour.
stale: eight GRPO updates on every batch of answers, with the prefixes captured
  anew before each of them, or before every second, fourth or eighth. What does
  a stale capture cost in reward? A quarter of an hour.
drafts: rollouts with compaction alone, with drafts by n-grams, by a learned
  drafter that is frozen after ten steps, and by one that goes on learning. Does
  the reward curve change? What of the time? A quarter of an hour.
drafts_smollm2: ten steps of configs/train.py by the same four drafters.
  Not run in full yet; estimated cost: half an hour on two cores.
tiny: nothing is learnt, in half a minute.

All may be interrupted and started again.
"""

import ml_collections

from configs import variants

_SEEDS = (2, 3)  # those of 0 to 3 that the warm-up suffices for
_PPO = (
    ("reinforce.algorithm.name", "ppo"),
    ("reinforce.algorithm.settings", {"value_clip": None}),
)
_DPO = (
    ("reinforce.algorithm.name", "dpo"),
    ("reinforce.algorithm.settings", {"beta": 0.1}),
)
_LEARNED = (("reinforce.speculation.drafter", "learned"),)


def _gradient(mode: str):
  return (("prefix_gradient", mode),)


def _drafters(freeze_after: int):
  return (
      ("compaction alone", ()),
      ("n-grams", (("reinforce.speculation.drafter", "ngram"),)),
      ("learned, frozen", (
          *_LEARNED, ("reinforce.speculation.studies.until", freeze_after),
      )),
      ("learned, adapting", _LEARNED),
  )


def _shared(steps: int, every: int, *changes):
  return (
      ("reinforce.steps", steps), ("reinforce.most_prompts", 0),
      ("evaluation.every", every), *changes,
  )


# base: variant of configs/train.py. shared, variants: changes of it, by path,
# of all runs and of each way to train.
_STUDIES = {
    "modes": {
        "base": "small",
        "seeds": (0, 1, 2, 3, 4),
        "shared": _shared(120, 20, ("schedule.chunk_size", 64)),
        "variants": (
            ("exact", _gradient("exact")), ("full", _gradient("full")),
            ("sampled", (*_gradient("sampled"), ("sampled.chunks", 3.0))),
            ("stop", _gradient("stop")),
        ),
    },
    "algorithms": {
        "base": "small",
        "seeds": _SEEDS,
        "shared": _shared(100, 20),
        "variants": tuple(
            (f"{name}, {mode}", (*changes, *_gradient(mode)))
            for name, changes in (("PPO", _PPO), ("DPO", _DPO))
            for mode in ("exact", "full")
        ),
    },
    "stale": {
        "base": "small",
        "seeds": _SEEDS,
        "shared": _shared(20, 5, ("reinforce.epochs", 8)),
        "variants": tuple(
            (f"a capture for {k}", (("reinforce.capture_every", k),))
            for k in (1, 2, 4, 8)
        ),
    },
    "drafts": {
        "base": "small", "seeds": _SEEDS, "shared": _shared(100, 20),
        "variants": _drafters(freeze_after=10),
    },
    "drafts_smollm2": {
        "base": "",
        "seeds": (0,),
        "shared": (
            ("reinforce.steps", 10), ("reinforce.prompts", 4),
            ("evaluation.every", 10), ("evaluation.prompts", 8),
        ),
        "variants": _drafters(freeze_after=3),
    },
    "tiny": {
        "base": "tiny",
        "seeds": (0,),
        "shared": (
            ("evaluation.every", 1), ("reinforce.speculation.drafter", "none"),
        ),
        "variants": (
            ("exact", _gradient("exact")), ("stop", _gradient("stop")),
        ),
    },
}


def get_config(variant: str = "modes") -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(variants.chosen(_STUDIES, variant))
