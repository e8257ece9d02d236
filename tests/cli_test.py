# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of experiments says what there is, and what was meant."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("argument, said", (
    ("--help", ("A SIMULATION of a rollout", "--workdir:", "--devices:",
                "--config:", "--config.<field>=<value>")),
    ("--workdi=x", ("Did you mean: workdir",)),
    ("workers=3", ("'workers=3' is no flag", "--config.workers=3")),
    ("configs/simulate_rollouts.py", (
        "error: 'configs/simulate_rollouts.py' is no flag: did you mean "
        "--config=configs/simulate_rollouts.py?",
    )),
    ("--config=configs/simulate_rollout.py", (
        "error: there is no config", "configs/simulate_rollouts.py?",
    )),
    ("--config=configs/simulate_rollouts.py --config.worker=3", (
        "error: the config has no field 'worker'", 'Did you mean "workers"',
    )),
    ("--config.worker=3", ("error: the config has no field 'worker'",
                           'Did you mean "workers"')),
    ("--config.bench=none.json", ("error: ", "run experiments.bench_rollout")),
))
def test_what_the_command_line_says(argument, said):
  done = subprocess.run(
      [
          sys.executable, "-m", "experiments.simulate_rollouts",
          *argument.split(),
      ],
      capture_output=True, text=True, cwd=_ROOT,
  )
  text = done.stdout + done.stderr
  assert done.returncode == 1
  assert "Traceback" not in text
  for part in said:
    assert part in text


def test_main_functions_without_a_config_take_no_words():
  done = subprocess.run(
      [sys.executable, "-m", "experiments.plan", "prefix=4096"],
      capture_output=True, text=True, cwd=_ROOT,
  )
  assert done.returncode == 1
  assert "'prefix=4096' is no flag: did you mean --prefix=4096?" in done.stderr
