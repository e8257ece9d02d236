# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter of one trained decoder layer on the model's last hidden state.

Let h_t be the model's hidden state after token x_t. Item t of a row is the pair
(h_t, x_{t+1}). From it the layer predicts h_{t+1}, and the model's own head
turns that into x_{t+2}. Where h is not known yet, its prediction is used.
Embedding, final norm and head are the model's, read in every rollout and so
never stale. The layer and the map that joins the pair are trained.

The layer attends to the row's earlier items, with keys and values of its own,
and to the prompt with the keys and values that the *model's* last layer left in
the captured state, so nothing of the prompt is run again or copied. In a row's
first round no h is known, and its first draft is a blind guess.

Sources: the pairing of h and x follows Li et al. 2024 (EAGLE),
https://arxiv.org/abs/2401.15077; reading the model's keys follows Du et al.
2024 (GliDe), https://arxiv.org/abs/2402.02082.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import segment
from branch_replay.engine import state as state_lib
from branch_replay.mixers import kinds
from branch_replay.mixers import places
from branch_replay.models import decoder
from branch_replay.models import pattern
from branch_replay.ops import attention
from branch_replay.rollout import decode
from branch_replay.rollout import law as law_lib
from branch_replay.rollout.drafters import vocabulary as vocabulary_lib
from branch_replay.rollout.drafters.drafter import RoundOutcome
from branch_replay.rollout.drafters.drafter import View
from branch_replay.rollout.problem import RolloutInputs
from branch_replay.rollout.problem import RoundSettings


class Memory(NamedTuple):
  """What the drafter remembers of N rows.

  Attributes:
    cache: cache of the one layer, see `decode`, with all items so far.
    hidden_NM: the hidden state predicted from each row's last item.
    table_UM: the output head's rows for the ids that are drafted.
  """

  cache: tuple[jax.Array, jax.Array]
  hidden_NM: jax.Array
  table_UM: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learned:
  """The drafter; `create` makes an untrained one.

  Attributes:
    params: `pair/kernel` [2M, M], the map of the pair, and `layer`, like one
      layer of the model.
    vocabulary: i32[U], the ids it drafts, in ascending order.
  """

  params: dict
  vocabulary: jax.Array

  @classmethod
  def create(
      cls, model: decoder.Decoder, params, vocabulary: Sequence[int], key
  ) -> "Learned":
    """A drafter whose layer starts as a copy of the model's last layer.

    Its parameters are at least float32, because they are to be trained.

    Args:
      model: the decoder it drafts for.
      params: the decoder's parameters.
      vocabulary: ids to draft, made by `vocabulary.most_frequent`.
      key: a PRNG key.

    Raises:
      ValueError: ids that are not a vocabulary of this model, or a model whose
        layers are not all alike.
    """
    check_fits(model.config)
    vocabulary_lib.check(vocabulary, model.config.vocab_size)
    width = model.config.width
    dtype = config_lib.at_least_float32(model.config.param_dtype)
    kernel = jax.nn.initializers.lecun_normal()(key, (2 * width, width), dtype)
    last = jax.tree.map(
        lambda x: jnp.array(x[-1], config_lib.at_least_float32(x.dtype)),
        params["layers"],
    )
    return cls(
        {"pair": {"kernel": kernel}, "layer": last},
        jnp.asarray(vocabulary, jnp.int32),
    )

  def with_params(self, params, vocabulary) -> "Learned":
    """The drafter with other parameters, trained meanwhile or restored.

    Args:
      params: a tree like `self.params`.
      vocabulary: the vocabulary they were trained with.

    Raises:
      ValueError: it is not this drafter's vocabulary.
    """
    vocabulary_lib.check_same(self.vocabulary, vocabulary)
    return dataclasses.replace(self, params=params)

  def init(
      self, model: decoder.Decoder, inputs: RolloutInputs, branches: int,
      room: int,
  ) -> Memory:
    config = model.config
    rows = self.params["pair"]["kernel"].shape[0]
    if rows != 2 * config.width:
      raise ValueError(
          f"The drafter was made for a model of width {rows // 2}, this one "
          f"has {config.width}."
      )
    check_fits(config)
    return Memory(
        kinds.of(config, "full").cache(1, branches, room, None),
        jnp.zeros((branches, config.width), config.compute_dtype),
        decode.head_table(model, inputs.params)[self.vocabulary],
    )

  def propose(self, settings: RoundSettings, memory: Memory, view: View):
    cache, hidden_NM, table_UM = memory
    drafts = []
    for index in range(settings.draft_length):
      if index:
        hidden_N1M, cache = self._run(
            settings.model, view.inputs, cache, view.lengths_N + index - 1,
            hidden_NM[:, None], drafts[-1][:, None],
        )
        hidden_NM = hidden_N1M[:, 0]
      noise_NU = None
      if view.noise_NTV is not None:
        noise_NU = view.noise_NTV[:, index, self.vocabulary]
      chosen_N, _ = law_lib.draw(
          settings.law, decode.logits(hidden_NM, table_UM), noise_NU
      )
      drafts.append(self.vocabulary[chosen_N])
    draft_Nk = (
        jnp.stack(drafts, axis=1) if drafts
        else jnp.zeros((view.ids_N.size, 0), jnp.int32)
    )
    # `observe` overwrites the cached items that were made of predictions.
    return draft_Nk, memory._replace(cache=cache)

  def observe(
      self, settings: RoundSettings, memory: Memory, view: View,
      outcome: RoundOutcome,
  ) -> Memory:
    hidden_NTM, cache = self._run(
        settings.model, view.inputs, memory.cache, view.lengths_N,
        outcome.hidden_NTM, outcome.tokens_NT,
    )
    last_N11 = jnp.maximum(outcome.emitted_N - 1, 0)[:, None, None]
    hidden_N1M = jnp.take_along_axis(hidden_NTM, last_N11, axis=1)
    return memory._replace(cache=cache, hidden_NM=hidden_N1M[:, 0])

  def select(self, memory: Memory, index) -> Memory:
    return memory._replace(
        cache=decode.select_rows(memory.cache, index),
        hidden_NM=memory.hidden_NM[index],
    )

  def _run(
      self, model, inputs: RolloutInputs, cache, starts_N, hidden_NTM, tokens_NT
  ):
    """Runs the layer on new items, as `decode.run` runs the model on tokens."""
    slots_NT = decode.slots(starts_N, tokens_NT.shape[1])
    state, last = inputs.state, model.config.num_layers - 1

    def attend(q, k, v):
      new = places.write_cache(cache, 0, slots_NT, (k, v))
      out = attention.decode(
          q, new, 0, slots_NT,
          attention.PrefixLayer(state.mixer, last, state.length),
      )
      return out, new

    return layer(
        model, inputs.params, self.params, hidden_NTM, tokens_NT,
        positions_NT=state.length + slots_NT, attend=attend,
    )


