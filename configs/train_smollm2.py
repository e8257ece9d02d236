# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct learns to find a fact in a real document, by reward.

Prompts of 256 tokens of real text with a fact and a question about it; the
reward is 1 if the answer holds the code asked for and no other, else 0. GRPO
with the exact gradient of branch replay, or with the prefix held constant:

  python -m experiments.train --config=configs/train_smollm2.py
  python -m experiments.train --config=configs/train_smollm2.py \
    --config.prefix_gradient=stop --workdir=runs/train_smollm2_stop

Cost: about 35 minutes on two cores; may be interrupted and started again.
"""

import ml_collections
from ml_collections import config_dict

from configs import train_tiny


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      "pretrained": "smollm2",
      "model": {},  # of the pretrained one
      "compute_dtype": "file",  # of the weights; float32 for GGUF
      "param_dtype": "float32",  # what is trained; "file" for the file's
      "adapter": {  # rank 0 trains all parameters
          "rank": 0,
          "alpha": config_dict.placeholder(float),  # 2 · rank if not set
      },
      "task": {
          "name": "retrieval",
          "prompt_tokens": 256,
          "distractors": 1,
          "train": 2048,
          "validation": 64,
          "test": 64,
      },
      "data_dir": "",
      "seed": 0,
      "devices": 1,
      "phases": ("reinforce",),
      "reinforce": {
          "kind": "reinforce",
          "task": {},
          "steps": 40,
          "prompts": 8,  # a step
          "branches": 8,
          "max_tokens": 24,
          "temperature": 1.0,
          "hold": "activations",  # from sampling to learning
          "truncated": "score",  # or zero, leave_out: answers that are cut off
          "epochs": 1,
          "updates": 1,  # an epoch
          "capture_every": 1,
          "most_prompts": 0,  # 0: dead groups are not replaced
          "speculation": train_tiny.speculation(vocabulary=4096),
          "algorithm": {
              "name": "grpo",
              "advantage": "group_relative",
              "settings": {"kl_coefficient": 0.0},
          },
          "optimizer": {
              "learning_rate": 1e-5,
              "warmup": 2,
              "decay": "constant",
              "b1": 0.9,
              "b2": 0.99,
              "weight_decay": 0.0,
              "clip_norm": 1.0,
          },
      },
      "evaluation": {
          "split": "validation",
          "prompts": 32,
          "branches": 4,
          "max_tokens": 24,
          "temperature": 1.0,
          "every": 20,
      },
      "prefix_gradient": "exact",
      "sampled": {"chunks": 4.0, "law": "importance"},
      "schedule": {"chunk_size": 1024},
      "checkpoint_every": 10,
      "most_skipped": 5,  # updates in a row that are not finite, then it stops
      "warn_after": 10,  # steps in a row with nothing to learn from; 0: never
      "export": True,
  })
