# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What every importer returns."""

import dataclasses

import tokenizers

from branch_replay import config as config_lib
from branch_replay.models import decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
  """A decoder, its parameters, and what the files say about its text.

  `pretrained.model.apply({"params": pretrained.params}, tokens_GT)` is the
  whole use of it. Raises ValueError where the text side would reach past the
  embedding, because an out-of-range id is clamped inside jit, not refused.

  Attributes:
    model: owner of the `ModelConfig`.
    params: the tree that `model.init` makes, as arrays on one device.
    tokenizer: None when the files hold none.
    stop_ids: ids that end a response; () when the files name none.
    bos_id: id that begins a sequence, or None.
    chat_template: jinja source for `chat.render_chat`, or None.
  """

  model: decoder.Decoder
  params: dict
  tokenizer: tokenizers.Tokenizer | None = None
  stop_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  chat_template: str | None = None

  def __post_init__(self):
    check_ids(self.config, self.tokenizer, self.stop_ids, self.bos_id)

  @property
  def config(self) -> config_lib.ModelConfig:
    """The geometry of the model."""
    return self.model.config


def check_ids(
    config: config_lib.ModelConfig,
    tokenizer: tokenizers.Tokenizer | None,
    stop_ids: tuple[int, ...],
    bos_id: int | None,
):
  """Raises ValueError if any id has no row in the embedding."""
  named = {f"stop id {id_}": id_ for id_ in stop_ids}
  if bos_id is not None:
    named[f"bos id {bos_id}"] = bos_id
  if tokenizer is not None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token, last = max(vocabulary.items(), key=lambda item: item[1])
    named[f"token {token!r} with id {last}"] = last
  for name, id_ in named.items():
    if not 0 <= id_ < config.vocab_size:
      raise ValueError(
          f"The {name} is outside the vocabulary of {config.vocab_size} rows: "
          "use the tokenizer and ids that belong to these weights."
      )
