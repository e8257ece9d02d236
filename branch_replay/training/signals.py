# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: the first ends a run after its step, a second at once.

Python runs signal handlers in the main thread alone, and only between two of
its instructions. The main thread may be inside of a library for minutes, where
XLA compiles for instance, and the interpreter waits for the compiler even when
it exits. So a thread of its own answers. Python tells it of every signal at
once by a socket (`signal.set_wakeup_fd`).
"""

from collections.abc import Callable
import contextlib
import os
import signal
import socket
import sys
import threading

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_BY_HANDLER = 128  # added to a number that a handler, not Python, has written


class Stop:
  """Turns the first interrupt or termination into a request to stop.

  It is a context manager; outside of the main thread, where Python allows no
  handlers, it does nothing. A second signal ends the process, with the exit
  status 128 + number of the signal. In an interactive session, a notebook for
  instance, it has its usual effect instead: KeyboardInterrupt for Ctrl-C.

  Args:
    saved: function that returns the last step whose checkpoint is complete, or
      None. It is called from another thread.

  Attributes:
    requested: whether a signal has come.
  """

  def __init__(self, saved: Callable[[], int | None]):
    self.requested = False
    self._saved = saved
    self._handled = 0  # by handlers, in the main thread
    self._seen = 0  # by the thread that reads the socket
    self._answered = 0
    self._told = threading.Event()
    self._thread = None
    self._before = {}

  def __enter__(self) -> "Stop":
    if threading.current_thread() is not threading.main_thread():
      return self
    self._read, self._write = socket.socketpair()
    self._write.setblocking(False)
    self._other = signal.set_wakeup_fd(
        self._write.fileno(), warn_on_full_buffer=False
    )
    self._thread = threading.Thread(target=self._watch, daemon=True)
    self._thread.start()
    for number in NUMBERS:
      self._before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_) -> None:
    self._restore()
    if self._thread is not None:
      signal.set_wakeup_fd(self._other)
      self._write.close()  # ends the thread
      self._thread.join()
      self._read.close()

  def _handle(self, number: int, _) -> None:
    self.requested = True
    self._handled += 1
    with contextlib.suppress(BlockingIOError):
      # An event loop may have taken the socket's place for a while.
      self._write.send(bytes([number | _BY_HANDLER]))
    # While the main thread was busy, two signals may have become one call.
    if max(self._handled, self._seen) > 1 and _interactive():
      self._told.wait(1)
      self._restore()
      signal.raise_signal(number)

  def _restore(self) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before = {}

  def _watch(self) -> None:
    while data := self._read.recv(64):
      for number in data:
        if number in NUMBERS:
          self._seen += 1
        elif not number & _BY_HANDLER and self._other != -1:
          # Of whoever else waits for signals.
          os.write(self._other, bytes([number]))
        while self._answered < max(self._seen, self._handled):
          self._answered += 1
          self._answer(number & ~_BY_HANDLER)

  def _answer(self, number: int) -> None:
    if self._answered == 1:
      self.requested = True
      _say(
          "Stopping after this step; the checkpoint follows. Press Ctrl-C "
          "again to stop at once, losing what was done since step "
          f"{self._last() or 0}."
      )
    elif self._answered == 2:
      step = self._last()
      _say("Stopped at once; " + (
          "nothing is saved yet." if step is None else
          f"step {step} is saved, and the same command goes on from there."
      ))
      self._told.set()
      if not _interactive():
        os._exit(128 + number)

  def _last(self) -> int | None:
    for _ in range(3):
      try:
        return self._saved()
      except OSError:  # a folder that was just moved or deleted
        continue
    return None


def _interactive() -> bool:
  return hasattr(sys, "ps1")


def _say(text: str) -> None:
  print(f"\n{text}", file=sys.stderr, flush=True)
