# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Learning curves: every variant goes on from one warm-up, and none runs twice.
"""

import json

import pytest

from configs import learning
from experiments import learning_curves


@pytest.fixture
def config(tmp_path):
  config = learning.get_config("tiny")
  config.shared = (*config.shared, ("data_dir", str(tmp_path / "tasks")))
  return config


@pytest.mark.exhaustive
def test_variants_share_a_warm_up_and_are_kept(tmp_path, config, monkeypatch):
  results = learning_curves.run(config, tmp_path / "run")
  exact, stop = results["runs"]
  assert exact["warmed_up"] == stop["warmed_up"]
  assert exact["step"] == [step for step, _ in exact["evaluated"]] == [1, 2]
  for name in ("exact", "stop"):
    file = tmp_path / "run/seed0" / name / "config.json"
    written = json.loads(file.read_text())
    assert written["prefix_gradient"] == name
  assert exact["seconds"][0] == pytest.approx(sum(
      exact[f"{part}_seconds"][0] for part in ("rollout", "draft", "learn")
  ))
  assert (tmp_path / "run/figure.png").exists()
  monkeypatch.setattr(learning_curves, "run_variant", None)  # nothing is run
  again = learning_curves.run(config, tmp_path / "run")
  assert json.loads(json.dumps(again["runs"])) == results["runs"]


def test_a_base_without_warm_up(config):
  config.shared = (*config.shared, ("phases", ("reinforce",)))
  folder, params = learning_curves.warm_up(config, 0, None)
  assert folder is None and params
