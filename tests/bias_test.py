# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The bias studies add, compare and split what they say they do."""

import json

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay.weights import pretrained as pretrained_lib
from configs import bias_batch as batch_config
from configs import bias_training as training_config
from experiments import bias_batch
from experiments import bias_sweep
from experiments import bias_training
from experiments import prompts

ADAM = dict(b1=0.9, b2=0.999, eps=1e-8)


def cosine(a, b):
  return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_sums_and_adam_directions_are_those_of_numpy_and_optax():
  rng = np.random.default_rng(0)
  series = {name: rng.normal(size=(5, 7)) for name in ("exact", "stop")}
  sums = bias_batch.Sums(
      ml_collections.ConfigDict(ADAM), {"w": jnp.zeros(7)}, list(series)
  )
  directions, adam = {}, optax.scale_by_adam(**ADAM)
  for name, gradients in series.items():
    state = adam.init(jnp.zeros(7))
    for gradient in gradients:
      sums.add(name, {"w": jnp.asarray(gradient, jnp.float32)})
      update, state = adam.update(jnp.asarray(gradient), state)
    directions[name] = np.asarray(update)
  totals = {name: gradients.sum(axis=0) for name, gradients in series.items()}
  error = np.linalg.norm(totals["stop"] - totals["exact"])
  norm = np.linalg.norm(totals["exact"])
  far = sums.distance("stop")
  assert sums.norm("exact") == pytest.approx(norm, rel=1e-5)
  assert far["cosine"] == pytest.approx(cosine(*totals.values()), abs=1e-5)
  assert far["relative_error"] == pytest.approx(error / norm, rel=1e-4)
  assert far["adam_cosine"] == pytest.approx(
      cosine(*directions.values()), abs=1e-5
  )


@pytest.mark.parametrize("same", [True, False])
def test_coherence_tells_a_bias_from_noise(same):
  # Four groups; errors along one axis, or each along an axis of its own, are
  # n² or n times one error squared.
  sums = bias_batch.Sums(
      ml_collections.ConfigDict(ADAM), {"w": jnp.zeros(8)}, ["exact", "stop"]
  )
  groups = []
  for i in range(4):
    exact = 2 * jnp.eye(8)[i]
    sums.add("exact", {"w": exact})
    sums.add("stop", {"w": exact + jnp.eye(8)[7 if same else 4 + i]})
    groups.append({
        "exact_norm": 2.0, "estimators": {"stop": {"relative_error": 0.5}}
    })
  config = ml_collections.ConfigDict({"estimators": {}})
  result = bias_batch.compared(config, sums, groups)
  assert result["exact_coherence"] == pytest.approx(1)
  assert result["estimators"]["stop"]["error_coherence"] == pytest.approx(
      4 if same else 1
  )


def byte_model(*_):
  """The model of the tiny training study, before training."""
  model = br.Decoder(br.ModelConfig(**training_config.get_config("tiny").model))
  params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  return pretrained_lib.Pretrained(
      model, params["params"], bias_training.byte_tokenizer()
  )


@pytest.mark.exhaustive
def test_the_batch_study_writes_what_it_promises(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(bias_sweep.load_lib, "load", byte_model)
  config = batch_config.get_config("tiny")
  # A budget of all chunks runs them all with weight 1: exact.
  config.estimators = {"top": 4.0, "importance": 16.0}
  results = bias_batch.run(config, tmp_path)
  assert "starting anew" not in capsys.readouterr().out
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  assert [row["n"] for row in results["sums"]] == [1, 2]
  for row in results["sums"]:
    far = row["estimators"]
    assert far["importance"]["relative_error"] < 1e-5
    assert far["top"]["relative_error"] < far["stop"]["relative_error"]
    assert far["stop"]["cosine"] < 0.99
    assert 0 < row["exact_coherence"] <= row["n"] + 1e-4
  one, group = results["sums"][0], results["groups"][0]
  assert one["estimators"]["stop"]["cosine"] == pytest.approx(
      group["estimators"]["stop"]["cosine"], abs=1e-5
  )
  monkeypatch.setattr(bias_batch, "cases", lambda _: [])
  with pytest.raises(ValueError, match="nothing to add"):
    bias_batch.run(config, tmp_path)
  assert "starting anew" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change,message",
    [
        ({"advantages": "fact"}, "Unknown advantages='fact'"),
        ({"prompt_tokens": 100}, "chunks, not 16: take a multiple of 16"),
        ({"estimators": {"best": 3.0}}, "Unknown law 'best'"),
    ],
)
def test_bad_batch_configs_stop_with_a_message(
    tmp_path, monkeypatch, change, message
):
  monkeypatch.setattr(bias_sweep.load_lib, "load", byte_model)
  config = batch_config.get_config("tiny")
  with config.unlocked():
    config.update(change)
  with pytest.raises(ValueError, match=message):
    bias_batch.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()


