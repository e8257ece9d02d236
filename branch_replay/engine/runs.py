# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Run, the unit of work: rows of tokens at the same positions."""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from branch_replay.data import group as group_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.spec import Spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Read:
  """The part of a run that the readout reads: T consecutive tokens a row.

  Attributes:
    targets_RT: i32, the ids that these tokens predict.
    lengths_R: i32, how many of the T are real; outputs of the others are 0 and
      get no gradient.
    window: i32 scalar, the index in the row of the first of the T tokens: 0, or
      in a whole sequence that of the prompt's last token.
  """

  targets_RT: jax.Array
  lengths_R: jax.Array
  window: jax.Array | int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
  """R rows of S tokens that are run side by side, at the same positions.

  Attributes:
    first: i32 scalar, the position of the first token of every row.
    tokens_RS: i32 ids, padded; the number of devices divides S.
    lengths_R: i32, how many tokens of each row are real.
    sequences_R: i32, how many sequences contain each row, for counting experts.
    read: which tokens the readout reads; None for none.
    inner_RS: bool, which tokens belong to a prefix, or to an inner segment of a
      tree, but are not the last of it, which its branches run: those that
      "banded" cuts short. None for no token.
    block: tokens per block, if the tokens of a block all see each other (see
      `Group`); None for causal rows.
  """

  first: jax.Array
  tokens_RS: jax.Array
  lengths_R: jax.Array
  sequences_R: jax.Array
  read: Read | None = None
  inner_RS: jax.Array | None = None
  block: int | None = dataclasses.field(
      default=None, metadata=dict(static=True)
  )

  @property
  def rows(self):
    """All arrays with a leading axis of rows; `of_rows` takes such a tuple."""
    read = self.read
    of_read = None if read is None else (read.targets_RT, read.lengths_R)
    return (
        self.tokens_RS, self.lengths_R, self.sequences_R, of_read, self.inner_RS
    )

  def of_rows(self, rows) -> "Run":
    """A run at the same positions with other rows, in the form of `rows`."""
    tokens, lengths, sequences, of_read, inner = rows
    read = self.read
    if read is not None:
      read = Read(*of_read, read.window)
    return dataclasses.replace(
        self, tokens_RS=tokens, lengths_R=lengths, sequences_R=sequences,
        read=read, inner_RS=inner,
    )


class Action(enum.Enum):
  """What is done with a run; `steps` has a function for each.

  PUSH appends it to the state. VISIT runs it on top of the state, there and
  back. POP takes the run that was pushed last off the state and, except in
  "stop", pulls its cotangent back. In "stop", where a run that was pushed
  gets no cotangent from later ones, PUSH also visits a run that has outputs.
  """

  PUSH = "push"
  VISIT = "visit"
  POP = "pop"


def chunk(tokens, length, index, size: int, sequences=1) -> Run:
  """Makes the run of one chunk of a prefix.

  Args:
    tokens: i32[P] ids of the prefix, padded to whole chunks.
    length: i32 scalar, how many of the P ids are real.
    index: i32 scalar, which chunk.
    size: positions of a chunk.
    sequences: i32 scalar, how many sequences begin with the prefix.
  """
  start = index * size
  return Run(
      jnp.asarray(start, jnp.int32),
      jax.lax.dynamic_slice_in_dim(tokens, start, size)[None],
      jnp.clip(length - start, 0, size)[None],
      jnp.asarray(sequences, jnp.int32)[None],
      inner_RS=jnp.ones((1, size), bool),
  )


def chunks_used(length, chunks: state_lib.Chunks):
  """How many chunks the first `length` positions fill, rounded up."""
  return (length + chunks.size - 1) // chunks.size


def branches(spec: Spec, group: group_lib.Group) -> Run:
  """Makes one run of all branches of a group; in "full" of whole sequences."""
  prefix = group.prompt_length - 1
  window, first, tokens_GS = 0, prefix, group.inputs()
  if spec.whole:
    window, first, tokens_GS = prefix, jnp.zeros((), jnp.int32), group.rows()
  lengths_G = group.tail_lengths
  return Run(
      first, deal(tokens_GS, spec.layout.devices), window + lengths_G,
      (lengths_G > 0).astype(jnp.int32), Read(group.tails, lengths_G, window),
      block=group.block,
  )


def deal(x_RT, devices: int):
  """Pads axis 1 with zeros to a multiple of the number of devices."""
  widths = [(0, 0)] * x_RT.ndim
  widths[1] = 0, -x_RT.shape[1] % devices
  return jnp.pad(x_RT, widths)
