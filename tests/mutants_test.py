# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The list of faults fits the code as it is; `make mutants` runs it."""

import pathlib

from tests import mutants

ROOT = pathlib.Path(__file__).resolve().parents[1]


def problems_of(fault):
  """What is wrong with one fault, in sentences."""
  text = (ROOT / "branch_replay" / fault.file).read_text()
  if text.count(fault.old) != 1:
    yield f"occurs {text.count(fault.old)} times: {fault.old!r}"
  if fault.new == fault.old:
    yield "changes nothing"
  compile(text.replace(fault.old, fault.new), fault.file, "exec")
  if not fault.tests:
    yield "names no test"
  for test in fault.tests:
    file, *classes, name = test.partition("[")[0].split("::")
    source = (ROOT / "tests" / file).read_text()
    if classes:  # of the one suite that several implementations pass
      source += (ROOT / "tests" / "attention_suite.py").read_text()
    if f"def {name}(" not in source:
      yield f"names a test that is not there: {test}"


def test_every_fault_changes_one_place_and_names_tests_that_exist():
  """Whoever changes such a line writes the fault down anew."""
  found = [
      f"{fault.file}: {fault.name}: {problem}"
      for fault in mutants.ALL for problem in problems_of(fault)
  ]
  assert not found, "\n".join(found)


def test_faults_have_names_of_their_own_and_are_in_every_room():
  names = [fault.name for fault in mutants.ALL]
  assert len(set(names)) == len(names) >= 60
  rooms = {fault.file.partition("/")[0] for fault in mutants.ALL}
  assert rooms >= {
      "ops", "mixers", "models", "rl", "rollout", "training", "weights",
      "tasks", "data", "devices", "engine", "planning",
  }
