# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Which runs of the prefix "sampled" pulls back, and with what weight.

Popping chunk i pulls its accumulated cotangent cᵢ back. If this is done with
probability qᵢ, and cᵢ is scaled by 1/qᵢ, the expectation is the exact gradient
for any qᵢ > 0 that is fixed before the draw. The size ‖cᵢ‖ is known before the
draw, so qᵢ may depend on it.
"""

import dataclasses
from typing import Literal
from typing import NamedTuple
from typing import get_args

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.devices.layout import Layout
from branch_replay.mixers import kinds
from branch_replay.models import pattern

ChunkLaw = Literal["importance", "top"]

# Least probability of a chunk under "importance" (less if the budget is less
# than this share of the chunks). It bounds the weight 1/q.
_FLOOR = 0.05


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How prefix_gradient="sampled" chooses the chunks that it pulls back.

  Attributes:
    chunks: expected number of chunks that are pulled back, those whose
      probability is 1 included.
    law: "importance" draws chunk i with probability qᵢ ∝ ‖cᵢ‖, capped at 1, and
      weight 1/qᵢ, which is unbiased. "top" takes the chunks of the largest ‖cᵢ‖
      with weight 1, which is deterministic and biased.
  """

  chunks: float = 4.0
  law: ChunkLaw = "importance"

  def __post_init__(self):
    checks.number(self.chunks, "Sampling.chunks", above=0)
    if self.law not in get_args(ChunkLaw):
      raise ValueError(
          f"Unknown law {self.law!r}: use one of "
          f"{', '.join(get_args(ChunkLaw))}."
      )


class PrefixPass(NamedTuple):
  """Report of a sampled prefix pass, for n chunks of the prefix.

  For a tree, n counts the pushed runs without loss of their own, in the order
  in which they are pushed.

  Attributes:
    probability: f32[n], qᵢ; 0 for chunks past the prefix.
    drawn: bool[n], which chunks were pulled back.
    size: f32[n], ‖cᵢ‖ when the chunk was popped.
  """

  probability: jax.Array
  drawn: jax.Array
  size: jax.Array


class Draw(NamedTuple):
  """Inputs to the draw that decides whether "sampled" pulls a run back.

  Only runs without loss of their own are drawn; the others always run.

  Attributes:
    starts_N: i32, the first position of each run on the state, ascending;
      unused entries lie past all positions.
    waiting_N: bool, which of these runs are still to be drawn.
    index: i32 scalar, which of them is drawn now.
    budget: how many of the waiting runs to pull back, in expectation.
    uniform: random number in [0, 1); the run is pulled back if it is below the
      run's probability.
  """

  starts_N: jax.Array
  waiting_N: jax.Array
  index: jax.Array
  budget: jax.Array
  uniform: jax.Array


def sizes(
    config: config_lib.ModelConfig, accumulator, starts_N, index,
    layout: Layout = Layout(),
) -> jax.Array:
  """Computes ‖cᵢ‖ of every chunk, [N], from the accumulated cotangent.

  Layers with a window or a recurrence contribute to chunk `index` only: what
  they send to an earlier chunk is not known before its turn.

  Args:
    config: geometry of the model.
    accumulator: accumulated cotangent of the state.
    starts_N: i32, where each chunk begins on this device, ascending; the last
      chunk ends where the state does.
    index: i32 scalar, the chunk whose turn it is to be popped.
    layout: on which devices the accumulator is.
  """
  chunks = starts_N.shape[0]
  total_N = 0.0
  for kind, stack in pattern.leaves(config, accumulator):
    for x in jax.tree.leaves(stack):
      # In float16 squares overflow; in bfloat16 long sums stop growing.
      x = x.astype(config_lib.at_least_float32(x.dtype))
      if kinds.of(config, kind).positional:
        square_P = jnp.sum(jnp.square(x), axis=(0, 1, 3))
        places_P = jnp.arange(x.shape[2])
        chunk_P = jnp.searchsorted(starts_N, places_P, side="right") - 1
        total_N += jax.ops.segment_sum(square_P, chunk_P, chunks)
      else:
        total_N += jnp.sum(jnp.square(x)) * (jnp.arange(chunks) == index)
  return jnp.sqrt(layout.sum(total_N))


