# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The long run on a short prefix, and what an interrupt leaves."""

import json

import pytest

from branch_replay.engine import hosted_steps
from branch_replay.mixers import kinds
from configs import long_run as config_file
from experiments import long_run


@pytest.mark.exhaustive
def test_a_hybrid_run_writes_what_it_promises(tmp_path):
  config = config_file.get_config("hybrid")
  config.update({"prefix": 63, "chunk_size": 32, "tail_tokens": 8})
  config.model.update({"num_layers": 2, "width": 16, "window": 8})
  results = long_run.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert results["finished"] and results["finite"]
  assert results["gradient_norm"] > 0 and results["cpu_seconds"] > 0
  assert results["peak_rss_bytes"] >= results["rss_before_bytes"] > 0


def test_an_interrupt_says_how_far_it_came(tmp_path, monkeypatch, capsys):
  def interrupted(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(hosted_steps, "push", interrupted)
  config = config_file.get_config("tiny")
  config.devices = 1
  with pytest.raises(KeyboardInterrupt):
    long_run.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert not written["finished"] and "loss" not in written
  assert "Interrupted after" in capsys.readouterr().err


def test_the_configs_are_of_the_lengths_they_claim():
  for variant, prefix, mode in (
      ("", 262_144, "exact"), ("stop", 524_288, "stop"),
      ("hybrid", 2_097_152, "exact"), ("hybrid_stop", 2_097_152, "stop"),
  ):
    config = config_file.get_config(variant)
    assert (config.prefix, config.mode) == (prefix, mode)
    assert f"{prefix:,}".replace(",", " ") in config_file.__doc__
    geometry = long_run._geometry(config.model)
    assert geometry.max_positions > prefix + config.tail_tokens
  assert not kinds.positional(geometry) and kinds.recurrent(geometry)
