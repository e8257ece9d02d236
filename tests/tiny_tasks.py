# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Small recipes, a small chat tokenizer, and how rows compare."""

import functools

import numpy as np
import tokenizers

import branch_replay as br
from branch_replay import tasks
from branch_replay.tasks import splits
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib

SMALL = dict(train=12, validation=4, test=4)
CHARACTERS = tasks.Characters()
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>"
    "\n{% endfor %}{{ '<|start|>assistant\n' }}"
)


@functools.cache
def chat() -> tasks.Chat:
  """A byte-level tokenizer with a few merges, and a chat template."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "Ġ")]
  tokens = alphabet + ["".join(pair) for pair in merges]
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE({x: at for at, x in enumerate(tokens)}, merges)
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|stop|>"])
  config = br.ModelConfig(
      vocab_size=300, width=8, num_layers=1, num_heads=1, num_kv_heads=1,
      head_dim=8, ffn_width=8, max_positions=4096,
  )
  return tasks.Chat(
      pretrained_lib.Pretrained(
          br.Decoder(config), {},
          tokenizer_lib.wrapped(tokenizer, chat_template=TEMPLATE),
          (tokenizer.token_to_id("<|stop|>"),),
      )
  )


def equal(left: tasks.Example, right: tasks.Example) -> bool:
  return (
      left.id == right.id
      and np.array_equal(left.prompt_ids, right.prompt_ids)
      and np.array_equal(left.answer_ids, right.answer_ids)
      and left.answer == right.answer
      and left.details == right.details
  )


def rows_of(recipe, text=CHARACTERS):
  return {x: list(recipe.rows(text, x)) for x in splits.SPLITS}


def reward_of(recipe, example, said: str, text=CHARACTERS) -> float:
  ids = [*text.encode(said), text.stop_ids[-1]]
  return recipe.task(text, {}).reward(example, ids)


RETRIEVALS = {
    "characters": (tasks.recipe("retrieval", **SMALL), CHARACTERS),
    "chat": (tasks.recipe("retrieval", prompt_tokens=700, **SMALL), chat()),
    "letters": (
        tasks.recipe(
            "retrieval", haystack="letters", naming="letters",
            fact="{name}{code}", code_length=2, distractors=1,
            prompt_tokens=128, min_depth=0.4, max_depth=0.6, **SMALL,
        ),
        CHARACTERS,
    ),
}
