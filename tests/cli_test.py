# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of experiments says what there is, and what was meant."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("argument, said", (
    ("--help", ("One gradient over a very long prefix", "--workdir:",
                "--devices:", "--config:", "--config.<field>=<value>")),
    ("--workdi=x", ("Did you mean: workdir",)),
    ("prefix=3", ("'prefix=3' is no flag", "--config.prefix=3")),
    ("configs/long_run.py:stop", (
        "error: 'configs/long_run.py:stop' is no flag: did you mean "
        "--config=configs/long_run.py:stop?",
    )),
    ("--config=configs/long_ran.py", (
        "error: there is no config", "configs/long_run.py?",
    )),
    ("--config=configs/long_run.py:odd", (
        "error: Unknown variant 'odd': use one of stop, hybrid, hybrid_stop, "
        "tiny.",
    )),
    ("--config=configs/long_run.py:tiny --config.prefi=3", (
        "error: the config has no field 'prefi'", 'Did you mean "prefix"',
    )),
    ("--config.prefi=3", ("error: the config has no field 'prefi'",
                          'Did you mean "prefix"')),
    ("--config.model.num_kv_heads=2", ("error: ",)),
))
def test_what_the_command_line_says(argument, said):
  done = subprocess.run(
      [sys.executable, "-m", "experiments.long_run", *argument.split()],
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
