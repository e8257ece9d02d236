# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison with other systems, as far as it needs none of them."""

import io
import json
import pathlib
import sys

import numpy as np
import pytest

from configs import peers as peers_config
from experiments.peers import client
from experiments.peers import measure as peers
from experiments.peers import problem as problem_lib
from experiments.peers import report
from experiments.peers import serve
from experiments.peers import session

ROW_FIELDS = {
    "peer", "mode", "seconds", "seconds_median", "first_seconds", "cpu_seconds",
    "idle_cpu_seconds", "baseline_rss_bytes", "built_rss_bytes",
    "peak_rss_bytes", "extra_rss_bytes", "loss", "settings", "versions",
    "time_ratio", "memory_ratio", "loss_error", "log_prob_error",
    "gradient_norm_error", "gradient_relative_error", "worst_parameter",
    "worst_parameter_error", "agrees",
}
GRADIENT = {
    "embed/table": np.array([[3.0, 4.0]]),
    "layers/project/key/kernel": np.array([[[1.0]], [[2.0]]]),
}


def small():
  config = peers_config.get_config("tiny")
  config.peers = ("ours_exact_keep", "prefix_grouper", "ours_stop")
  config.peers_python = sys.executable
  return config


class FakeWorker:
  """Answers as a worker would; the class says how."""

  seconds = {"ours_exact_keep": 2.0, "prefix_grouper": 5.0, "ours_stop": 1.0}
  gradients = {}
  fails = {}

  def __init__(self, command, *, folder, log):
    (self.name,) = (
        word.removeprefix("--peer=") for word in command if "--peer=" in word
    )

  def answer(self, timeout):
    return {"ready": True, "baseline_rss_bytes": 100, "versions": {"x": "1"}}

  def ask(self, command, timeout):
    if command == "go":
      if self.name in self.fails:
        raise self.fails[self.name]
      return {
          "seconds": self.seconds[self.name], "cpu_seconds": 1.0,
          "idle_cpu_seconds": 0.0, "loss": 0.5, "built_rss_bytes": 150,
          "peak_rss_bytes": 300, "settings": {},
      }
    gradient = self.gradients.get(self.name, GRADIENT)
    file = command.removeprefix("write ")
    np.savez(file, log_probs=np.ones((2, 3)), **gradient)
    return {"written": True}

  def close(self):
    pass


@pytest.fixture
def fake(monkeypatch):
  monkeypatch.setattr(session.client, "Worker", FakeWorker)
  for field in ("seconds", "gradients", "fails"):
    monkeypatch.setattr(FakeWorker, field, dict(getattr(FakeWorker, field)))
  return FakeWorker


def test_names():
  assert peers.chosen(["ours", "torch_full"]) == (
      "torch_full", "ours_full", "ours_exact_keep", "ours_exact_recompute",
      "ours_stop",
  )
  for bad in (["megatron"], []):
    with pytest.raises(ValueError, match="name one or more of ours, torch"):
      peers.chosen(bad)


