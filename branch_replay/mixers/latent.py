# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Latent attention layers; see `models.latent_layers`.

Their state is one array of [L, 1, P, C + D_r]: the latents and rotated keys
that all heads share, which attention reads as keys and as values. Cotangents of
the two uses are accumulated apart, as the op writes them.
"""

import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.mixers import attention
from branch_replay.mixers import places
from branch_replay.models import latent_layers


class LatentMixer(attention.FullAttention):
  """Attention to one compressed vector per position, shared by all heads."""

  takes = 2  # queries and latents
  geometry = "latent"
  transposes = True

  @property
  def slot_shape(self) -> tuple[int, int]:
    return 1, self.config.latent.slot

  def project(self):
    return latent_layers.LatentProject(self.config)

  def mix(self):
    return latent_layers.LatentRotate(self.config)

  def join(self):
    return latent_layers.LatentJoin(self.config)

  def empty(self, count, sizes):
    return super().empty(count, sizes)[0]

  def seen(self, stack):
    """Returns the array of the state twice: it is read as keys and as values.
    """
    return stack, stack

  def push(self, stack, present, chunk):
    return places.push((stack,), present[:1], chunk)[0]

  def extend(self, stack, present, chunk):
    return places.extend((stack,), present[:1], chunk)[0]

  def fit(self, stack, here: int):
    return places.fit((stack,), here)[0]

  def weights(self) -> int:
    config, latent = self.config, self.config.latent
    heads = config.num_heads
    queries = config.width * heads * latent.query_dim
    if latent.query_rank:
      queries = latent.query_rank * (config.width + heads * latent.query_dim)
    values = heads * latent.value_dim
    return (
        queries + config.width * (latent.slot + values)
        + heads * latent.nope_dim * latent.rank + values * latent.rank
    )

  def stage_bytes(self) -> int:
    config, latent = self.config, self.config.latent
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    wide = config_lib.at_least_float32(config.compute_dtype).itemsize
    queries = latent.query_rank or config.num_heads * latent.query_dim
    stages = 2 * config.width + queries
    attended = (1 + config.num_heads) * latent.slot
    return itemsize * (stages + attended) + wide * config.num_heads

  def query_numbers(self) -> int:
    """Heads times the width of a query: the latent's or `head_dim`, the larger.
    """
    latent, config = self.config.latent, self.config
    return config.num_heads * max(config.head_dim, latent.slot)
