# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line of experiments says what there is, and what was meant."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.exhaustive(
    but=("--help", "prefi 3", "configs/train.py", "workdir=setup")
)
@pytest.mark.parametrize("argument, said", (
    ("--help", ("One gradient over a very long prefix", "--workdir:",
                "--devices:", "--config:", "--config.<field>=<value>",
                "\n  prefix=", "\n  model.width=")),
    ("--workdi=x", ("error: there is no flag --workdi=x. Did you mean "
                    "--workdir=x?",)),
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
        "error: the config has no field 'prefi'. Did you mean --config.prefix?",
    )),
    ("--config.prefi 3", ("error: the config has no field 'prefi'",)),
    ("--config.width=3", ("Did you mean --config.model.width?",)),
    ("--config.model=3", ("error: ",)),
    ("--config.prefix=many", ("error: flag --config.prefix=many",)),
    ("--config=configs/train.py", (
        "error: configs/train.py is a config of another experiment: python -m "
        "experiments.train --config=configs/train.py",
    )),
    ("--workdir=setup.py/here", ("error: --workdir=setup.py/here: setup.py is "
                                 "a file",)),
))
def test_what_the_command_line_says(argument, said):
  done = subprocess.run(
      [sys.executable, "-m", "experiments.long_run", *argument.split()],
      capture_output=True, text=True, cwd=_ROOT,
  )
  text = done.stdout + done.stderr
  assert done.returncode == (argument != "--help")
  assert "Traceback" not in text
  if argument != "--help":
    assert len(text.splitlines()) == 1
  for part in said:
    assert part in text


def test_main_functions_without_a_config_take_no_words():
  done = subprocess.run(
      [sys.executable, "-m", "experiments.plan", "prefix=4096"],
      capture_output=True, text=True, cwd=_ROOT,
  )
  assert done.returncode == 1
  assert "'prefix=4096' is no flag: did you mean --prefix=4096?" in done.stderr


def test_help_gives_every_field_of_a_run_with_its_meaning():
  done = subprocess.run(
      [sys.executable, "-m", "experiments.train", "--help",
       "--config.reinforce.algorithm.name=dpo", "--config.task.name=arithmetic",
       "--config.seed=3"],
      capture_output=True, text=True, cwd=_ROOT,
  )
  lines = done.stdout.splitlines()
  at = lines.index("  reinforce.algorithm.settings.beta=0.1")
  assert lines[at + 1].strip()  # of the algorithm that was chosen
  assert any(line.startswith("  task.operations=") for line in lines)
  assert done.returncode == 0 and not done.stderr
