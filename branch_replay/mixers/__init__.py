# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The kinds of layer. A model may also have subclasses of them, or of `Mixer`.
"""

from branch_replay.mixers.attention import FullAttention
from branch_replay.mixers.delta import GatedDeltaMixer
from branch_replay.mixers.latent import LatentMixer
from branch_replay.mixers.mixer import Mixer
from branch_replay.mixers.window import SlidingWindow

__all__ = [
    "FullAttention",
    "GatedDeltaMixer",
    "LatentMixer",
    "Mixer",
    "SlidingWindow",
]
