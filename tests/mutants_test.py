# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of faults fits the code as it is; `make mutants` runs it."""

import pathlib

import pytest

from tests import mutants

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", mutants.ALL, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_and_names_tests_that_exist(fault):
  text = (ROOT / "branch_replay" / fault.file).read_text()
  assert text.count(fault.old) == 1, fault.old
  assert fault.new != fault.old
  compile(text.replace(fault.old, fault.new), fault.file, "exec")
  assert fault.tests
  for test in fault.tests:
    file, *_, name = test.split("::")
    source = (ROOT / "tests" / file).read_text()
    if "TestReplayAttention" in test:
      source += (ROOT / "tests" / "attention_suite.py").read_text()
    assert f"def {name.partition('[')[0]}(" in source, test


def test_faults_have_names_of_their_own_and_are_in_every_room():
  names = [fault.name for fault in mutants.ALL]
  assert len(set(names)) == len(names) >= 60
  rooms = {fault.file.partition("/")[0] for fault in mutants.ALL}
  assert rooms >= {
      "ops", "mixers", "models", "rl", "rollout", "training", "weights",
      "tasks", "engine.py", "passes.py", "segment.py", "state.py",
  }
