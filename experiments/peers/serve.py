# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the conversation: JSON lines, one an answer.

  in                out
                    {"ready": true, ...}      weights are loaded
  go                {"seconds": ..., ...}     one gradient, timed
  write FILE        {"written": true}         the last gradient, for the check
  (end of input)                              the worker ends

Any answer may be {"not_run": reason} instead, after which the worker ends.
"""

from collections.abc import Callable
import dataclasses
import json
import resource
import sys
import time
from typing import Any

import numpy as np


class NotRun(Exception):
  """A peer that cannot run a problem, with the reason for the record."""


@dataclasses.dataclass(frozen=True)
class Peer:
  """A peer with the weights in its memory.

  Attributes:
    build: () -> run; what is done once for a shape, such as compilation.
      `run()` -> (loss, log_probs_GT, gradient), finished when it returns, the
      gradient in whatever form the peer has it.
    export: gradient -> f32 numpy arrays by the names of `problem`.
    versions: of the packages that matter.
    settings: what was chosen for it.
  """

  build: Callable[[], Callable[[], tuple]]
  export: Callable[[Any], dict[str, np.ndarray]]
  versions: dict[str, str]
  settings: dict = dataclasses.field(default_factory=dict)


def _status_bytes(field: str) -> int:
  """A field of /proc/self/status; elsewhere the peak that getrusage knows.

  On Linux getrusage will not do: its peak starts at that of the process which
  started this one.
  """
  try:
    with open("/proc/self/status") as file:
      (line,) = (line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024
  except FileNotFoundError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_rss_bytes() -> int:
  """The most memory this process has had resident so far."""
  return _status_bytes("VmHWM:")


def rss_bytes() -> int:
  """Memory that is resident now; where that is unknown, the peak so far."""
  return _status_bytes("VmRSS:")


def serve(peer: Peer, read, write) -> None:
  """Answers until the input ends.

  Args:
    peer: the peer.
    read: text lines in.
    write: text lines out.
  """
  def answer(**fields):
    write.write(json.dumps(fields) + "\n")
    write.flush()

  answer(ready=True, baseline_rss_bytes=rss_bytes(), versions=peer.versions)
  run = result = None
  for line in read:
    command, _, rest = line.strip().partition(" ")
    try:
      if command == "go":
        if run is None:
          run = peer.build()
          built_rss = rss_bytes()
          cpu_after = time.process_time()
        result = None  # two gradients at a time would count twice
        cpu_before = time.process_time()
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        idle, cpu_after = cpu_before - cpu_after, time.process_time()
        answer(
            seconds=seconds, cpu_seconds=cpu_after - cpu_before,
            idle_cpu_seconds=idle, loss=result[0], built_rss_bytes=built_rss,
            peak_rss_bytes=peak_rss_bytes(), settings=peer.settings,
        )
      elif command == "write":
        np.savez(rest, log_probs=result[1], **peer.export(result[2]))
        answer(written=True)
      else:
        raise ValueError(f"Unknown command {command!r}.")
    except NotRun as error:
      answer(not_run=str(error))
      return
    except (MemoryError, RuntimeError) as error:
      if isinstance(error, RuntimeError) and "alloc" not in str(error):
        raise
      answer(not_run=f"out of memory: {str(error)[:200]}")
      return