def probabilities(sampling: Sampling, size_N, waiting_N, budget):
  """Computes the probability qᵢ of each chunk that waits to be popped.

  "importance": qᵢ = clip(λ‖cᵢ‖, floor, 1) with λ such that Σ qᵢ = budget, or as
  close as floor and cap allow. "top": qᵢ = 1 for the largest ‖cᵢ‖, else 0.

  Args:
    sampling: the law.
    size_N: ‖cᵢ‖ as accumulated so far.
    waiting_N: bool, which chunks are not popped yet.
    budget: expected number of chunks still to pull back.

  Returns:
    q_N, 0 for chunks that do not wait.
  """
  count = jnp.maximum(jnp.sum(waiting_N), 1)
  even = jnp.clip(budget / count, 0, 1)
  if sampling.law == "top":
    # Rank: how many waiting chunks are larger. Of two equal ones the later,
    # which is popped first, counts as larger.
    at = jnp.arange(size_N.shape[0])
    larger = (size_N[None] > size_N[:, None]) | (
        (size_N[None] == size_N[:, None]) & (at[None] > at[:, None])
    )
    rank_N = jnp.sum(larger & waiting_N[None], axis=1)
    return jnp.where(waiting_N & (rank_N < budget), 1.0, 0.0)

  floor = jnp.minimum(_FLOOR, jnp.maximum(even, 1e-6))
  weight_N = jnp.where(waiting_N, size_N, 0)
  weight_N = weight_N / jnp.maximum(jnp.max(weight_N), 1e-30)

  def at(scale):
    return jnp.where(waiting_N, jnp.clip(scale * weight_N, floor, 1), 0)

  def halve(_, bounds):
    low, high = bounds
    middle = jnp.sqrt(low * high)
    enough = jnp.sum(at(middle)) >= budget
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  # Weights lie in [0, 1], so λ lies between "all at the floor" and "all at 1".
  low, high = jnp.full((), 1e-9, size_N.dtype), jnp.full((), 1e9, size_N.dtype)
  _, scale = lax.fori_loop(0, 60, halve, (low, high))
  return at(scale)


def nothing_drawn(accumulator, chunks: int) -> PrefixPass:
  """Makes the report of `chunks` chunks before the first is drawn."""
  dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(accumulator))
  zeros_N = jnp.zeros(chunks, dtype)
  return PrefixPass(zeros_N, jnp.zeros(chunks, bool), zeros_N)


def pop_or_skip(
    config: config_lib.ModelConfig, drawn, pop, skip, carry, accumulator
):
  """Calls `pop` if the chunk is drawn, else `skip`.

  Both are loops of at most one turn, which unlike `lax.cond` update in place.
  `skip` does nothing where all layers have a place for every position, and is
  not called for such a model.

  Args:
    config: geometry of the model.
    drawn: bool scalar, whether the chunk is drawn.
    pop: (carry, accumulator) -> (carry, accumulator).
    skip: accumulator -> accumulator.
    carry: pytree that `pop` updates.
    accumulator: accumulated cotangent of the state.

  Returns:
    The carry and the accumulator.
  """
  drawn = drawn.astype(jnp.int32)
  carry, accumulator = lax.fori_loop(
      0, drawn, lambda _, both: pop(*both), (carry, accumulator)
  )
  if not kinds.positional(config):
    accumulator = lax.fori_loop(
        0, 1 - drawn, lambda _, accumulator: skip(accumulator), accumulator
    )
  return carry, accumulator


def weight(q, drawn):
  """The weight 1/q of a drawn chunk; 1 for any other, which is not used."""
  return 1 / jnp.where(drawn, q, 1)


def uniforms(key, chunks: int) -> jax.Array:
  """Draws a uniform number in [0, 1) for each chunk, keyed by its index."""
  keys = jax.vmap(lambda index: jax.random.fold_in(key, index))
  return jax.vmap(jax.random.uniform)(keys(jnp.arange(chunks)))


def drawn(
    config: config_lib.ModelConfig, sampling: Sampling, accumulator,
    draw: Draw, layout: Layout = Layout(),
) -> PrefixPass:
  """Draws whether a chunk is pulled back; all devices draw the same.

  Args:
    config: geometry of the model.
    sampling: the law.
    accumulator: accumulated cotangent of the state that includes the chunk.
    draw: inputs to the draw.
    layout: on which devices the accumulator is.

  Returns:
    A `PrefixPass` of scalars.
  """
  size_N = sizes(
      config, accumulator, layout.here(draw.starts_N), draw.index, layout
  )
  q_N = probabilities(sampling, size_N, draw.waiting_N, draw.budget)
  q = q_N[draw.index]
  return PrefixPass(q, draw.uniform < q, size_N[draw.index])

