# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixer: all that there is to know of one kind of layer."""

import abc
import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import flax.linen as nn
import jax

from branch_replay import config as config_lib
from branch_replay.devices.layout import Layout
from branch_replay.mixers import sizes as sizes_lib


class OnPrefix(NamedTuple):
  """A layer of a segment that continues from a prefix.

  Attributes:
    layout: where tokens live.
    layer: i32 scalar, which layer of the stack.
    context: `segment.Context`.
    prefix: what `Mixer.seen` gave of the stack's state.
  """

  layout: Layout
  layer: jax.Array
  context: Any
  prefix: Any


class Record(NamedTuple):
  """A forward pass of one layer, as its backward pass reads it.

  Attributes:
    mixed: the projections that went in.
    out: the output.
    extra: what else `Mixer.forward` wanted kept.
  """

  mixed: tuple[jax.Array, ...]
  out: jax.Array
  extra: Any


class NewTokens(NamedTuple):
  """A layer of a block of new tokens of every branch.

  Attributes:
    layer: i32 scalar, which layer of the stack.
    stack: the state of the prefix.
    length: i32 scalar, positions of the prefix.
    slots_GT: i32, the cache slots of the new tokens, consecutive in each
      branch. The token of slot s is at position length + s.
  """

  layer: jax.Array
  stack: Any
  length: jax.Array
  slots_GT: jax.Array


