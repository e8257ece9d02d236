# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Looks up the mixer of each entry of `ModelConfig.layer_pattern`."""

import functools

from branch_replay import config as config_lib
from branch_replay.mixers import attention
from branch_replay.mixers import delta
from branch_replay.mixers import latent
from branch_replay.mixers import mixer
from branch_replay.mixers import window

# The mixer of each name in `config.KINDS`.
_CLASSES = {
    "full": attention.FullAttention,
    "sliding": window.SlidingWindow,
    "latent": latent.LatentMixer,
    "delta": delta.GatedDeltaMixer,
}


@functools.lru_cache(maxsize=256)
def of(config: config_lib.ModelConfig, kind: config_lib.Kind) -> mixer.Mixer:
  """Makes the mixer of a kind of layer; raises ValueError for unknown names."""
  if not isinstance(kind, str):
    return kind(config)
  if kind not in _CLASSES:
    raise ValueError(
        f"Unknown kind of layer {kind!r}: use one of {', '.join(_CLASSES)}."
    )
  return _CLASSES[kind](config)


def recurrent(config: config_lib.ModelConfig) -> bool:
  """Whether some layer updates its state token by token, as delta layers do."""
  return any(of(config, kind).recurrent for kind in config.layer_pattern)


def positional(config: config_lib.ModelConfig) -> bool:
  """Whether the state of every layer has a place for every position."""
  return all(of(config, kind).positional for kind in config.layer_pattern)
