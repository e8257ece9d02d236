# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixer: the interface of a kind of layer, which holds all that is known of it.
"""

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
  """One layer of a segment that runs on top of a prefix state.

  Attributes:
    layout: on which devices tokens and parameters are.
    layer: i32 scalar, index of the layer in its stack.
    context: `segment.Context`: the state, and where the segment's tokens stand.
    prefix: what `Mixer.seen` returned for the stack that the layer is in.
  """

  layout: Layout
  layer: jax.Array
  context: Any
  prefix: Any


class Record(NamedTuple):
  """What the forward pass of one layer leaves for its backward pass.

  Attributes:
    mixed: the first `takes` projections, which were mixed.
    out: the output of mixing.
    extra: the third result of `Mixer.forward`.
  """

  mixed: tuple[jax.Array, ...]
  out: jax.Array
  extra: Any


class NewTokens(NamedTuple):
  """One layer of a block of new tokens of every branch, in decoding.

  Attributes:
    layer: i32 scalar, index of the layer in its stack.
    stack: the prefix state of that stack.
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
  """A kind of layer: its modules, state, forward and backward pass, and costs.

  A layer projects its input, mixes tokens, joins the result to the residual
  stream, and ends with a feed-forward, which is the same in every kind of
  layer. A mixer is everything before the feed-forward. A subclass may stand in
  `ModelConfig.layer_pattern`; `kinds.of` makes an instance of it.

  The state of a prefix is kept for a *stack*, the layers that one scan runs: L
  is the number of layers in it. States, cotangents and caches are trees of
  arrays whose shapes the mixer chooses, with a leading L axis. The engine
  passes them from one method to the next. In the methods below, the argument
  `stack` is the state of one stack.

  A *chunk* of the prefix is pushed, which appends what it leaves behind to the
  state, and popped in the backward pass, last chunk first: then its cotangent
  has been accumulated and is pulled back. A *place* is an index along the axis
  of positions of a device's arrays.

  Class attributes that a subclass sets:
    positional: whether all arrays of the state are [L, K, P, D], with a place
      for every position of the prefix, and the accumulator a tuple of such.
    recurrent: whether the state goes from token to token, so that padding must
      be told from tokens: `segment.Context.lengths_G` is then never None.
    stage: the name of the parameters of `mix` among those of the layer.
    takes: how many of the projections are mixed, the first ones. `join` takes
      the others.
    attends: whether it is attention to all positions of the prefix, so that a
      state may keep its outputs; see `attended`.
    geometry: the field of `ModelConfig` that layers of this kind need and other
      layers must not have, "window", "delta" or "latent"; None for none.
    transposes: whether all matrices called "kernel" are those of
      `models.layers.Linear`, which decoding may transpose. A subclass with
      modules of its own is False unless it says otherwise.

  Attributes:
    config: geometry of the model.
  """

  config: config_lib.ModelConfig

  positional: ClassVar[bool]
  recurrent: ClassVar[bool]
  stage: ClassVar[str]
  takes: ClassVar[int]
  attends: ClassVar[bool] = False
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
    """Makes the module that maps x_GTM to projections, a tuple of [G·T, …]."""

  @abc.abstractmethod
  def mix(self) -> nn.Module:
    """Makes the module that owns the parameters named `stage`, for mixing."""

  @abc.abstractmethod
  def join(self) -> nn.Module:
    """Makes the module that adds the output of mixing to the residual stream.

    It maps (x_GTM, output of mixing, *projections that were not mixed) to
    h_GTM.
    """

  @abc.abstractmethod
  def whole(self, module: nn.Module, mixed, positions_GT, attend):
    """Mixes whole sequences without a prefix state, as a reference.

    `forward`, `backward` and `decode` must agree with it and with its gradient.

    Args:
      module: what `mix` made, bound to its parameters.
      mixed: the first `takes` projections.
      positions_GT: i32, absolute positions of the tokens.
      attend: causal attention, (q_KGRTD, k_KGTD, v_KGTD, window=None) ->
        out_KGRTD.

    Returns:
      The output of mixing, which `join` takes.
    """

  # The state of a prefix.

  @abc.abstractmethod
  def empty(self, count: int, sizes: sizes_lib.Sizes):
    """Makes the state of a prefix of no positions, for one stack.

    Args:
      count: L, layers of the stack.
      sizes: how many positions there must be room for.
    """

  @abc.abstractmethod
  def accumulator(self, count: int, sizes: sizes_lib.Sizes, dtype):
    """Makes zeros in which the cotangent of what `seen` returns is added up.

    Args:
      count: L, layers of the stack.
      sizes: how many positions the state has room for.
      dtype: the dtype that is asked for; a mixer may take a wider one.
    """

  def seen(self, stack):
    """Returns the part of a stack's state that segments on top of it read."""
    return stack

  @abc.abstractmethod
  def push(self, stack, present, chunk: sizes_lib.Chunk):
    """Returns the state after one more chunk of the prefix.

    Args:
      stack: the state before the chunk.
      present: what `forward` said the chunk leaves behind, of all L layers.
      chunk: where the chunk stands.
    """

  @abc.abstractmethod
  def extend(self, stack, present, chunk: sizes_lib.Chunk):
    """Returns the state after tokens that will not be popped.

    It differs from `push` in padding: positions past the first `chunk.tokens`
    are not written, since there may be no room for them.

    Args:
      stack: the state before the tokens.
      present: as in `push`.
      chunk: where the tokens stand, and how many are real.
    """

  @abc.abstractmethod
  def save(self, stack, size: int):
    """Returns what `restore` will need of a state before a chunk is pushed.

    Args:
      stack: the state before the chunk.
      size: positions of the chunk on this device, its padding included.

    Returns:
      A tree of arrays; () if nothing is needed.
    """

  @abc.abstractmethod
  def restore(self, stack, saved, chunk: sizes_lib.Chunk):
    """Returns the state as it was before the chunk that was pushed last.

    A positional mixer may return the state after it: segments do not read
    places past their own prefix.

    Args:
      stack: the state after the chunk.
      saved: what `save` returned before it.
      chunk: where the chunk stands.
    """

  @abc.abstractmethod
  def skip(self, stack, chunk: sizes_lib.Chunk):
    """Returns the accumulator after a chunk that is not pulled back.

    "sampled" calls this instead of `backward` for the chunks it leaves out.

    Args:
      stack: the accumulator of the stack before.
      chunk: where the chunk stands.
    """

  @abc.abstractmethod
  def fit(self, stack, here: int):
    """Returns the state with room for another number of positions.

    Args:
      stack: the state.
      here: positions on this device, not fewer than the state holds.
    """

  # Segments.

  @abc.abstractmethod
  def forward(self, at: OnPrefix, params, mixed):
    """Mixes the tokens of a segment in one layer.

    Args:
      at: the layer, and the state that the segment runs on.
      params: the layer's parameters named `stage`.
      mixed: the first `takes` projections.

    Returns:
      The output of mixing; what the segment leaves behind in this layer, which
      `push` is given for all layers of the stack; and what `backward` needs
      beside inputs and output, as `Record.extra`.
    """

  @abc.abstractmethod
  def backward(
      self, at: OnPrefix, params, record: Record, d_out, accumulator, popped
  ):
    """Pulls the cotangent of a layer's output of mixing back.

    Args:
      at, params: as in `forward`.
      record: what the forward pass left.
      d_out: cotangent of the output.
      accumulator: cotangent so far of what `seen` returned, of the whole stack;
        that of this layer is updated in place. None treats the prefix as
        constant.
      popped: `segment.Popped` if the segment is a chunk of the prefix, whose
        own accumulated cotangent is pulled back too; else None.

    Returns:
      Cotangents of the projections in `mixed`, those of `params`, and the
      updated accumulator.
    """

  def attended(self, out, extra):
    """Arranges outputs of `forward` so that a state can keep them by position.

    Only for a mixer that `attends`, as the next two.

    Args:
      out: the first result of `forward`, for a segment of one row.
      extra: the third.

    Returns:
      Arrays [K, 1, C, D] like those that are left behind, K and D any numbers.
    """
    raise NotImplementedError

  def given(self, attended):
    """Undoes `attended`: returns (out, extra) of arrays [K, C, D]."""
    raise NotImplementedError

  def attended_zeros(self, count: int, slots: int):
    """Zeros for what `attended` returns of L layers: arrays [L, K, slots, D].
    """
    raise NotImplementedError

  # Decoding.

  @abc.abstractmethod
  def cache(self, count: int, branches: int, tokens: int, stack):
    """Makes the cache of one stack, for the tokens that branches decode.

    In each of its arrays axis 2 is that of the branches.

    Args:
      count: L, layers of the stack.
      branches: G.
      tokens: the most tokens that a branch may decode.
      stack: the prefix state of the stack.
    """

  @abc.abstractmethod
  def decode(self, at: NewTokens, params, mixed, cache):
    """Mixes new tokens of every branch in one layer.

    Args:
      at: the layer, and where the tokens stand.
      params, mixed: as in `forward`.
      cache: the cache of the whole stack.

    Returns:
      The output of mixing; the cache with the new tokens; and what `settle`
      needs if branches accept only some of the tokens, None if it needs
      nothing.
    """

  @abc.abstractmethod
  def settle(self, params, cache, block, taken_G):
    """Returns a stack's cache after the tokens that each branch accepts.

    Args:
      params: the parameters named `stage`, of all layers of the stack.
      cache: the cache that `decode` returned.
      block: the third result of `decode`, of all layers of the stack.
      taken_G: i32, how many of the new tokens each branch accepts, counted from
        the first.
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
    """Counts the floating-point operations of mixing in one layer, forward.

    The products that `weights` counts are left out.

    Args:
      tokens: tokens that are mixed.
      prefix: positions before them.
    """

  def banded_operations(self, tokens: int, window: int, sinks: int) -> int:
    """As `operations` without a prefix, for a pass that is cut to a band.

    Args:
      tokens: tokens that are mixed.
      window, sinks: see `engine.band`. A mixer that does not attend to all
        positions is not cut.
    """
    del window, sinks
    return self.operations(tokens, 0)

  @abc.abstractmethod
  def stage_bytes(self) -> int:
    """Bytes of a token's activations in one layer, for its backward pass.

    They are the inputs of the layer, of mixing, of `join` and of the
    feed-forward. The hidden activations of the feed-forward are counted
    elsewhere, in `schedule.stage_bytes`.
    """

  def query_numbers(self) -> int:
    """How many numbers the queries of one token are in one layer, for planning.
    """
    return self.config.num_heads * self.config.head_dim