def check_fits(config: config_lib.ModelConfig) -> None:
  """Raises ValueError for a model that this drafter's layer cannot serve."""
  if pattern.parts(config)[0].name or config.layer_pattern != ("full",):
    raise ValueError(
        "This drafter's layer is like all of the model's, of full attention, "
        "and this model's differ: layer_pattern="
        f"{config.layer_pattern}, or some layers alone have experts. Take "
        "NGram or Model."
    )


def last_layer(state: state_lib.PrefixState) -> state_lib.PrefixState:
  """Reduces a captured state to the last layer, which is all the drafter reads.
  """
  return dataclasses.replace(
      state, mixer=tuple(x[-1:] for x in state.mixer), kept=None, choices={},
      attended={},
  )


def layer(
    model, params, drafter_params, hidden_NTM, tokens_NT, *, positions_NT,
    attend,
):
  """Runs the drafter's layer: hidden states predicted from items.

  Args:
    model: the decoder that is drafted for.
    params: its parameters, of which embedding and final norm are read.
    drafter_params: the drafter's parameters.
    hidden_NTM: the model's hidden state before each token.
    tokens_NT: i32, the token that followed it.
    positions_NT: i32, absolute positions of these tokens.
    attend: function (q, k, v) -> (out_KGRTD, extra), whose arguments are as
      `FullAttention.heads` gives them.

  Returns:
    Predicted hidden states after the final norm, [N, T, M], and `extra`.
  """
  outer = {"params": segment.outer(params)}
  embedded_NTM = model.apply(outer, tokens_NT, method="embed_tokens")
  pairs_NTA = jnp.concatenate([hidden_NTM, embedded_NTM], axis=-1)
  kernel_AM = drafter_params["pair"]["kernel"].astype(pairs_NTA.dtype)

  def mix(params, mixed):
    full = kinds.of(model.config, "full")
    return attend(*full.heads(params, mixed, positions_NT))

  y_NTM, extra, _ = segment.layer_forward(
      model.config, "full", drafter_params["layer"], pairs_NTA @ kernel_AM, mix
  )
  return model.apply(outer, y_NTM, method="normalize"), extra
