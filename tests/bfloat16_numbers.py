# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Random inputs and distances, and the list of checks of bfloat16_checks.py."""

import jax.numpy as jnp
import numpy as np

HALF = 2.0**-9  # of a number: what rounding it to bfloat16 costs on average
CHECKS = {}


def check(function):
  CHECKS[function.__name__] = function
  return function


def normal(*shape, seed=0, scale=1.0):
  """Random numbers, rounded to bfloat16."""
  numbers = np.random.default_rng(seed).normal(size=shape) * scale
  return jnp.asarray(numbers, jnp.bfloat16)


def wide(x):
  return np.asarray(x, np.float64)


def worst(found, right):
  return float(np.max(np.abs(wide(found) - right)))


def relative(found, right):
  """‖found − right‖ / ‖right‖."""
  return float(np.linalg.norm(wide(found) - right) / np.linalg.norm(right))


def slope(found, right):
  """How far a factor on all of `right` is from 1; roundings average out."""
  found = wide(found)
  return float(abs(np.sum(found * right) / np.sum(right**2) - 1))


def softmax(x):
  x = np.exp(x - x.max(axis=-1, keepdims=True))
  return x / x.sum(axis=-1, keepdims=True)
