# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that call reward functions side by side, each for a limited time.

A process whose call takes too long is killed and another one takes its place,
which ends a function that waits or loops for ever, in compiled code too. The
processes import the reward's file and no jax.
"""

import collections
from collections.abc import Sequence
import multiprocessing
from multiprocessing import connection
import os
import subprocess
import sys
import time
from typing import Any
from typing import NamedTuple
import weakref

from branch_replay.tasks import reward_worker


class Source(NamedTuple):
  """Where a reward function comes from.

  Attributes:
    path: absolute path of its file.
    content: what was in the file when it was read; a file that is changed
      later changes no reward of a run that goes on.
    function: name of the function.
  """

  path: str
  content: bytes
  function: str


class Call(NamedTuple):
  """One call of a reward: which of the sources, and its two arguments."""

  source: int
  answer: str
  row: dict


class Outcome(NamedTuple):
  """What came of a call.

  Attributes:
    kind: "value", "other" or "error" of `reward_worker.outcome`; "late" for a
      call that took too long; "died" for a process that ended in it.
    value: the number, or text for the message.
    detail: further text for the message.
  """

  kind: str
  value: Any = None
  detail: str = ""


class Worker:
  """One process that calls rewards."""

  def __init__(self, sources: Sequence[Source]):
    self.channel, theirs = multiprocessing.Pipe()
    with theirs:
      self.process = subprocess.Popen(
          [
              # -P, or the modules beside the script would be found first.
              sys.executable, "-P", reward_worker.__file__,
              str(theirs.fileno()), str(os.getpid()),
          ],
          pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
      )
    try:
      self.channel.send((sys.path, [tuple(source) for source in sources]))
    except OSError:  # it has ended: reading from it will say so
      pass

  def end(self) -> int:
    """Kills the process and returns its exit status."""
    self.process.kill()
    status = self.process.wait()
    self.channel.close()
    return status


class Pool:
  """Up to so many processes that call the rewards of some files.

  They are started when they are first needed, and end with this process.

  Args:
    sources: the rewards.
    workers: most processes at a time.
  """

  def __init__(self, sources: Sequence[Source], workers: int):
    self._sources, self._most = tuple(sources), workers
    self._idle: list[Worker] = []
    self._starting: dict[connection.Connection, Worker] = {}
    self._alive: set[Worker] = set()
    weakref.finalize(self, _end_all, self._alive)

  def run(self, calls: Sequence[Call], *, timeout: float) -> list[Outcome]:
    """Makes all calls, and returns their outcomes in the same order.

    Args:
      calls: the calls.
      timeout: most seconds of one call; 0 for no limit. Loading the files does
        not count.

    Raises:
      ValueError: a process could not load the files.
    """
    outcomes = [Outcome("died")] * len(calls)
    waiting = collections.deque(range(len(calls)))
    busy: dict[connection.Connection, tuple[Worker, int, float]] = {}
    try:
      while waiting or busy:
        while waiting and self._idle:
          worker = self._idle.pop()
          try:
            worker.channel.send(tuple(calls[waiting[0]]))
          except OSError:  # it has died since its last call
            self._end(worker)
            continue
          number = waiting.popleft()
          ends = time.monotonic() + timeout if timeout else float("inf")
          busy[worker.channel] = worker, number, ends
        wanted = min(self._most - len(busy), len(waiting))
        while len(self._starting) < wanted:
          self._start()
        self._receive(busy, outcomes)
        for channel, (worker, number, ends) in list(busy.items()):
          if time.monotonic() >= ends and not channel.poll():
            del busy[channel]
            self._end(worker)
            outcomes[number] = Outcome("late")
    finally:  # what they are about to say is nobody's any more
      for worker, _, _ in busy.values():
        self._end(worker)
    return outcomes

  def _receive(self, busy, outcomes) -> None:
    """Waits until a process has something to say, or a call takes too long."""
    ends = min((ends for _, _, ends in busy.values()), default=float("inf"))
    left = max(0.0, ends - time.monotonic())
    said = connection.wait(
        [*busy, *self._starting], None if left == float("inf") else left
    )
    for channel in said:
      try:
        outcome = Outcome(*channel.recv())
      except (EOFError, OSError):
        outcome = None
      if channel in busy:
        worker, number, _ = busy.pop(channel)
        if outcome is None:
          outcome = Outcome("died", self._end(worker))
        else:
          self._idle.append(worker)
        outcomes[number] = outcome
        continue
      worker = self._starting.pop(channel)
      if outcome is None or outcome.kind == "failed":
        status = self._end(worker)
        files = ", ".join(sorted({one.path for one in self._sources}))
        why = f"status {status}" if outcome is None else outcome.detail
        raise ValueError(f"A process could not load the rewards {files}: {why}")
      self._idle.append(worker)

  def _start(self) -> None:
    worker = Worker(self._sources)
    self._alive.add(worker)
    self._starting[worker.channel] = worker

  def _end(self, worker: Worker) -> int:
    self._alive.discard(worker)
    return worker.end()


def _end_all(workers: set[Worker]) -> None:
  for worker in list(workers):
    worker.end()
