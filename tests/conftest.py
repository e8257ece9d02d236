# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict modes for all tests, and the two tiers.

`make test` runs the quick tier: every invariant, in minutes. `make test-all`
adds the exhaustive one: grids of architectures, schedules and devices, and runs
of whole experiments. A test marked `exhaustive` is in the second tier, but for
those of its cases whose id contains a text named by `but`.

A slow machine does not get through the exhaustive tier in the time that CI has.
There `--minutes` skips what is left, and the report says how many.
"""

import os
import pathlib
import time

# The tests compile much and run little. Code generation without optimization
# takes a quarter of the time; the programs that XLA schedules are the same.
# `XLA_FLAGS= make test` runs them as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

_BEGAN = time.monotonic()


def pytest_addoption(parser):
  parser.addoption(
      "--tier", choices=("quick", "exhaustive", "all"), default="all",
      help="which tests are run, see tests/conftest.py",
  )
  parser.addoption(
      "--minutes", type=float, default=0.0,
      help="tests that would begin later than this are skipped; 0 for no limit",
  )


def pytest_configure(config):
  config.addinivalue_line(
      "markers", "exhaustive(but=()): not in the quick tier, see conftest.py"
  )


def pytest_collection_modifyitems(config, items):
  tier = config.getoption("--tier")
  if tier == "all":
    return
  chosen = [x for x in items if _is_exhaustive(x) == (tier == "exhaustive")]
  left_out = [x for x in items if _is_exhaustive(x) != (tier == "exhaustive")]
  config.hook.pytest_deselected(items=left_out)
  items[:] = chosen


def pytest_runtest_setup(item):
  limit = item.config.getoption("--minutes")
  if limit and time.monotonic() - _BEGAN > 60 * limit:
    pytest.skip(f"The {limit:g} minutes that were given are over.")


def _is_exhaustive(item) -> bool:
  mark = item.get_closest_marker("exhaustive")
  if mark is None:
    return False
  but = mark.kwargs.get("but", ())
  kept = (but,) if isinstance(but, str) else but
  case = item.name.partition("[")[2]
  return not any(text in case for text in kept)


@pytest.fixture
def x64():
  """float64 inside the test."""
  with jax.enable_x64(True):
    yield


@pytest.fixture(autouse=True)
def room_for_programs():
  """Every compiled program holds memory maps, and a process may have 65530.

  Without this the suite's later tests crash inside of the compiler.
  """
  yield
  maps = pathlib.Path("/proc/self/maps")  # of Linux
  if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
    jax.clear_caches()
