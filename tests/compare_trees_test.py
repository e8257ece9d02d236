# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison over trees writes what it promises."""

import json

import pytest

import branch_replay as br
from branch_replay.planning import flops
from configs import compare_trees as trees_config
from experiments import compare_trees
from experiments.reporting import comparisons
from tests import tiny


@pytest.mark.exhaustive
def test_a_comparison_writes_what_it_promises(tmp_path):
  config = trees_config.get_config("tiny")
  results = compare_trees.run(config, tmp_path)
  written = json.loads((tmp_path / "results.json").read_text())
  assert written == json.loads(json.dumps(results))
  (case,) = results["cases"]
  assert case["leaves"] == 8 and 0.65 < case["shared"] < 0.75
  full, exact, stop = case["runs"]
  for run in case["runs"]:
    assert len(run["seconds"]) == 1
    assert run["loss"] == pytest.approx(full["loss"], abs=1e-5)
  assert exact["gradient_relative_error"] < 1e-5
  assert stop["gradient_relative_error"] > 1e-2
  assert full["token_ratio"] == 1 < 3 < exact["token_ratio"]
  assert exact["speedup_of_token_ratio"] == pytest.approx(
      exact["speedup"] / exact["token_ratio"]
  )
  assert full["flops"] > 2 * exact["flops"]
  table = comparisons.trees(results)
  assert "| full | agent | exact |" in table


@pytest.mark.parametrize("variant", ("", "architectures"))
def test_every_case_of_the_configs_can_be_built(variant):
  config = trees_config.get_config(variant)
  for name in config.architectures:
    model = compare_trees.architecture(name, config)
    for shape in config.trees:
      tree = br.Tree.from_turns(
          compare_trees.episodes(shape, 256, config.vocab_size, 0),
          config=model,
      )
      assert len(tree.leaves) == 8
      assert (tree.paths[:, :256] >= 0).all()
      assert tree.is_group == (shape == "group")


@pytest.mark.parametrize("change,message", [
    ({"modes": ("full", "sampled")}, "some of full, exact, stop"),
    ({"repeats": 0}, "measure at least once"),
    ({"architectures": ("mamba",)}, "Unknown architecture 'mamba'"),
    ({"trees": ("bush",)}, "Unknown tree 'bush'"),
])
def test_bad_configs_stop_with_a_message(tmp_path, change, message):
  config = trees_config.get_config("tiny")
  config.update(change)
  with pytest.raises(ValueError, match=message):
    compare_trees.run(config, tmp_path)


def test_flops_of_a_tree_by_hand():
  config = tiny.BASE
  # A prompt of 100 tokens and a visit of four tails of 5: a group.
  shapes = [(1, 100, 0, True, False), (4, 5, 100, False, True)]
  for mode, policy in (("exact", "keep"), ("stop", "recompute")):
    assert flops.runs(config, shapes, mode=mode, policy=policy) == (
        flops.gradient(
            config, prefix=100, branches=4, tail=5, mode=mode, policy=policy
        )
    )
  # An inner segment with outputs is pulled back in stop too.
  one = [(1, 10, 20, True, True)]
  head = 4 * 2 * 64 * 32 * 10
  for mode, policy, forwards in (
      ("stop", "keep", 1), ("exact", "keep", 1), ("exact", "recompute", 2),
  ):
    assert flops.runs(config, one, mode=mode, policy=policy) == head + (
        forwards + 2
    ) * flops.forward(config, 10, 20)
