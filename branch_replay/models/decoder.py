# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoder: embedding, layers under scan, and output head."""

import flax.linen as nn
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.models import block
from branch_replay.models import layers
from branch_replay.models import pattern
from branch_replay.ops.attention import reference as attention_reference


def _scanned(module, count: int):
  """`count` layers, or periods of layers, with stacked parameters."""
  return nn.scan(
      module,
      variable_axes={"params": 0},
      split_rngs={"params": True},
      in_axes=(nn.broadcast, nn.broadcast),
      length=count,
  )


class Period(nn.Module):
  """One turn of a layer pattern: one layer of every kind in it."""

  config: config_lib.ModelConfig
  kinds: tuple[config_lib.Kind, ...]
  experts: bool

  @nn.compact
  def __call__(self, x_GTM, positions_GT, attend):
    for place, kind in enumerate(self.kinds):
      layer = block.Block(self.config, kind, self.experts, name=str(place))
      x_GTM, _ = layer(x_GTM, positions_GT, attend)
    return x_GTM, None


class Parts(nn.Module):
  """The layers of a model with several kinds, stacked as `pattern` says."""

  config: config_lib.ModelConfig

  @nn.compact
  def __call__(self, x_GTM, positions_GT, attend):
    for part in pattern.parts(self.config):
      turns = _scanned(Period, part.count)
      x_GTM, _ = turns(self.config, part.kinds, part.experts, name=part.name)(
          x_GTM, positions_GT, attend
      )
    return x_GTM, None


class Decoder(nn.Module):
  """Llama, Mistral, Qwen, Gemma and DeepSeek decoders, by `ModelConfig`.

  Parameters are `embed/table` [V, M], `layers/<stage>/...` with a leading L
  axis, `final_norm/scale` [M] and, unless the embedding is tied, `head/table`
  [V, M]. Layers of several kinds are stacked as `pattern` says.

  `model.apply({"params": params}, tokens_GT)` is the plain, dense model with
  readable attention; every faster path is tested against it. The engine calls
  the stages of layers itself, and uses the small methods below for embedding,
  final norm and head.

  Attributes:
    config: the model's configuration.
  """

  config: config_lib.ModelConfig

  def setup(self):
    config = self.config
    self.embed = layers.Table(config)
    part, *_ = pattern.parts(config)
    if not part.name:
      self.layers = _scanned(block.Block, part.count)(
          config, *part.kinds, part.experts
      )
    else:
      self.layers = Parts(config)
    self.final_norm = layers.norm(config)
    if not config.tied_embeddings:
      self.head = layers.Table(config)

  def __call__(
      self, tokens_GT, positions_GT=None, *, attend=attention_reference.causal
  ):
    """Logits of whole sequences under a causal mask.

    Args:
      tokens_GT: i32 ids.
      positions_GT: i32 positions; None for 0 … T − 1.
      attend: function (q_KGRTD, k_KGTD, v_KGTD) -> out_KGRTD; in sliding layers
        it also gets window=.

    Returns:
      logits_GTV, at least float32.
    """
    hidden_GTM = self.hidden(tokens_GT, positions_GT, attend=attend)
    dtype = config_lib.at_least_float32(hidden_GTM.dtype)
    return jnp.einsum(
        "gtm,vm->gtv",
        hidden_GTM,
        self.head_table().astype(hidden_GTM.dtype),
        preferred_element_type=dtype,
    )

  def hidden(
      self, tokens_GT, positions_GT=None, *, attend=attention_reference.causal
  ):
    """Hidden states after the final norm, [G, T, M]; arguments as `__call__`.
    """
    if positions_GT is None:
      positions_GT = jnp.broadcast_to(
          jnp.arange(tokens_GT.shape[1]), tokens_GT.shape
      )
    x_GTM, _ = self.layers(self.embed_tokens(tokens_GT), positions_GT, attend)
    hidden_GTM = self.normalize(x_GTM)
    if self.is_initializing():
      self.head_table()
    return hidden_GTM

  def embed_tokens(self, tokens):
    """Embeddings of tokens, in the compute dtype."""
    x = self.embed()[tokens].astype(self.config.compute_dtype)
    return x * self.config.embedding_scale

  def normalize(self, x):
    """The norm between the last layer and the head."""
    return self.final_norm(x)

  def head_table(self):
    """The [V, M] table of the output head, which may be the embedding."""
    if self.config.tied_embeddings:
      return self.embed()
    return self.head()
