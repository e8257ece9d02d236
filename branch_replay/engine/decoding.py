# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs new tokens of every branch on top of a prefix state, for sampling.

`decode` runs tokens that are sampled or drafted; `settle` makes the caches
forget those that a branch does not accept. Nothing is kept for a backward pass.
"""

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay.engine import segment
from branch_replay.mixers import kinds
from branch_replay.mixers import mixer as mixer_lib
from branch_replay.models import pattern


def decode(
    config: config_lib.ModelConfig, layer_params, x_GTM, state, caches,
    slots_GT, layers=None,
):
  """Runs new tokens of every branch through all layers, for sampling.

  Args:
    config: geometry of the model.
    layer_params: the parameters under "layers".
    x_GTM: the embedded new tokens, T for each branch.
    state: `PrefixState` of the prefix.
    caches: what the branches' tokens so far left behind, from `state.caches`.
    slots_GT: i32, the place of each new token in its branch; tokens past the
      room of the caches are not written.
    layers: layers as `rollout.unstacked` has them, run one by one; None scans
      the stacks in `layer_params`.

  Returns:
    y_GTM before the final norm; the caches with the new tokens; and what
    `settle` needs if a branch takes only some of these tokens.
  """
  new_caches, blocks, parts = [], [], pattern.parts(config)
  for part, stacks, of_part, prefixes, turns in zip(
      parts, pattern.split(config, layer_params),
      pattern.split(config, caches), pattern.split(config, state.mixer),
      layers or [None] * len(parts), strict=True,
  ):
    def turn(carry, inputs, part=part, prefixes=prefixes):
      x_GTM, caches = carry
      index, stacks = inputs
      caches, of_turn = list(caches), []
      for place, kind in enumerate(part.kinds):
        def mix(params, mixed, place=place, kind=kind):
          at = mixer_lib.NewTokens(
              index, prefixes[place], state.length, slots_GT
          )
          out, cache, left = kinds.of(config, kind).decode(
              at, params, mixed, caches[place]
          )
          return out, (cache, left)

        x_GTM, (caches[place], left), _ = segment.layer_forward(
            config, kind, stacks[place], x_GTM, mix
        )
        of_turn.append(left)
      return (x_GTM, caches), of_turn

    carry = x_GTM, of_part
    if turns is None:
      carry, of_turns = lax.scan(turn, carry, (jnp.arange(part.count), stacks))
    else:
      of_turns = []
      for numbered in enumerate(turns):
        carry, of_turn = turn(carry, numbered)
        of_turns.append(of_turn)
      of_turns = jax.tree.map(lambda *x: jnp.stack(x), *of_turns)
    x_GTM, of_part = carry
    new_caches.append(of_part)
    blocks.append(of_turns)
  return (
      x_GTM, pattern.join(config, new_caches), pattern.join(config, blocks)
  )


def settle(
    config: config_lib.ModelConfig, layer_params, caches, left, taken_G
):
  """Advances the caches by the tokens that each branch accepts.

  In speculative sampling `decode` runs T tokens of every branch at once, and a
  branch may accept only the first few of them. Attention layers need no change:
  the slots of rejected tokens are not read, and later tokens overwrite them. A
  recurrent layer cannot take tokens out of its state again, so for T > 1
  `decode` leaves its cache as it was before the T tokens; here the accepted
  ones are run once more from there. For T = 1 all built-in layers return their
  caches unchanged, whatever `taken_G` is.

  Args:
    config: geometry of the model.
    layer_params: the parameters under "layers".
    caches: the caches that `decode` returned, by stack.
    left: the third value that the same call of `decode` returned, by stack.
    taken_G: i32, how many of the T tokens each branch accepts, 0 to T, counted
      from the first.

  Returns:
    The caches after the accepted tokens, for the next call of `decode`.
  """
  def of_stack(kind, params, caches, left):
    mixer = kinds.of(config, kind)
    own = params.get(mixer.stage, {})
    return mixer.settle(own, caches, left, taken_G)

  return pattern.over(config, of_stack, layer_params, caches, left)