def test_a_comparison_writes_what_it_promises(tmp_path, fake):
  assert fake.seconds["ours_stop"] == 1.0
  results = peers.run(small(), tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  assert (tmp_path / "figure.png").stat().st_size > 10_000
  (entry,) = results["prefixes"]
  assert entry["finished"] and entry["prompt_tokens"] == 32
  assert entry["reference"] == "ours_exact_keep"
  grouper, exact, stop = entry["peers"]
  for row in entry["peers"]:
    assert set(row) == ROW_FIELDS
    assert row["agrees"]
  assert (grouper["peer"], exact["peer"], stop["peer"]) == (
      "prefix_grouper", "ours_exact_keep", "ours_stop"
  )
  assert grouper["seconds"] == [5.0] and grouper["first_seconds"] == 5.0
  assert grouper["time_ratio"] == {"ours_exact_keep": 2.5, "ours_stop": 5.0}
  assert grouper["extra_rss_bytes"] == 200


def test_another_gradient_is_an_error_after_all_is_written(tmp_path, fake):
  wrong = GRADIENT | {"embed/table": np.array([[3.0, 4.002]])}
  fake.gradients = {"prefix_grouper": wrong}
  with pytest.raises(ValueError, match="prefix_grouper at 32"):
    peers.run(small(), tmp_path)
  (entry,) = json.loads((tmp_path / "results.json").read_text())["prefixes"]
  assert [row["agrees"] for row in entry["peers"]] == [False, True, True]
  (remark,) = report.remarks({"prefixes": [entry]})
  assert remark.startswith("32 prefix_grouper: another gradient, by")
  fake.gradients = {"ours_stop": wrong}  # biased by definition
  peers.run(small(), tmp_path / "stop")


def test_nan_does_not_agree(tmp_path, fake):
  nan = GRADIENT | {"embed/table": np.array([[3.0, np.nan]])}
  fake.gradients = {"prefix_grouper": nan}
  with pytest.raises(ValueError, match="prefix_grouper at 32"):
    peers.run(small(), tmp_path)


def test_finished_lengths_are_kept_and_others_run_whole(tmp_path, fake):
  config = small()
  config.prefixes = (32,)
  peers.run(config, tmp_path)
  fake.seconds = fake.seconds | {"ours_stop": 8.0}
  config.prefixes, config.peers = (32, 48), ("ours_stop",)
  shorter, longer = peers.run(config, tmp_path)["prefixes"]
  assert len(shorter["peers"]) == 3
  assert shorter["peers"][2]["seconds"] == [1.0]
  assert [row["seconds"] for row in longer["peers"]] == [[8.0]]
  config.peers = ("ours_stop", "ours_exact_keep")
  _, longer = peers.run(config, tmp_path)["prefixes"]
  assert len(longer["peers"]) == 2
  config.branches = 5
  with pytest.raises(ValueError, match="another config"):
    peers.run(config, tmp_path)


def test_an_interrupt_leaves_the_lengths_before(tmp_path, fake):
  config = small()
  peers.run(config, tmp_path)
  config.prefixes = (32, 48)
  fake.fails = {"ours_stop": KeyboardInterrupt()}
  with pytest.raises(KeyboardInterrupt):
    peers.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert [e["finished"] for e in written["prefixes"]] == [True, False]
  assert report.remarks(written)[-1].endswith("not finished")


def entries(row):
  return [{"prompt_tokens": 1024, "peers": [{"peer": "torch_full"} | row]}]


def test_what_cannot_be_run_is_foreseen():
  config = peers_config.get_config("tiny")
  config.ours_full_up_to = 2048
  reason = peers.foreseen(config, "ours_full", 4096, [])
  assert reason == "run up to 2048 prompt tokens"
  assert peers.foreseen(config, "torch_full", 4096, []) is None
  growth = (
      peers.work(config, "torch_full", 4096)
      / peers.work(config, "torch_full", 1024)
  )
  assert 4 < growth < 16
  before = entries({"seconds_median": 600 / growth * 0.99})
  assert peers.foreseen(config, "torch_full", 4096, before) is None
  assert peers.foreseen(config, "tunix", 4096, before) is None
  before = entries({"seconds_median": 600 / growth * 1.01})
  reason = peers.foreseen(config, "torch_full", 4096, before)
  assert "would take 606 s" in reason and "limit is 600 s" in reason
  before = entries({"not_run": "out of memory"})
  reason = peers.foreseen(config, "torch_full", 4096, before)
  assert reason == "not run on 1024 prompt tokens: out of memory"
  assert peers.foreseen(config, "torch_full", 512, before) is None


def test_a_system_that_takes_too_long_is_given_up(tmp_path, fake):
  config = small()
  config.limit_seconds = 4.0
  (entry,) = peers.run(config, tmp_path)["prefixes"]
  grouper, *ours = entry["peers"]
  assert grouper["not_run"] == "one gradient took 5 s; the limit is 4 s"
  assert grouper["seconds"] == [] and "time_ratio" not in grouper
  assert all(row["agrees"] for row in ours)
  (remark,) = report.remarks({"prefixes": [entry]})
  assert remark.startswith("32 prefix_grouper: not run: one gradient took 5 s")


def test_without_an_environment_for_the_others(tmp_path):
  config = small()
  config.peers_python = "no/such/python"
  with pytest.raises(ValueError, match="no/such/python does not exist"):
    peers.run(config, tmp_path)
  assert not (tmp_path / "results.json").exists()


def test_problems_survive_a_file_and_share_weights(tmp_path):
  model = peers_config.get_config("tiny").model.to_dict()
  sizes = dict(branches=2, tail=3, seed=0)
  one = problem_lib.create(model, prompt=5, **sizes)
  problem_lib.save(one, tmp_path / "p.npz")
  two = problem_lib.load(tmp_path / "p.npz")
  assert two.model == one.model
  np.testing.assert_array_equal(two.tails_GT, one.tails_GT)
  np.testing.assert_array_equal(two.prompt_P, one.prompt_P)
  np.testing.assert_allclose(
      two.coefficients_G, one.advantages_G / (2 * 3), rtol=1e-6
  )
  longer = problem_lib.create(model, prompt=6, **sizes)
  for name, x in one.weights.items():
    assert x.dtype == np.float32
    np.testing.assert_array_equal(two.weights[name], x)
    np.testing.assert_array_equal(longer.weights[name], x)


def test_a_worker_answers_in_lines(tmp_path):
  calls = []

  def build():
    calls.append("build")
    return lambda: (0.5, np.zeros((1, 2)), len(calls))

  peer = serve.Peer(
      build, lambda g: {"w": np.full(2, g)}, {"x": "1"}, {"rows": 1}
  )
  out = io.StringIO()
  file = tmp_path / "g.npz"
  serve.serve(peer, io.StringIO(f"go\ngo\nwrite {file}\n"), out)
  ready, first, second, written = map(json.loads, out.getvalue().splitlines())
  assert ready["ready"] and ready["versions"] == {"x": "1"}
  assert ready["baseline_rss_bytes"] > 2**20
  assert first["loss"] == second["loss"] == 0.5
  assert first["peak_rss_bytes"] >= first["built_rss_bytes"] > 2**20
  assert written == {"written": True} and calls == ["build"]
  with np.load(file) as saved:
    assert set(saved) == {"w", "log_probs"}
    np.testing.assert_array_equal(saved["w"], [1, 1])


@pytest.mark.parametrize(
    "error,reason",
    [
        (serve.NotRun("needs 99 GiB"), "needs 99 GiB"),
        (RuntimeError("can't allocate 9 bytes"), "out of memory: can't"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_peer_that_cannot_says_why(error, reason):
  def build():
    raise error

  out = io.StringIO()
  peer = serve.Peer(build, lambda g: {}, {})
  serve.serve(peer, io.StringIO("go\ngo\n"), out)
  _, answer = map(json.loads, out.getvalue().splitlines())
  assert answer["not_run"].startswith(reason)


def test_other_errors_are_not_taken_for_memory():
  def build():
    raise RuntimeError("a bug")

  with pytest.raises(RuntimeError, match="a bug"):
    serve.serve(serve.Peer(build, dict, {}), io.StringIO("go\n"), io.StringIO())


def worker(tmp_path, code) -> client.Worker:
  return client.Worker(
      [sys.executable, "-c", code], folder=pathlib.Path.cwd(),
      log=tmp_path / "log",
  )


def test_a_worker_that_dies_or_hangs_is_an_answer(tmp_path):
  echo = "for line in iter(input, ''): print('{\"said\": \"' + line + '\"}')"
  talks = worker(tmp_path, f"import functools\nprint = functools.partial("
                           f"print, flush=True)\n{echo}")
  assert talks.ask("one", 60) == {"said": "one"}
  assert talks.ask("two", 60) == {"said": "two"}
  talks.close()
  dies = worker(tmp_path, "input(); raise SystemExit('no room')")
  assert dies.ask("go", 60) == {
      "not_run": "the worker ended with code 1: no room"
  }
  dies.close()
  hangs = worker(tmp_path, "import time; time.sleep(60)")
  assert hangs.answer(0.2) == {"not_run": "no answer within 0 s"}
  assert "not_run" in hangs.ask("go", 0.2)
