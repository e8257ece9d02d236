# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafts with another decoder of the same vocabulary."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay.engine import state as state_lib
from branch_replay.mixers import kinds
from branch_replay.models import decoder
from branch_replay.rollout import decode
from branch_replay.rollout import law as law_lib
from branch_replay.rollout.drafters.drafter import View
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder, usually a smaller one, that draws with the same noise.

  Attributes:
    params: its parameters.
    state: the prompt captured with these parameters.
    model: the decoder.
  """

  params: dict
  state: state_lib.PrefixState
  model: decoder.Decoder = dataclasses.field(metadata=dict(static=True))

  def init(
      self, model: decoder.Decoder, inputs: RolloutInputs, branches: int,
      room: int,
  ):
    """Makes a cache for the drafter, after checking that it fits.

    Raises:
      ValueError: vocabulary or prompt are not those of the model, or the
        drafter has recurrent layers.
    """
    sizes = self.model.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
      raise ValueError(
          f"The drafter's vocabulary of {sizes[0]} is not the model's of "
          f"{sizes[1]}: take a drafter with the same tokenizer."
      )
    length = int(inputs.state.length)
    if int(self.state.length) != length or jnp.any(
        self.state.tokens[:length] != inputs.state.tokens[:length]
    ):
      raise ValueError(
          "The drafter's state holds another prompt: capture this one with the "
          "drafter's model."
      )
    config = self.model.config
    if kinds.recurrent(config):
      raise ValueError(
          "A drafter with recurrent layers cannot take its drafts back: use "
          "one of attention layers."
      )
    return state_lib.caches(config, self.state.mixer, branches, room)

  def propose(self, settings: RoundSettings, memory, view: View):
    """Runs k + 1 tokens, one after the other.

    The last one is run only so that its keys and values are in the cache: if
    all k drafts are accepted, the next round needs them.
    """
    table_VM = decode.head_table(self.model, self.params)

    def step(carry, inputs):
      cache, token_N = carry
      index, noise_NV = inputs
      hidden_NTM, cache, _ = decode.run(
          self.model, self.params, self.state, cache, view.lengths_N + index,
          token_N[:, None],
      )
      logits_NV = decode.logits(hidden_NTM[:, 0], table_VM)
      token_N, _ = law_lib.draw(settings.law, logits_NV, noise_NV)
      return (cache, token_N), token_N

    noise_TNV = None
    if view.noise_NTV is not None:
      noise_TNV = view.noise_NTV.swapaxes(0, 1)
    places = jnp.arange(settings.draft_length + 1, dtype=jnp.int32)
    (cache, _), tokens_TN = lax.scan(
        step, (memory, view.last_N), (places, noise_TNV)
    )
    return tokens_TN[:-1].T, cache

  def observe(self, settings, memory, view, outcome):
    del settings, view, outcome
    return memory

  def select(self, memory, index):
    return decode.select_rows(memory, index)
