# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A small model learns to find a fact in 512 characters, by reward alone.

A decoder that knows nothing is shown right answers on short documents, where
that is cheap, until it finds some facts; on documents of 512 characters it is
then trained by GRPO from its own answers and a reward of 0 or 1, with the exact
gradient of branch replay.

  python -m experiments.train --config=configs/train_tiny.py

Cost: about seven minutes on two cores; may be interrupted and started again.
Expect a held-out reward of at most 0.4 after the supervised phases and of at
least 0.9 at the end, with this seed: others leave the warm-up between 0.03 and
0.70.
"""

import ml_collections
from ml_collections import config_dict


def supervised(steps: int, prompt_tokens: int) -> dict:
  """A phase that learns from right answers."""
  return {
      "kind": "supervised",
      "task": {"prompt_tokens": prompt_tokens},  # changes of `task` below
      "steps": steps,
      "prompts": 64,
      "max_tokens": 5,
      "optimizer": {
          "learning_rate": 3e-3,
          "warmup": 20,
          "decay": "constant",
          "b1": 0.9,
          "b2": 0.98,
          "weight_decay": 0.01,
          "clip_norm": 1.0,
      },
  }


def speculation(vocabulary: int) -> dict:
  """Who drafts for the sampler: no token depends on it."""
  return {
      "drafter": "none",  # or ngram, learned
      "draft_lengths": (0, 1, 2, 4),  # that the tuner chooses from
      "epsilon": 0.05,  # how often it tries another
      "studies": {  # of a learned one
          "vocabulary": vocabulary,  # ids it drafts
          "updates": 8,  # a step
          "until": 0,  # steps, after which it is frozen; 0 for none
          "learning_rate": 1e-3,
          "rows": 4,
          "width": 128,
          "most_tokens": 65_536,  # of answers that are kept
          "fresh": 0.5,  # how often one of the newest step is drawn
      },
  }


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "pretrained": "",  # or smollm2, or a path: then `model` is not read
      "model": {
          "width": 64,
          "num_layers": 2,
          "num_heads": 4,
          "num_kv_heads": 4,
          "head_dim": 16,
          "ffn_width": 128,
          "max_positions": 2048,
          "tied_embeddings": True,
      },
      "compute_dtype": "float32",
      "param_dtype": "float32",  # what is trained; "file" for the file's
      "adapter": {  # rank 0 trains all parameters
          "rank": 0,
          "alpha": config_dict.placeholder(float),  # 2 · rank if not set
      },
      "task": {
          "name": "retrieval",
          "prompt_tokens": 512,
          "haystack": "letters",
          "naming": "letters",
          "fact": "{name}{code}",
          "code_length": 4,
          "distractors": 0,
          "train": 8192,
      },
      "data_dir": "",
      "seed": 0,
      "devices": 1,
      "phases": ("short", "longer", "long", "reinforce"),
      "short": supervised(400, 64),
      "longer": supervised(60, 128),
      "long": supervised(40, 256),
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
          "most_prompts": 32,  # drawn until `prompts` groups differ in reward
          "speculation": speculation(vocabulary=64),
          "algorithm": {
              "name": "grpo",
              "advantage": "group_relative",
              "settings": {"kl_coefficient": 0.0},
          },
          "optimizer": {
              "learning_rate": 2e-3,
              "warmup": 10,
              "decay": "linear",
              "b1": 0.9,
              "b2": 0.98,
              "weight_decay": 0.0,
              "clip_norm": 1.0,
          },
      },
      "evaluation": {
          "split": "validation",
          "prompts": 128,
          "branches": 4,
          "max_tokens": 5,
          "temperature": 1.0,
          "every": 50,
      },
      "prefix_gradient": "exact",
      "sampled": {"chunks": 4.0, "law": "importance"},
      "schedule": {"chunk_size": 1024},
      "checkpoint_every": 50,
      "most_skipped": 5,  # updates in a row that are not finite, then it stops
      "warn_after": 10,  # steps in a row with nothing to learn from; 0: never
      "export": True,
  })
