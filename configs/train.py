# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A model learns to find a fact in a document, by reward alone.

A small decoder that knows nothing is shown right answers on short documents,
where that is cheap, until it finds some facts; on documents of 512 characters
it is then trained by GRPO from its own answers and a reward of 0 or 1, with the
exact gradient of branch replay.

  make train-tiny
  python -m experiments.train --config=configs/train.py

Cost: about seven minutes on two cores; may be interrupted and started again.
Expect a held-out reward of at most 0.4 after the supervised phases and of at
least 0.9 at the end, with this seed: others leave the warm-up between 0.03 and
0.70. The committed result is train_tiny.json.

`:smollm2`: SmolLM2-135M-Instruct, prompts of 256 tokens of real text with a
fact and a question about it; the reward is 1 if the answer holds the code asked
for and no other, else 0. About 35 minutes. The results are train_smollm2.json
and train_smollm2_stop.json:

  python -m experiments.train --config=configs/train.py:smollm2
  python -m experiments.train --config=configs/train.py:smollm2 \
    --config.prefix_gradient=stop --workdir=runs/train_smollm2_stop

`:tiny`: the training loop in half a minute; nothing is learnt.
"""

import ml_collections
from ml_collections import config_dict

from configs import variants


def _supervised(steps: int, prompt_tokens: int) -> dict:
  """A phase that learns from right answers."""
  return {
      "kind": "supervised",
      "task": {"prompt_tokens": prompt_tokens},  # changes of `task` below
      "steps": steps,
      "prompts": 64,
      "max_tokens": 5,
      "optimizer": {
          "learning_rate": 3e-3, "warmup": 20, "decay": "constant", "b1": 0.9,
          "b2": 0.98, "weight_decay": 0.01, "clip_norm": 1.0,
      },
  }


_FIELDS = {
    "pretrained": "",  # or smollm2, or a path: then `model` is not read
    "model": {
        "width": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
        "head_dim": 16, "ffn_width": 128, "max_positions": 2048,
        "tied_embeddings": True,
    },
    "compute_dtype": "float32",  # "file" for that of the weights
    "param_dtype": "float32",  # what is trained; "file" for the file's
    "adapter": {  # rank 0 trains all parameters
        "rank": 0,
        "alpha": config_dict.placeholder(float),  # 2 · rank if not set
    },
    "task": {
        "name": "retrieval", "prompt_tokens": 512, "haystack": "letters",
        "naming": "letters", "fact": "{name}{code}", "code_length": 4,
        "distractors": 0, "train": 8192,
    },
    "data_dir": "",
    "seed": 0,
    "devices": 1,
    "phases": ("short", "longer", "long", "reinforce"),
    "short": _supervised(400, 64),
    "longer": _supervised(60, 128),
    "long": _supervised(40, 256),
    "reinforce": {
        "kind": "reinforce",
        "task": {},
        "steps": 400,
        "prompts": 16,  # a step
        "branches": 8,
        "max_tokens": 5,
        "temperature": 1.0,
        "hold": "activations",  # from sampling to learning
        "truncated": "score",  # or zero, leave_out: answers that are cut off
        "epochs": 1,
        "updates": 1,  # an epoch
        "capture_every": 1,
        # Drawn until `prompts` groups differ in reward; 0 draws no others.
        "most_prompts": 32,
        "speculation": {  # who drafts for the sampler: no token depends on it
            "drafter": "none",  # or ngram, learned
            "draft_lengths": (0, 1, 2, 4),  # that the tuner chooses from
            "epsilon": 0.05,  # how often it tries another
            "studies": {  # of a learned one
                "vocabulary": 64,  # ids it drafts
                "updates": 8,  # a step
                "until": 0,  # steps, after which it is frozen; 0 for none
                "learning_rate": 1e-3,
                "rows": 4,
                "width": 128,
                "most_tokens": 65_536,  # of answers that are kept
                "fresh": 0.5,  # how often one of the newest step is drawn
            },
        },
        "algorithm": {
            "name": "grpo", "advantage": "group_relative",
            "settings": {"kl_coefficient": 0.0},
        },
        "optimizer": {
            "learning_rate": 2e-3, "warmup": 10, "decay": "linear", "b1": 0.9,
            "b2": 0.98, "weight_decay": 0.0, "clip_norm": 1.0,
        },
    },
    "evaluation": {
        "split": "validation", "prompts": 128, "branches": 4, "max_tokens": 5,
        "temperature": 1.0, "every": 50,
    },
    "prefix_gradient": "exact",
    "sampled": {"chunks": 4.0, "law": "importance"},
    "schedule": {"chunk_size": 1024},
    "checkpoint_every": 50,
    "most_skipped": 5,  # updates in a row that are not finite, then it stops
    "warn_after": 10,  # steps in a row with nothing to learn from; 0: never
    "export": True,
}
_VARIANTS = {
    "smollm2": {
        "pretrained": "smollm2",
        "compute_dtype": "file",  # float32 for GGUF
        "phases": ("reinforce",),
        "reinforce": {
            "steps": 40,
            "prompts": 8,
            "max_tokens": 24,
            "most_prompts": 0,
            "speculation": {"studies": {"vocabulary": 4096}},
            "optimizer": {
                "learning_rate": 1e-5, "warmup": 2, "decay": "constant",
                "b2": 0.99,
            },
        },
        "evaluation": {"prompts": 32, "max_tokens": 24, "every": 20},
        "checkpoint_every": 10,
    },
    "tiny": {
        "phases": ("short", "reinforce"),
        "short": {
            "steps": 2, "prompts": 2, "optimizer": {"warmup": 1},
            "task": {"prompt_tokens": 48},
        },
        "task": {"prompt_tokens": 64, "train": 16, "validation": 4, "test": 4},
        "reinforce": {
            "steps": 2,
            "prompts": 2,
            "optimizer": {"warmup": 1},
            "speculation": {
                "drafter": "learned", "draft_lengths": (0, 1),
                "studies": {"updates": 1, "width": 8},
            },
        },
        "evaluation": {"prompts": 2, "every": 2},
        "checkpoint_every": 1,
    },
}


def get_config(variant: str = "") -> ml_collections.ConfigDict:
  config = variants.getter(_FIELDS, _VARIANTS)(variant)
  if variant == "smollm2":  # other fields than those of the small model
    config.model = ml_collections.ConfigDict()
    config.task = ml_collections.ConfigDict({
        "name": "retrieval", "prompt_tokens": 256, "distractors": 1,
        "train": 2048, "validation": 64, "test": 64,
    })
    for phase in ("short", "longer", "long"):
      del config[phase]
  return config
