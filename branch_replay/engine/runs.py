# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The unit of work: a run of tokens, and the runs that a group is made of."""

import dataclasses

import jax
import jax.numpy as jnp

from branch_replay.data import group as group_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.spec import Spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Read:
  """What is read of a run: T consecutive tokens of each row.

  Attributes:
    targets_RT: i32, the ids that these tokens predict.
    lengths_R: i32, how many of the T are real; the outputs of the others are 0
      and send nothing back.
    window: i32 scalar, the place in the row of the first of the T: 0, or in a
      whole sequence that of the prompt's last token.
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
    sequences_R: i32, in how many whole sequences each row stands.
    read: what is read of the rows; None for nothing.
    block: B, if tokens are in blocks that see themselves whole, see `Group`.
  """

  first: jax.Array
  tokens_RS: jax.Array
  lengths_R: jax.Array
  sequences_R: jax.Array
  read: Read | None = None
  block: int | None = dataclasses.field(
      default=None, metadata=dict(static=True)
  )

  @property
  def rows(self):
    """The arrays with an axis of rows, for `of_rows`."""
    read = self.read
    of_read = None if read is None else (read.targets_RT, read.lengths_R)
    return self.tokens_RS, self.lengths_R, self.sequences_R, of_read

  def of_rows(self, rows) -> "Run":
    """The run with other rows, as `rows` gives them."""
    tokens, lengths, sequences, of_read = rows
    read = self.read
    if read is not None:
      read = Read(*of_read, read.window)
    return dataclasses.replace(
        self, tokens_RS=tokens, lengths_R=lengths, sequences_R=sequences,
        read=read,
    )


def chunk(tokens, length, index, size: int, sequences=1) -> Run:
  """A chunk of a prefix.

  Args:
    tokens: i32[P] ids of the prefix, padded to whole chunks.
    length: i32 scalar, how many of them are real.
    index: i32 scalar, which chunk.
    size: positions of a chunk.
    sequences: i32 scalar, how many branches the prefix has.
  """
  start = index * size
  return Run(
      jnp.asarray(start, jnp.int32),
      jax.lax.dynamic_slice_in_dim(tokens, start, size)[None],
      jnp.clip(length - start, 0, size)[None],
      jnp.asarray(sequences, jnp.int32)[None],
  )


def chunks_used(length, chunks: state_lib.Chunks):
  """Chunks that hold the first `length` positions."""
  return (length + chunks.size - 1) // chunks.size


def branches(spec: Spec, group: group_lib.Group) -> Run:
  """All branches of a group as one run; in "full" whole sequences."""
  prefix = group.prompt_length - 1
  window, first, tokens_GS = 0, prefix, group.inputs()
  if spec.whole:
    window, first, tokens_GS = prefix, jnp.zeros((), jnp.int32), group.rows()
  lengths_G = group.tail_lengths
  return Run(
      first, deal(tokens_GS, spec.layout.devices), window + lengths_G,
      (lengths_G > 0).astype(jnp.int32), Read(group.tails, lengths_G, window),
      group.block,
  )


def deal(x_RT, devices: int):
  """Pads axis 1 so that its tokens are dealt evenly to the devices."""
  widths = [(0, 0)] * x_RT.ndim
  widths[1] = 0, -x_RT.shape[1] % devices
  return jnp.pad(x_RT, widths)
