# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of the hub by name, from a cache; text parts of larger models."""

import json
import pathlib
import shutil

import chex
from huggingface_hub import constants
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

import branch_replay as br
from branch_replay.weights import hub

GOLDENS = pathlib.Path(__file__).parent / "goldens"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """A cache as the hub's client lays it out, without a network."""
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  commit = "0123456789abcdef0123456789abcdef01234567"
  model = tmp_path / "models--org--small-1.5"
  shutil.copytree(GOLDENS / "qwen3_next", model / "snapshots" / commit)
  (model / "refs").mkdir()
  (model / "refs" / "main").write_text(commit)
  (model / "refs" / "other").write_text("f" * 40)
  return model / "snapshots" / commit


def test_a_model_of_the_cache_is_loaded_by_its_name(cache):
  wanted = br.load_hf(GOLDENS / "qwen3_next", with_tokenizer=False)
  found = br.load_hf("org/small-1.5", with_tokenizer=False)
  assert found.config == wanted.config
  chex.assert_trees_all_equal(found.params, wanted.params)
  assert hub.folder("org/small-1.5", revision="main") == cache
  found = br.load("org/small-1.5", compute_dtype="file")
  assert found.config.compute_dtype == "float32"  # as it is stored


def test_what_cannot_be_had_is_said_in_one_sentence(cache, tmp_path):
  with pytest.raises(ValueError, match=(
      "'org/large' is no directory here, and as a model of the Hugging Face hub"
  )) as caught:
    br.load_hf("org/large")
  assert "'./org/large'" in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1
  with pytest.raises(ValueError, match="cannot be had"):
    br.load_hf("org/small-1.5", revision="other")  # its files are not there
  # Paths are never looked for on the hub.
  for path in ("./org/large", "/org/large", "org/large/more", "large"):
    with pytest.raises(ValueError, match="config.json does not exist"):
      br.load_hf(path)
  with pytest.raises(ValueError, match="revision='main' is for models of the"):
    br.load_hf(GOLDENS / "qwen3_next", revision="main")


PREFIXES = {
    "gemma3": ("language_model.model.", "vision_tower.patches"),
    "qwen3_5": ("model.language_model.", "model.visual.patches"),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_the_text_part_of_a_model_that_reads_images_is_loaded(tmp_path, name):
  prefix, other = PREFIXES[name]
  tensors = safetensors_numpy.load_file(GOLDENS / name / "model.safetensors")
  renamed = {
      prefix + x.removeprefix("model.") if x.startswith("model.") else x: y
      for x, y in tensors.items()
  }
  renamed[other] = np.ones((3, 2), np.float32)
  safetensors_numpy.save_file(renamed, tmp_path / "model.safetensors")
  inner = json.loads((GOLDENS / name / "config.json").read_text())
  outer = {
      "model_type": name, "text_config": inner, "vision_config": {"depth": 3},
      "eos_token_id": inner.get("eos_token_id"),
  }
  (tmp_path / "config.json").write_text(json.dumps(outer))
  found = br.load_hf(tmp_path, with_tokenizer=False)
  wanted = br.load_hf(GOLDENS / name, with_tokenizer=False)
  assert found.config == wanted.config
  chex.assert_trees_all_equal(found.params, wanted.params)
  # Nothing else may be there.
  renamed["model.another"] = np.ones(3, np.float32)
  safetensors_numpy.save_file(renamed, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match="another"):
    br.load_hf(tmp_path, with_tokenizer=False)
