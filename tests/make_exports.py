# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes exports for `make_goldens.py --exports`, which reads them with torch.

Run by hand from the root of the repository, in its own environment:

  python -m tests.make_exports FOLDER

and then, in that of make_goldens.py:

  .goldens/bin/python tests/make_goldens.py --exports FOLDER
  .goldens/bin/python tests/make_published_goldens.py --exports FOLDER
"""

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import branch_replay as br
from branch_replay import tasks
from branch_replay.weights import pretrained as pretrained_lib
from branch_replay.weights import tokenizer as tokenizer_lib
from tests import tiny
from tests import tiny_tokenizers

ARCHITECTURES = {
    "llama3": "llama3", "gemma3": "gemma3", "qwen3": "qwen3",
    "smollm2": "tied", "sentencepiece": "mistral",
}


def write(folder: pathlib.Path, name: str):
  """One family: a random model, its tokenizer, and what they give."""
  family = tiny_tokenizers.FAMILIES[name]()
  config = dataclasses.replace(
      tiny.ARCHITECTURES[ARCHITECTURES[name]], vocab_size=448
  )
  model, params = tiny.model(config)
  tokenizer = tokenizer_lib.wrapped(
      family.backend, chat_template=family.template,
      **{key: family.config.get(key) for key in (
          "bos_token", "eos_token", "unk_token", "pad_token"
      )},
  )
  pretrained = pretrained_lib.Pretrained(
      model, params, tokenizer, tuple(family.stop_ids)
  )
  br.save_hf(
      folder / name, config, params, tokenizer=tokenizer,
      stop_ids=pretrained.stop_ids,
  )
  text = tasks.Chat(pretrained)
  questions = ["Why?", "What is the access code of the wren?\n\n — é🙂"]
  expected = {}
  for at, question in enumerate(questions):
    ids = text.prompt(question).ids
    with jax.default_matmul_precision("highest"):
      logits_GTV = model.apply({"params": params}, jnp.asarray([ids]))
    expected[f"ids/{at}"] = np.asarray(ids, np.int32)
    expected[f"logits/{at}"] = np.asarray(logits_GTV[0], np.float32)
  np.savez(folder / name / "expected.npz", **expected)
  (folder / name / "expected.json").write_text(json.dumps({
      "questions": questions,
      "special": tokenizer.special_tokens_map | {"eos_token": family.end},
      "stop_ids": list(pretrained.stop_ids),
  }))


GOLDENS = pathlib.Path(__file__).parent / "goldens"
PUBLISHED = (
    "qwen3_next_experts", "deepseek_v2_greedy", "deepseek_v2_groups",
    "deepseek_v3_experts", "mistral3", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5_moe",
)


if __name__ == "__main__":
  for golden in PUBLISHED:
    one = br.load_hf(GOLDENS / golden)
    br.save_hf(pathlib.Path(sys.argv[1]) / golden, one.config, one.params)
  for family_name in ARCHITECTURES:
    write(pathlib.Path(sys.argv[1]), family_name)
