# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""From the entries of `ModelConfig.layer_pattern` to their mixers."""

import functools

from branch_replay import config as config_lib
from branch_replay.mixers import attention
from branch_replay.mixers import delta
from branch_replay.mixers import latent
from branch_replay.mixers import mixer
from branch_replay.mixers import window

# The classes of the names in `config.KINDS`.
_CLASSES = {
    "full": attention.FullAttention,
    "sliding": window.SlidingWindow,
    "latent": latent.LatentMixer,
    "delta": delta.GatedDeltaMixer,
}


@functools.lru_cache(maxsize=256)
def of(config: config_lib.ModelConfig, kind: config_lib.Kind) -> mixer.Mixer:
  """The mixer of a kind of layer; raises ValueError for an unknown name."""
  if not isinstance(kind, str):
    return kind(config)
  if kind not in _CLASSES:
    raise ValueError(
        f"Unknown kind of layer {kind!r}: use one of {', '.join(_CLASSES)}."
    )
  return _CLASSES[kind](config)


def recurrent(config: config_lib.ModelConfig) -> bool:
  """Whether the state of some layer goes from token to token."""
  return any(of(config, kind).recurrent for kind in config.layer_pattern)


def positional(config: config_lib.ModelConfig) -> bool:
  """Whether the state of every layer has a place for every position."""
  return all(of(config, kind).positional for kind in config.layer_pattern)
