# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison without the other systems, on a small model, in a minute.

It shows that workers start, agree and end; its times mean nothing.

  python -m experiments.peers --config=configs/peers_tiny.py
"""

import ml_collections

from configs import peers


def get_config() -> ml_collections.ConfigDict:
  config = peers.get_config()
  config.model.update({
      "vocab_size": 64,
      "width": 32,
      "num_layers": 2,
      "num_heads": 4,
      "num_kv_heads": 2,
      "head_dim": 16,
      "ffn_width": 48,
  })
  config.update({
      "prefixes": (32,),
      "branches": 2,
      "tail_tokens": 8,
      "peers": ("ours_full", "ours_exact_keep", "ours_stop"),
      "repeats": 1,
  })
  return config
