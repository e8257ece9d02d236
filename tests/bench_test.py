# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark counts what is useful, and loses no finished case."""

import json

import pytest

from branch_replay.planning import flops
from configs import bench_step as config_file
from experiments import bench_step
from experiments.reporting import speed
from tests import tiny


def small():
  config = config_file.get_config("tiny")
  config.update({
      "grid": (((16,), (2,), (8,)),),
      "variants": (("full", "keep"), ("exact", "recompute")),
      "matrix": 16,
  })
  return config


def test_useful_work_counts_nothing_twice():
  prefix, branches, tail = shape = 100, 4, 5
  head = 3 * 2 * 64 * 32 * branches * tail  # forward, and twice backward
  run_once = flops.forward(tiny.BASE, prefix, 0)
  tails = 3 * branches * flops.forward(tiny.BASE, tail, prefix)
  whole = flops.forward(tiny.BASE, prefix + tail, 0)
  for mode, share, expected in (
      ("full", 1.0, 3 * branches * whole + head),
      ("exact", 1.0, 3 * run_once + tails + head),
      ("stop", 1.0, run_once + tails + head),
      ("sampled", 0.25, 1.5 * run_once + tails + head),
  ):
    assert bench_step.useful_flops(tiny.BASE, shape, mode, share) == expected


def test_shapes_are_products_each_once_and_cheap_first():
  config = small()
  config.grid = (((64, 32), (2,), (8,)), ((32,), (2, 4), (8,)))
  assert bench_step.shapes(config) == [(32, 2, 8), (64, 2, 8), (32, 4, 8)]


def test_what_is_left_out_has_a_reason():
  # full up to 32, chunks of 16, four or more
  config = config_file.get_config("tiny")
  assert "P=32" in bench_step.left_out(config, (64, 2, 8), "full")
  assert bench_step.left_out(config, (32, 2, 8), "full") is None
  assert "4 chunks" in bench_step.left_out(config, (32, 2, 8), "sampled")
  assert bench_step.left_out(config, (64, 2, 8), "sampled") is None
  assert bench_step.left_out(config, (64, 2, 8), "exact") is None


def case(prefix, branches, seconds, work):
  return {
      "prefix_tokens": prefix, "branches": branches, "tail_tokens": 8,
      "runs": [
          {"mode": "exact", "activations": "keep", "flops": work,
           "seconds_median": seconds},
          {"mode": "full", "activations": "keep", "left_out": "too long"},
      ],
  }


def test_growth_by_hand():
  rows = speed.growth([
      case(64, 2, 3.0, 300), case(32, 2, 1.0, 150), case(32, 4, 5.0, 300),
  ])
  prefix, group = rows
  assert prefix["axis"] == "prefix_tokens" and group["axis"] == "branches"
  assert (prefix["from"], prefix["to"], prefix["branches"]) == (32, 64, 2)
  assert (prefix["measured"], prefix["analytic"]) == (3.0, 2.0)
  assert prefix["excess"] == 1.5
  assert (group["from"], group["to"], group["prefix_tokens"]) == (2, 4, 32)
  assert group["excess"] == 2.5


def test_rates_by_hand():
  done = {
      "matrix_flops_per_second": 100.0,
      "runs": [{"seconds": [4.0, 1.0, 2.0], "useful_flops": 80}],
  }
  bench_step.relate(done)
  (run,) = done["runs"]
  assert run["seconds_median"] == 2.0
  assert (run["seconds_min"], run["seconds_max"]) == (1.0, 4.0)
  assert run["useful_flops_per_second"] == 40.0
  assert run["share_of_matrix"] == pytest.approx(0.4)


@pytest.mark.exhaustive
def test_a_case_is_measured_once_and_all_is_written(tmp_path, monkeypatch):
  config = small()
  results = bench_step.run(config, tmp_path)
  assert json.loads((tmp_path / "results.json").read_text()) == (
      json.loads(json.dumps(results))
  )
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  full, exact = results["cases"][0]["runs"]
  assert len(full["seconds"]) == len(exact["seconds"]) == config.repeats
  assert full["loss"] == pytest.approx(exact["loss"], rel=1e-5)
  assert full["temp_bytes"] > 0
  assert exact["flops"] > exact["useful_flops"]
  assert "| 16 | exact | recompute |" in speed.table(results)

  def again(*_):
    raise AssertionError("a finished case was measured again")

  monkeypatch.setattr(bench_step, "measure", again)
  assert bench_step.run(config, tmp_path)["cases"] == results["cases"]
  config.repeats = 7
  with pytest.raises(ValueError, match="another config"):
    bench_step.run(config, tmp_path)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"grid": (((17,), (2,), (8,)),)}, "would be padded"),
        ({"variants": (("fast", "keep"),)}, "Unknown prefix_gradient 'fast'"),
        ({"variants": (("full", "most"),)}, "Unknown activations 'most'"),
        ({"variants": (("full", "keep"),) * 2}, "name each once"),
        ({"repeats": 0}, "measure at least once"),
        ({"sampled_share": 0.0}, "sampled_share=0.0"),
    ],
)
def test_bad_configs_stop_with_a_message(tmp_path, change, message):
  config = small()
  config.update(change)
  with pytest.raises(ValueError, match=message):
    bench_step.run(config, tmp_path)
  assert not (tmp_path / "cases.jsonl").exists()
