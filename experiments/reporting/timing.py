# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Times functions in turns, so that what else runs slows all of them alike."""

from collections.abc import Callable
import functools
import random
import statistics
import time
from typing import Any
from typing import NamedTuple

import jax


class Times(NamedTuple):
  """Seconds by the name of a function, one of every turn."""

  wall: dict[Any, list[float]]
  processor: dict[Any, list[float]]


def check(repeats: int) -> None:
  """Raises ValueError unless there is something to measure."""
  if repeats < 1:
    raise ValueError(f"repeats={repeats}: measure at least once.")


def seconds(function: Callable[[], Any]) -> float:
  """Wall time of one call, its arrays finished."""
  start = time.perf_counter()
  jax.block_until_ready(function())
  return time.perf_counter() - start


def compiled(function: Callable, *args, **options) -> tuple[Callable, dict]:
  """A function compiled for its arguments, to call without any.

  Returns:
    The function; and compile_seconds, argument_bytes and temp_bytes.
  """
  start = time.perf_counter()
  executable = jax.jit(function).lower(*args, **options).compile()
  memory = executable.memory_analysis()
  return functools.partial(executable, *args, **options), {
      "compile_seconds": time.perf_counter() - start,
      "argument_bytes": memory and memory.argument_size_in_bytes,
      "temp_bytes": memory and memory.temp_size_in_bytes,
  }


def in_turns(
    functions: dict[Any, Callable[[], Any]], repeats: int, *, seed: int = 0,
    warm: bool = True, report: Callable[[int, Any], None] | None = None,
) -> Times:
  """Calls every function once a turn, in a new random order every turn.

  Args:
    functions: without arguments, by name; what they return is waited for.
    repeats: turns that are timed.
    seed: of the order.
    warm: whether all have run before; otherwise a first turn is not timed.
    report: called with turn and name before each call.

  Raises:
    ValueError: less than one repeat.
  """
  check(repeats)
  found = Times(*({name: [] for name in functions} for _ in range(2)))
  order = random.Random(seed)
  for turn in range(repeats if warm else repeats + 1):
    for name in order.sample(list(functions), len(functions)):
      if report is not None:
        report(turn, name)
      processor = time.process_time()
      wall = seconds(functions[name])
      if warm or turn:
        found.wall[name].append(wall)
        found.processor[name].append(time.process_time() - processor)
  return found


def medians(times: dict[Any, list[float]]) -> dict[Any, float]:
  """The median of every list."""
  return {name: statistics.median(x) for name, x in times.items()}