def test_a_dead_group_is_not_added(monkeypatch):
  config = batch_config.get_config("tiny")
  pretrained = byte_model("")
  parts = bias_sweep.Study(pretrained.model, br.Schedule(chunk_size=16))
  group_of = bias_sweep.group_of

  def dead(*args):
    group, advantages_G, rewards_G = group_of(*args)
    return group, 0 * advantages_G, rewards_G

  monkeypatch.setattr(bias_sweep, "group_of", dead)
  result = bias_batch.add_group(
      config, pretrained, bias_batch.cases(config)[0], prompts.texts(),
      parts, None,
  )
  assert result["dead"] and "estimators" not in result


def test_byte_tokenizer_goes_there_and_back():
  tokenizer = bias_training.byte_tokenizer()
  text = "for x in (1, 2):\n\tprint('naïve – ok')  # €\n"
  ids = tokenizer.encode(text)
  assert len(ids) == len(text.encode())
  assert tokenizer.decode(ids) == text
  assert len(tokenizer) == 256 > max(ids)


def test_split_holds_the_end_of_every_text_out():
  texts = ["0123456789", "abcdefghijklmnopqrst"]
  learned, held = bias_training.split(texts, 0.1)
  assert learned == ["012345678", "abcdefghijklmnopqr"]
  assert held == ["9", "st"]


def test_windows_by_hand():
  found = bias_training.windows(np.arange(10, 30), [0, 5], 3)
  assert found.tolist() == [[10, 11, 12, 13], [15, 16, 17, 18]]


def test_shares_by_hand():
  profile = [0.0] * 64
  profile[1], profile[20], profile[41], profile[63] = 0.4, 0.3, 0.1, 0.2
  assert bias_training.shares(profile) == pytest.approx(
      {"first": 0.4, "last": 0.2, "two_largest": 0.7}
  )


@pytest.mark.exhaustive
def test_the_training_study_writes_what_it_promises(tmp_path):
  config = training_config.get_config("tiny")
  results = bias_training.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  before, after = results["records"]
  assert (before["step"], after["step"]) == config.steps
  assert before["validation_loss"] == pytest.approx(np.log(256), abs=0.3)
  assert after["validation_loss"] < before["validation_loss"]
  for row in (before, after):
    assert row["stop"]["cosine"]["n"] == config.documents * config.seeds
    assert 0 < row["stop"]["cosine"]["mean"] < 0.99
    assert {one["law"] for one in row["estimators"]} == {"importance", "top"}
    for part in row["shares"].values():
      assert 0 < part["first"]["mean"] <= part["two_largest"]["mean"] <= 1


@pytest.mark.parametrize(
    "change,message",
    [
        ({"steps": (3, 0)}, "must ascend"),
        ({"advantages": "words"}, "only 'random'"),
        ({"prompt_tokens": 100}, "too short for chunks=16"),
    ],
)
def test_bad_training_configs_stop_with_a_message(tmp_path, change, message):
  config = training_config.get_config("tiny")
  config.update(change)
  with pytest.raises(ValueError, match=message):
    bias_training.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()
