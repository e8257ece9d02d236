# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Experiments run from notebooks, write what they promise, lose nothing."""

import json
import pathlib
import subprocess
import sys

import pytest

from branch_replay.planning import flops
from configs import compare_backward as config_file
from experiments import compare_backward
from tests import tiny

EXPERIMENTS = [
    path.stem
    for path in pathlib.Path(compare_backward.__file__).parent.glob("*.py")
    if path.stem != "__init__"
]
RUN_FIELDS = {
    "mode", "prefix_tokens", "branches", "tail_tokens", "devices", "seconds",
    "seconds_median", "model_tokens", "flops", "ideal_speedup", "speedup",
    "temp_bytes", "loss", "gradient_cosine", "gradient_relative_error",
    "worst_parameter", "per_matrix_cosine",
}


def small():
  config = config_file.get_config("tiny")
  config.update({"prompt_tokens": 20, "branches": 3, "tail_tokens": 6,
                 "chunk_size": 16, "repeats": 1})
  return config


def test_every_experiment_imports_under_a_notebook():
  code = "import sys; sys.argv = ['ipykernel_launcher', '-f', 'k.json']\n"
  code += "\n".join(f"import experiments.{name}" for name in EXPERIMENTS)
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.exhaustive
def test_a_comparison_writes_what_it_promises(tmp_path):
  config = small()
  config.modes = ("full", "exact", "stop", "sampled")
  config.sampled_chunks = 1.0
  results = compare_backward.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  assert set(results) >= {"environment", "model", "runs"}
  full, exact, stop, sampled = results["runs"]
  for run in results["runs"]:
    assert set(run) >= RUN_FIELDS
    assert len(run["seconds"]) == 1
  assert full["tail_tokens"] <= 6 < full["padded_tail_tokens"] == 8
  assert full["model_tokens"] == 3 * (19 + 8)
  assert exact["model_tokens"] == stop["model_tokens"] == 19 + 3 * 8
  assert exact["gradient_relative_error"] < 1e-5
  assert stop["gradient_relative_error"] > 1e-2
  assert sampled["gradient_relative_error"] > 1e-3  # one chunk of two
  assert stop["flops"] < sampled["flops"] < exact["flops"]
  assert exact["loss"] == pytest.approx(full["loss"], abs=1e-5)


@pytest.mark.exhaustive
def test_an_interrupt_leaves_the_finished_measurements(tmp_path, monkeypatch):
  compiled = compare_backward.compiled

  def interrupted(problem, mode, *settings):
    if mode == "exact":
      raise KeyboardInterrupt
    return compiled(problem, mode, *settings)

  monkeypatch.setattr(compare_backward, "compiled", interrupted)
  with pytest.raises(KeyboardInterrupt):
    compare_backward.run(small(), tmp_path)
  (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
  assert run["mode"] == "full" and run["temp_bytes"] > 0


@pytest.mark.parametrize(
    "change,message",
    [
        ({"modes": ("full", "fast")}, "Unknown prefix_gradient 'fast'"),
        ({"repeats": 0}, "measure at least once"),
        ({"modes": ()}, "name each mode once"),
        ({"sampled_chunks": 0.0}, "chunks must be > 0"),
        ({"temperature": 0.0}, "teach nothing"),
        ({"prompt_tokens": 10**9}, "The document has"),
        ({"document": "no/such/file"}, "not a file"),
        ({"activations": "most"}, "Unknown activations 'most'"),
        ({"model": "no/such/model"}, "no/such/model"),
    ],
)
def test_bad_configs_stop_with_a_message(tmp_path, change, message):
  config = small()
  config.update(change)
  with pytest.raises(ValueError, match=message):
    compare_backward.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()


def test_flops_by_hand():
  # N = 2·32·((8+4)·16 + 3·48) = 21 504; L·d = 2·4·16 = 128.
  config = tiny.BASE
  assert flops.layer_parameters(config) == 21_504
  assert flops.forward(config, 3, 10) == (
      2 * 21_504 * 3 + 4 * 128 * 3 * 10 + 2 * 128 * 9
  )
  sizes = dict(prefix=100, branches=4, tail=5, policy="keep")
  head = 4 * 2 * 64 * 32 * 4 * 5
  prefix = flops.forward(config, 100, 0)
  tails = 4 * flops.forward(config, 5, 100)
  assert flops.gradient(config, mode="stop", **sizes) == (
      prefix + 3 * tails + head
  )
  assert flops.gradient(config, mode="exact", **sizes) == (
      3 * prefix + 3 * tails + head
  )
  assert flops.gradient(config, mode="full", **sizes) == (
      3 * 4 * flops.forward(config, 105, 0) + head
  )