@dataclasses.dataclass(frozen=True)
class Mixer(abc.ABC):
  """A kind of layer: its modules, its state, the way there and back, its costs.

  A layer projects its input, mixes tokens, joins the result to the residual
  stream, and ends with a feed-forward, which is the same in every kind of
  layer. A mixer is everything before the feed-forward. A subclass may stand in
  `ModelConfig.layer_pattern`; `kinds.of` makes an instance of it.

  The state of a prefix is kept for a *stack*, the layers that one scan runs: L
  is the number of layers in it. States, cotangents and caches are trees of
  arrays whose shapes the mixer chooses, with a leading L axis; everyone else
  hands them through.

  Class attributes that a subclass sets:
    positional: whether all arrays of the state are [L, K, P, D], with a place
      for every position of the prefix, and the accumulator a tuple of such.
    recurrent: whether the state goes from token to token, so that padding must
      be told from tokens: `segment.Context.lengths_G` is then never None.
    stage: the name of the parameters of `mix` among those of the layer.
    takes: how many of the projections `mix` takes, the first ones. `join` takes
      the others.
    geometry: the field of `ModelConfig` that layers of this kind need and other
      layers must not have, "window", "delta" or "latent"; None for none.
    transposes: whether all matrices called "kernel" are those of
      `models.layers.Linear`, which decoding may transpose. A subclass with
      modules of its own is False unless it says otherwise.

  Attributes:
    config: geometry.
  """

  config: config_lib.ModelConfig

  positional: ClassVar[bool]
  recurrent: ClassVar[bool]
  stage: ClassVar[str]
  takes: ClassVar[int]
  geometry: ClassVar[str | None] = None
  transposes: ClassVar[bool] = False

  def __init_subclass__(cls, **options):
    super().__init_subclass__(**options)
    own = {"project", "mix", "join"} & set(vars(cls))
    if own and "transposes" not in vars(cls):
      cls.transposes = False

  # Modules.

  @abc.abstractmethod
  def project(self) -> nn.Module:
    """Makes the module x_GTM ↦ a tuple of projections, [G·T, numbers] each."""

  @abc.abstractmethod
  def mix(self) -> nn.Module:
    """Makes the module that owns the parameters of `stage`."""

  @abc.abstractmethod
  def join(self) -> nn.Module:
    """Makes the module (x_GTM, out, *the other projections) ↦ h_GTM."""

  @abc.abstractmethod
  def whole(self, module: nn.Module, mixed, positions_GT, attend):
    """Mixes whole sequences: the reference that all below must agree with.

    Args:
      module: what `mix` made, with its parameters.
      mixed: the first `takes` projections.
      positions_GT: i32.
      attend: (q_KGRTD, k_KGTD, v_KGTD, window=None) -> out_KGRTD, causal.

    Returns:
      What `join` takes as the output, as `forward` does.
    """

  # The state of a prefix.

  @abc.abstractmethod
  def empty(self, count: int, sizes: sizes_lib.Sizes):
    """The state of no positions, for a stack of `count` layers."""

  @abc.abstractmethod
  def accumulator(self, count: int, sizes: sizes_lib.Sizes, dtype):
    """Zeros for the cotangent of what `seen` gives, to be added to."""

  def seen(self, stack):
    """What a segment reads of the state that it continues from."""
    return stack

  @abc.abstractmethod
  def push(self, stack, present, chunk: sizes_lib.Chunk):
    """The state after one more chunk.

    Args:
      stack: the state before it.
      present: what `forward` said the chunk leaves behind, of every layer.
      chunk: where it stands.
    """

  @abc.abstractmethod
  def extend(self, stack, present, chunk: sizes_lib.Chunk):
    """As `push`, of tokens that need not fill what they are padded to."""

  @abc.abstractmethod
  def save(self, stack, size: int):
    """What `restore` will need of a state before a chunk is pushed.

    Args:
      stack: the state.
      size: positions of the chunk on this device, its padding included.
    """

  @abc.abstractmethod
  def restore(self, stack, saved, chunk: sizes_lib.Chunk):
    """The state before the chunk that was pushed last, from that after it.

    Args:
      stack: the state after the chunk.
      saved: what `save` gave before it.
      chunk: where it stands.
    """

  @abc.abstractmethod
  def skip(self, stack, chunk: sizes_lib.Chunk):
    """The accumulator after the turn of a chunk that is not pulled back."""

  @abc.abstractmethod
  def fit(self, stack, here: int):
    """The state with room for `here` positions on this device."""

  # Segments.

  @abc.abstractmethod
  def forward(self, at: OnPrefix, params, mixed):
    """Mixes the tokens of a segment in one layer.

    Args:
      at: the layer, and what it continues from.
      params: of `stage`.
      mixed: the first `takes` projections.

    Returns:
      The output, what the segment leaves behind (the layer's part of what
      `push` is given), and what `backward` wants kept.
    """

  @abc.abstractmethod
  def backward(
      self, at: OnPrefix, params, record: Record, d_out, accumulator, popped
  ):
    """Pulls the cotangent of a layer's output back.

    Args:
      at, params: as in `forward`.
      record: of the forward pass.
      d_out: cotangent of the output.
      accumulator: of the stack, added to in place; None to stop at the prefix.
      popped: `segment.Popped` if the segment is a chunk of the prefix, whose
        own accumulated cotangent is pulled back too; else None.

    Returns:
      Cotangents of the projections and of the parameters, and the accumulator.
    """

  # Decoding.

  @abc.abstractmethod
  def cache(self, count: int, branches: int, tokens: int, stack):
    """Room for what new tokens leave behind; axis 2 is that of branches.

    Args:
      count: layers.
      branches: G.
      tokens: most new tokens of a branch.
      stack: the state of the prefix.
    """

  @abc.abstractmethod
  def decode(self, at: NewTokens, params, mixed, cache):
    """Mixes new tokens of every branch in one layer.

    Args:
      at: the layer, and where the tokens stand.
      params, mixed: as in `forward`.
      cache: of the stack.

    Returns:
      The output, the cache with the new tokens, and what `settle` needs in
      order to take in some of them.
    """

  @abc.abstractmethod
  def settle(self, params, cache, block, taken_G):
    """The cache after those tokens of a block that each branch took.

    Args:
      params: of `stage`, of the whole stack.
      cache: that `decode` returned.
      block: what else `decode` returned, of every layer.
      taken_G: i32, how many of the block's tokens, the first ones, are now of
        the branch.
    """

  # Costs.

  @abc.abstractmethod
  def weights(self) -> int:
    """Counts the weights of one layer that a token is multiplied by.

    They are the elements of all matrices, and of convolution filters, in
    `project`, `mix` and `join`. The feed-forward, biases and scales of norms
    are not counted. For planning: each weight costs a token 2 operations
    forward.
    """

  @abc.abstractmethod
  def operations(self, tokens: int, prefix: int) -> int:
    """Operations of mixing `tokens` after `prefix` positions in one layer.

    Forward alone, without the products that `weights` counts.
    """

  @abc.abstractmethod
  def stage_bytes(self) -> int:
    """Bytes that are kept of a token for one layer's backward pass.

    Inputs of `mix`, `join` and the feed-forward, and of the layer; not what
    the feed-forward expands to.
    """

  def query_numbers(self) -> int:
    """Numbers of a token's queries in one layer, for planning."""
    return self.config.num_heads * self.config.head_dim
