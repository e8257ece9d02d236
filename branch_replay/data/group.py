# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A group: one prompt and G answers to it, as padded arrays."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from branch_replay import checks
from branch_replay import config as config_lib
from branch_replay.mixers import kinds

_SMALLEST_BUCKET = 8


def bucket(length: int) -> int:
  """Rounds a length up to a bucket, so that few shapes are compiled.

  Buckets are multiples of 8 and of 1/16 of the next lower power of two. Padding
  is at most 6.25 % of the length, or 7 positions below 128.
  """
  if length < 1:
    return 0
  step = max(_SMALLEST_BUCKET, 1 << max(0, length.bit_length() - 5))
  return -(-length // step) * step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Group:
  """One prompt and its branches; several groups stack along a leading axis.

  Attributes:
    prompt: i32[P + 1] ids, padded; its last real token is run with every tail.
    prompt_length: i32[] real tokens of the prompt, at least 1.
    tails: i32[G, T] ids of the answers, padded at the end.
    tail_lengths: i32[G] real tokens of each answer; an answer of 0 tokens
      contributes nothing.
    tail_inputs: i32[G, T] ids that the model reads in place of the last prompt
      token and the tail; None for autoregressive tails.
    block: B, if the tails' tokens are in blocks of B, in which each token sees
      its whole block and all before it; None if no token sees a later one.
  """

  prompt: jax.Array
  prompt_length: jax.Array
  tails: jax.Array
  tail_lengths: jax.Array
  tail_inputs: jax.Array | None = None
  block: int | None = dataclasses.field(
      default=None, metadata=dict(static=True)
  )

  @classmethod
  def create(
      cls,
      prompt: Sequence[int],
      tails: Sequence[Sequence[int]],
      *,
      config: config_lib.ModelConfig,
      branches: int | None = None,
      block: int | None = None,
      tail_inputs: Sequence[Sequence[int]] | None = None,
  ) -> "Group":
    """Makes a group: checks ids and lengths, and pads them to buckets.

    Args:
      prompt: ids, at least one.
      tails: G answers of any lengths; an empty one contributes nothing.
      config: config of the model; it gives vocabulary and position limit.
      branches: number of branches to pad to with empty answers; None for no
        padding.
      block: B, for tails that are not autoregressive: the hidden state at t,
        which predicts tails[t], sees the inputs up to the end of t's block. The
        inputs must therefore not contain what is predicted: see `tail_inputs`.
      tail_inputs: ids that the model reads, of the tails' lengths, with a mask
        id, say, in place of what is predicted; needs `block`. The first one is
        at the position of the prompt's last token. None for that token,
        followed by the tail without its last.

    Returns:
      The padded group.

    Raises:
      TypeError: ids that are text, or an argument of another wrong type.
      ValueError: an empty prompt or group, an id outside the vocabulary, more
        positions than the model has, fewer `branches` than tails, a block below
        1 or for a model with recurrent layers, or `tail_inputs` of other
        lengths than the tails or without `block`.

    Example:
      >>> import branch_replay as br
      >>> config = br.ModelConfig(
      ...     vocab_size=64, width=32, num_layers=1, num_heads=2,
      ...     num_kv_heads=1, head_dim=16, ffn_width=48, max_positions=64)
      >>> group = br.Group.create([5, 6, 7], [[8, 9], [10]], config=config)
      >>> int(group.prompt_length), group.tail_lengths.tolist()
      (3, [2, 1])
    """
    checks.instance(config, "config", config_lib.ModelConfig)
    prompt = as_ids(prompt, "prompt")
    tails = as_rows(tails, "tails")
    if block is not None:
      checks.integer(block, "block", 1)
    if tail_inputs is not None:
      tail_inputs = as_rows(tail_inputs, "tail_inputs")
      if [x.size for x in tail_inputs] != [x.size for x in tails]:
        raise ValueError(
            f"tail_inputs have {[x.size for x in tail_inputs]} tokens, the "
            f"tails {[x.size for x in tails]}: each input has one target."
        )
    if not tails:
      raise ValueError("A group needs at least one tail; got none.")
    if branches is not None:
      checks.integer(branches, "branches", 1)
      if branches < len(tails):
        raise ValueError(f"{len(tails)} tails do not fit branches={branches}.")
      tails += [np.zeros(0, np.int64)] * (branches - len(tails))
    lengths = np.array([len(tail) for tail in tails], np.int32)
    width = max(bucket(int(lengths.max())), 1)

    def pad(rows):
      padded = np.zeros((len(tails), width), np.int64)
      for row, ids in zip(padded, rows, strict=False):  # padded `branches` too
        row[: len(ids)] = ids
      return padded

    length = prompt.size
    room = bucket(length - 1) + 1 if length else 0
    prompt = np.pad(prompt, (0, room - length))
    group = cls(
        prompt, np.int32(length), pad(tails), lengths,
        None if tail_inputs is None else pad(tail_inputs), block,
    )
    check(group, config)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), group)

  def sequences(self):
    """Whole sequences, i32[G, P + 1 + T]: prompt, tail, padding."""
    at = jnp.arange(self.prompt.shape[0] + self.tails.shape[1])
    from_tail = at - self.prompt_length
    tail = jnp.take(
        self.tails, jnp.clip(from_tail, 0, self.tails.shape[1] - 1), axis=1
    )
    prompt = self.prompt[jnp.clip(at, 0, self.prompt.shape[0] - 1)]
    return jnp.where((from_tail < 0)[None], prompt[None], tail)

  def rows(self):
    """Inputs of whole sequences, i32[G, P + T]: the prefix, then `inputs`."""
    if self.tail_inputs is None:
      return self.sequences()[:, :-1]
    at = jnp.arange(self.prompt.shape[0] - 1 + self.tails.shape[1])
    from_tail = at - (self.prompt_length - 1)
    tail = jnp.take(
        self.tail_inputs, jnp.clip(from_tail, 0, self.tails.shape[1] - 1),
        axis=1,
    )
    prompt = self.prompt[jnp.clip(at, 0, self.prompt.shape[0] - 1)]
    return jnp.where((from_tail < 0)[None], prompt[None], tail)

  def inputs(self):
    """Inputs of the tails, i32[G, T]: the boundary token, then the tail.

    The boundary token is the last of the prompt. It predicts the first token of
    every branch, so it is run with the branches and not with the prefix. If
    there are `tail_inputs`, they are the inputs instead.
    """
    if self.tail_inputs is not None:
      return self.tail_inputs
    boundary = self.prompt[self.prompt_length - 1]
    first = jnp.full_like(self.tails[:, :1], boundary)
    return jnp.concatenate([first, self.tails[:, :-1]], axis=1)

  def mask(self):
    """bool[G, T]: which tokens of the tails are real."""
    positions = jnp.broadcast_to(
        jnp.arange(self.tails.shape[-1]), self.tails.shape
    )
    return positions < self.tail_lengths[..., None]


