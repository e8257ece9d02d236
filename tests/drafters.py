# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafters that only tests need: blind ones, and one that knows the answer."""

import dataclasses

import jax
import jax.numpy as jnp


class Blind:
  """A drafter that remembers nothing."""

  def init(self, model, inputs, branches, room):
    return ()

  def observe(self, settings, memory, view, outcome):
    return memory

  def select(self, memory, index):
    return memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Random(Blind):
  """Ids that have nothing to do with the model, some of which may fit."""

  ids: int = 64

  def propose(self, settings, memory, view):
    shape = view.ids_N.size, settings.draft_length
    key = jax.random.fold_in(jax.random.key(9), jnp.sum(view.lengths_N))
    return jax.random.randint(key, shape, 0, self.ids, jnp.int32), memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Constant(Blind):
  """Always the same id, which need not be one of the vocabulary."""

  id: int = 1

  def propose(self, settings, memory, view):
    shape = view.ids_N.size, settings.draft_length
    return jnp.full(shape, self.id, jnp.int32), memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Oracle(Blind):
  """The first `right_G` drafts of a row are what it will be, no others are."""

  tokens_GT: jax.Array
  right_G: jax.Array

  def propose(self, settings, memory, view):
    place_k = jnp.arange(settings.draft_length)
    at_Nk = view.lengths_N[:, None] + place_k[None]
    true_Nk = jnp.take_along_axis(
        self.tokens_GT[view.ids_N], at_Nk, axis=1, mode="fill", fill_value=0
    )
    wrong_Nk = place_k[None] >= self.right_G[view.ids_N][:, None]
    return jnp.where(wrong_Nk, true_Nk + 1, true_Nk), memory
