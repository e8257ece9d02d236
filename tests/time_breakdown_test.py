# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The breakdown of a step: sums by hand, operations against the whole."""

import json

import pytest

from branch_replay.planning import flops
from configs import time_breakdown as config_file
from experiments import time_breakdown
from tests import tiny


def test_parts_and_modes_of_known_times():
  seconds = {
      "capture": [1.0, 3.0, 2.0], "rollout": [4.0], "replay": [3.0],
      "replay and prefix pass": [8.0], "optimizer": [0.5],
      "gradient, full": [40.0], "gradient, exact": [10.0],
      "gradient, stop": [5.0],
  }
  of = {
      "capture": 2e9, "rollout": 1e9, "replay": 3e9, "prefix pass": 4e9,
      "whole sequences": 36e9, "optimizer": None,
  }
  found = time_breakdown.account(seconds, of)
  assert found["parts"]["prefix pass"]["seconds"] == 5
  assert found["parts"]["capture"] == {
      "seconds": 2, "flops": 2e9, "gflops_per_second": 1,
  }
  full, exact, stop = found["modes"].values()
  assert full["step_seconds"] == 2 + 4 + 40 + 0.5
  assert exact["step_seconds"] == 2 + 4 + 3 + 5 + 0.5
  assert stop["step_seconds"] == 2 + 4 + 3 + 0.5
  assert exact["gradient_seconds_of_parts"] == 10
  assert (exact["less_time"], exact["less_compute"]) == (4, 4)
  assert (stop["less_time"], stop["less_compute"]) == (8, 36 / 5)


def test_operations_of_the_parts_are_those_of_the_whole():
  of = time_breakdown.operations(tiny.BASE, (32, 4, 8))
  whole = flops.gradient(
      tiny.BASE, prefix=32, branches=4, tail=8, mode="exact", policy="keep"
  )
  again = 2 * tiny.BASE.vocab_size * tiny.BASE.width * 4 * 8
  parts = of["capture"] + of["replay"] + of["prefix pass"]
  assert parts == whole - again
  # A rollout runs forward what a replay runs there and back.
  assert of["rollout"] == pytest.approx(of["replay"] / 3)


@pytest.mark.exhaustive
def test_a_breakdown_writes_what_it_promises(tmp_path):
  config = config_file.get_config("tiny")
  results = time_breakdown.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert all(len(x) == 2 for x in results["seconds"].values())
  assert (tmp_path / "figure.png").exists()
  config.repeats = 0
  with pytest.raises(ValueError, match="repeats"):
    time_breakdown.run(config, tmp_path)
