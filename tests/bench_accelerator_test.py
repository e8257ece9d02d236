# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The accelerators' benchmark runs anywhere, ends in time, loses nothing."""

import json

import jax
import pytest

from configs import bench_accelerator as full_size
from experiments import bench_accelerator
from experiments.reporting import speed


def small(**changes):
  config = full_size.get_config("tiny")
  config.update(dict(prefixes=(64,), modes=("exact",), repeats=1) | changes)
  return config


@pytest.mark.exhaustive
def test_a_benchmark_writes_what_it_promises(tmp_path):
  results = bench_accelerator.run(small(), tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert "runs on cuda, not on cpu" in results["not_here"]["cudnn"]
  (one,) = results["runs"]
  assert (one["prefix_tokens"], one["attention"]) == (64, "loops")
  assert len(one["seconds"]) == 1 and one["warm"]
  assert one["flops_per_second"] * one["seconds_median"] == pytest.approx(
      one["flops"]
  )
  assert one["temp_bytes"] > 0 and one["peak_bytes_so_far"] is None
  assert 0 < one["relative_error"] < 1e-5
  assert results["environment"]["device_kind"] == "cpu"
  assert "exact" in speed.attention(results)


def fake(config, case):
  """Work by the rate of 1 PFLOP/s but for what does not fit."""
  if case.prefix > 300000 and case.mode == "exact":
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB\nof 8")
  if case.attention == "cudnn":
    raise NotImplementedError("no such kernel")
  return {
      "seconds": [0.1], "seconds_median": 0.1, "flops_per_second": 1e15,
      "compile_seconds": 1.0, "temp_bytes": 1,
  }


def test_what_does_not_fit_or_fails_is_recorded_and_the_rest_goes_on(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(bench_accelerator, "measure", fake)
  monkeypatch.setattr(
      bench_accelerator, "implementations", lambda _: (["loops", "cudnn"], {})
  )
  results = bench_accelerator.run(full_size.get_config(), tmp_path)
  by = {
      (one["prefix_tokens"], one["mode"], one["attention"]): one
      for one in results["runs"]
  }
  assert len(by) == 5 * 2 * 2
  assert "seconds" in by[1048576, "stop", "loops"]
  assert "seconds" in by[131072, "exact", "loops"]
  failed = by[524288, "exact", "loops"]["out_of_memory"]
  assert failed == "JaxRuntimeError: RESOURCE_EXHAUSTED: 9 GiB"
  assert by[1048576, "exact", "loops"]["left_out"] == "not at P=524288 either"
  assert by[8192, "stop", "cudnn"]["failed"] == (
      "NotImplementedError: no such kernel"
  )
  text = speed.attention(results)
  assert "out of memory: Jax" in text and "no such kernel" in text


def test_a_case_that_would_not_end_in_time_is_left_out(monkeypatch):
  config = full_size.get_config()
  case = bench_accelerator.Case(1048576, "exact", "loops")
  work = 1e12
  monkeypatch.setattr(
      bench_accelerator.flops, "gradient", lambda *_, **__: work
  )
  before = {
      "prefix_tokens": 524288, "seconds": [1.0], "flops_per_second": 1e11,
      "compile_seconds": 5.0,
  }
  left_out = bench_accelerator.left_out
  # One run of 10 s, which is the time of a case, and 5 s of compilation.
  assert left_out(config, case, before, 15.1) is None
  assert left_out(config, case, before, 14.9) == (
      "would take 15 s of 15 s that are left"
  )
  work = 0.9e12  # a run that is not timed, and one that is
  assert left_out(config, case, before, 23.1) is None
  assert left_out(config, case, before, 22.9) is not None
  assert left_out(config, case, None, -1.0) == "no time was left"


def test_kernels_that_would_be_interpreted_are_asked_for():
  config = small(attention=("loops", "splash"))
  here, not_here = bench_accelerator.implementations(config)
  assert here == ["loops"] and "interpreter" in not_here["splash"]
  config.interpret = True
  assert bench_accelerator.implementations(config) == (["loops", "splash"], {})


@pytest.mark.parametrize("change, message", (
    ({"modes": ("fast",)}, "Unknown prefix_gradient 'fast'"),
    ({"repeats": 0}, "measure at least once"),
))
def test_bad_configs_stop_with_a_message(tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    bench_accelerator.run(small(**change), tmp_path)