def stack(groups: Sequence[Group]) -> Group:
  """Stacks groups along a leading axis, padded to common lengths.

  Args:
    groups: groups with the same number of branches.

  Returns:
    A group whose arrays have a leading axis of groups. They are run one after
    the other; in `value_and_grad` one prefix state lives at a time.

  Raises:
    TypeError: one group in place of a list.
    ValueError: no groups, different numbers of branches or blocks, or groups
      that are stacked already.
  """
  if isinstance(groups, Group):
    raise TypeError("groups must be a list of Groups, not one Group.")
  groups = list(groups)
  if not groups:
    raise ValueError("No groups to stack.")
  for group in groups:
    checks.instance(group, "groups", Group)
    if group.prompt.ndim != 1:
      raise ValueError("groups are stacked already: stack single ones.")
  branches = {group.tails.shape[0] for group in groups}
  if len(branches) > 1:
    raise ValueError(
        f"Groups of {sorted(branches)} branches: pad the smaller ones with "
        "empty tails, Group.create(..., branches=...)."
    )
  if len({(x.block, x.tail_inputs is None) for x in groups}) > 1:
    raise ValueError(
        f"Groups of blocks {[group.block for group in groups]}, or some with "
        "tail_inputs and some without: stack those that are alike."
    )
  prompt = max(group.prompt.shape[-1] for group in groups)
  tail = max(group.tails.shape[-1] for group in groups)

  def widen(x, width):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])

  wide = [
      dataclasses.replace(
          group,
          prompt=widen(group.prompt, prompt),
          tails=widen(group.tails, tail),
          tail_inputs=None
          if group.tail_inputs is None
          else widen(group.tail_inputs, tail),
      )
      for group in groups
  ]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *wide)


def is_concrete(tree) -> bool:
  """Whether all leaves have values, which tracers under jit do not."""
  return not any(
      isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)
  )


def as_rows(rows, what: str) -> list[np.ndarray]:
  """Converts sequences of ids to i64 arrays; see `as_ids`.

  `what` names the argument in error messages.
  """
  if isinstance(rows, str) or not hasattr(rows, "__iter__"):
    raise TypeError(
        f"{what} must be a list of sequences of ids, not {rows!r} of type "
        f"{type(rows).__name__}."
    )
  return [as_ids(row, what) for row in rows]


