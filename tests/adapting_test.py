# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The experiment on drafters that adapt writes what it promises, and resumes.
"""

import json

import pytest

from configs import adapting as adapting_config
from experiments import adapting


@pytest.fixture
def config(tmp_path):
  config = adapting_config.get_config("tiny")
  config.shared = (*config.shared, ("data_dir", str(tmp_path / "tasks")))
  return config


@pytest.mark.exhaustive
def test_it_probes_both_drafters_and_can_be_run_again(tmp_path, config):
  results = adapting.run(config, tmp_path / "run")
  written = json.loads((tmp_path / "run/results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert [case["step"] for case in results["cases"]] == [1, 2]
  at_first, later = results["cases"]
  assert at_first["frozen"] == at_first["adapting"]  # a copy of the same
  for drafter in (later["frozen"], later["adapting"]):
    assert 1 <= drafter["accept_length"] <= 1 + config.draft_length
    assert drafter["rows_that_differ"] == 0
  assert (tmp_path / "run/figure.png").exists()
  # A run that has lost its last case makes that one again, from its drafter.
  log = tmp_path / "run/cases.jsonl"
  log.write_text(log.read_text().splitlines()[0] + "\n")
  assert adapting.run(config, tmp_path / "run")["cases"] == results["cases"]


def test_configs_that_cannot_be_run(tmp_path, config):
  config.freeze_after = 0
  with pytest.raises(ValueError, match="freeze_after=0"):
    adapting.run(config, tmp_path)
  config.shared = (*config.shared, ("reinforce.speculation.drafter", "ngram"))
  with pytest.raises(ValueError, match="must be 'learned'"):
    adapting.run(config, tmp_path)
