# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Strict modes and shared models for all tests."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
  """float64 inside the test."""
  with jax.enable_x64(True):
    yield
