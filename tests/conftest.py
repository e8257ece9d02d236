# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict modes for all tests."""

import os
import pathlib

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
