# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The result of loading a model from files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from branch_replay import config as config_lib
from branch_replay.models import decoder
from branch_replay.weights import chat
from branch_replay.weights import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  import transformers


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
  """A decoder, its parameters, and what its files say about text.

  To run it: `pretrained.model.apply({"params": pretrained.params}, tokens_GT)`.
  Stop and bos ids beyond the embedding raise ValueError here, because inside
  jit an index out of range is clamped and not refused. The tokenizer may have
  such ids; they are refused when a text contains one.

  Attributes:
    model: the decoder, which owns the `ModelConfig`.
    params: its parameters, as arrays on one device.
    tokenizer: tokenizer of `transformers` with its chat template; None if the
      files have none.
    stop_ids: ids that end a response: those the files name, in their order, and
      `end_of_turn`. () if there are none.
    bos_id: id that begins a sequence, or None.
    end_of_turn: the id that ends an answer to be learnt from. It is what the
      chat template writes after an assistant's message; without a template the
      tokenizer's `eos_token`; without that the first stop id; else None.
  """

  model: decoder.Decoder
  params: dict
  tokenizer: transformers.PreTrainedTokenizerFast | None = None
  stop_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  end_of_turn: int | None = dataclasses.field(init=False)

  def __post_init__(self):
    end, stop_ids = turn_ends(self.tokenizer, self.stop_ids)
    object.__setattr__(self, "end_of_turn", end)
    object.__setattr__(self, "stop_ids", stop_ids)
    check_ids(self.config, self.stop_ids, self.bos_id)

  @property
  def config(self) -> config_lib.ModelConfig:
    """The configuration of the model."""
    return self.model.config

  @property
  def chat_template(self) -> str | dict[str, str] | None:
    """The tokenizer's chat template (jinja source), or None."""
    return self.tokenizer and (self.tokenizer.chat_template or None)


def turn_ends(
    tokenizer, stop_ids: tuple[int, ...]
) -> tuple[int | None, tuple[int, ...]]:
  """The id that ends a turn, and all stop ids with it among them.

  Args:
    tokenizer: tokenizer of `transformers`, or None.
    stop_ids: the stop ids that a file names.

  Raises:
    TypeError: another kind of tokenizer.
  """
  tokenizer_lib.check_kind(tokenizer)
  stop_ids = tuple(dict.fromkeys(stop_ids))
  end = None if tokenizer is None else chat.end_of_turn(tokenizer)
  if end is None:
    return next(iter(stop_ids), None), stop_ids
  return end, stop_ids if end in stop_ids else (*stop_ids, end)


def check_ids(
    config: config_lib.ModelConfig,
    stop_ids: tuple[int, ...],
    bos_id: int | None,
):
  """Raises ValueError if a stop or bos id has no row in the embedding."""
  named = {f"stop id {id_}": id_ for id_ in stop_ids}
  if bos_id is not None:
    named[f"bos id {bos_id}"] = bos_id
  for name, id_ in named.items():
    if not 0 <= id_ < config.vocab_size:
      raise ValueError(
          f"The {name} is outside the vocabulary of {config.vocab_size} rows: "
          "use the tokenizer and ids that belong to these weights."
      )