def as_ids(tokens, what: str) -> np.ndarray:
  """Converts ids to i64[N], wide enough that none wraps before it is checked.

  Raises:
    TypeError: text, or an array without values under jit.
    ValueError: anything else but one sequence of integers.
  """
  if isinstance(tokens, (str, bytes)):
    raise TypeError(
        f"The {what} must be ids, not text: encode it by the model's tokenizer."
    )
  if isinstance(tokens, jax.core.Tracer):
    raise TypeError(
        f"The {what} must have values, and under jit they have none: make the "
        "group outside and pass it in."
    )
  try:
    tokens = np.asarray(tokens)
  except ValueError as error:  # ragged
    raise ValueError(
        f"The {what} must be one sequence of integer ids each: {error}"
    ) from error
  if tokens.size == 0 and tokens.ndim == 1:
    return np.zeros(0, np.int64)
  if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
    raise ValueError(
        f"The {what} must be one sequence of integer ids each, not shape "
        f"{tokens.shape} of {tokens.dtype}."
    )
  return tokens.astype(np.int64)


def check_tokens(tokens, config: config_lib.ModelConfig, what: str):
  """Raises ValueError for ids outside the vocabulary."""
  tokens = np.asarray(tokens)
  outside = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
  if outside.size:
    raise ValueError(
        f"{outside.size} token ids of the {what} lie outside the vocabulary "
        f"of {config.vocab_size}, for instance {outside[:5].tolist()}. Was "
        "this text encoded by another model's tokenizer?"
    )


def check_positions(length: int, config: config_lib.ModelConfig):
  """Raises ValueError for more positions than the model has."""
  if length > config.max_positions:
    raise ValueError(
        f"{length} positions exceed the model's max_positions="
        f"{config.max_positions}. Shorten the prompt or the tails, or raise "
        "max_positions together with a rope_scaling that was trained for it."
    )


def check(group: Group, config: config_lib.ModelConfig):
  """Raises ValueError for a group that this model cannot be run on.

  Under `jit` values are unknown, and only shapes and dtypes are checked.
  """
  if not isinstance(group, Group):
    raise TypeError(
        "group must be a Group, as Group.create makes one, not a "
        f"{type(group).__name__}."
    )
  tails = np.shape(group.tails)
  if len(tails) < 2 or tails[-2] < 1:
    raise ValueError(f"A group of no branches: tails {tails}.")
  _check_arrays(group)
  if group.prompt.shape[-1] < 1:
    raise ValueError("Empty prompt: at least one token must precede a tail.")
  _check_block(group, config)
  if not is_concrete(group):
    return
  lengths = np.asarray(group.prompt_length)
  if lengths.min() < 1:
    raise ValueError("Empty prompt: at least one token must precede a tail.")
  if lengths.max() > group.prompt.shape[-1]:
    raise ValueError(
        f"prompt_length={lengths.max()} of a prompt of "
        f"{group.prompt.shape[-1]} positions."
    )
  of_tails = np.asarray(group.tail_lengths)
  if of_tails.min() < 0 or of_tails.max() > group.tails.shape[-1]:
    raise ValueError(
        f"tail_lengths from {of_tails.min()} to {of_tails.max()} of tails of "
        f"{group.tails.shape[-1]} positions."
    )
  check_tokens(group.prompt, config, "prompt")
  check_tokens(group.tails, config, "tails")
  if group.tail_inputs is not None:
    check_tokens(group.tail_inputs, config, "tail_inputs")
  tails = np.asarray(group.tail_lengths).max(axis=-1)
  check_positions(int((lengths + tails).max()), config)


def _check_arrays(group: Group):
  """Raises ValueError if arrays of a hand-made group do not fit together."""
  for field in dataclasses.fields(group):
    x = getattr(group, field.name)
    if field.name == "block" or (field.name == "tail_inputs" and x is None):
      continue
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
      raise ValueError(
          f"Group.{field.name} must be an array of integers, not "
          f"{getattr(x, 'dtype', type(x).__name__)}: Group.create makes it."
      )
  tails, prompt = np.shape(group.tails), np.shape(group.prompt)
  for name, wanted in dict(
      tail_lengths=tails[:-1], tail_inputs=tails, prompt_length=prompt[:-1]
  ).items():
    x = getattr(group, name)
    if x is not None and np.shape(x) != wanted:
      raise ValueError(
          f"Group.{name} has shape {np.shape(x)}, not {wanted}, with a prompt "
          f"of {prompt} and tails of {tails}."
      )
  if prompt[:-1] != tails[:-2]:
    raise ValueError(
        f"Group.prompt has shape {prompt} and Group.tails {tails}: as many "
        "groups must be stacked in both."
    )


def _check_block(group: Group, config: config_lib.ModelConfig):
  if group.block is None:
    if group.tail_inputs is not None:
      raise ValueError(
          "tail_inputs are for tails that are not autoregressive: say block=."
      )
    return
  if group.block < 1:
    raise ValueError(f"block must be at least 1, not {group.block}.")
  if kinds.recurrent(config):
    raise ValueError(
        f"block={group.block}: recurrent layers see no later token, so a model "
        "with delta layers has no blocks. Use a model of attention layers."
    )
