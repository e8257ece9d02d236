# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: acknowledged at once, also while XLA compiles."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from branch_replay.training import signals

ROOT = pathlib.Path(__file__).resolve().parents[1]
# XLA multiplies constants itself, slowly: this compiles for minutes.
COMPILES = """
import jax
import jax.numpy as jnp
import numpy as np

from branch_replay.training import signals

constant = np.arange(1500 * 1500, dtype=np.int32).reshape(1500, 1500)
lowered = jax.jit(
    lambda x: x + jnp.asarray(constant) @ jnp.asarray(constant)
).lower(jnp.ones((1500, 1500), jnp.int32))
with signals.Stop(lambda: 7):
  print("compiling", flush=True)
  lowered.compile()
  print("compiled", flush=True)
"""
FIRST = "Stopping after this step; the checkpoint follows. Press Ctrl-C again"


class Child:
  """A process whose lines on stderr are kept with the times they came at."""

  def __init__(self, code: str):
    self.process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    self.said = []
    self._thread = threading.Thread(target=self._read, daemon=True)
    self._thread.start()

  def _read(self):
    for line in self.process.stderr:
      self.said.append((line.strip(), time.monotonic()))

  def signal(self, number) -> float:
    """Sends a signal, and returns when."""
    self.process.send_signal(number)
    return time.monotonic()

  def wait_for(self, text: str, seconds: float) -> float:
    """When a line on stderr came that contains a text."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
      for line, at in list(self.said):
        if text in line:
          return at
      time.sleep(0.02)
    raise AssertionError(f"{text!r} is not in {self.said}")


@pytest.mark.parametrize("number", signals.NUMBERS)
def test_a_signal_is_acknowledged_while_something_compiles(number):
  child = Child(COMPILES)
  assert child.process.stdout.readline() == "compiling\n"
  time.sleep(1)  # into the compiler
  sent = child.signal(number)
  assert child.wait_for(FIRST, 10) - sent < 2
  assert any("since step 7." in line for line, _ in child.said)
  assert child.process.poll() is None
  sent = child.signal(number)
  assert child.wait_for("step 7 is saved", 10) - sent < 2
  assert child.process.wait(10) == 128 + number
  assert child.process.stdout.read() == "", "the compilation was over"


def wait_until(condition):
  until = time.monotonic() + 5
  while not condition():
    assert time.monotonic() < until
    time.sleep(0.01)


def test_in_a_notebook_a_second_signal_interrupts(capsys, monkeypatch):
  monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
  before = signal.getsignal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    with signals.Stop(lambda: None) as stop:
      signal.raise_signal(signal.SIGINT)
      assert stop.requested
      wait_until(lambda: stop._answered == 1)
      signal.raise_signal(signal.SIGINT)
  said = capsys.readouterr().err
  assert f"{FIRST} to stop at once, losing what was done since step 0." in said
  assert "nothing is saved yet" in said
  assert signal.getsignal(signal.SIGINT) is before


def test_all_is_as_it_was_afterwards():
  handlers = [signal.getsignal(number) for number in signals.NUMBERS]
  threads = threading.active_count()
  with signals.Stop(lambda: 1) as stop:
    signal.raise_signal(signal.SIGTERM)
  assert stop.requested
  assert [signal.getsignal(x) for x in signals.NUMBERS] == handlers
  assert threading.active_count() == threads
  assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_reach_whoever_waited_for_them():
  """As asyncio does, in a notebook for instance."""
  read, write = socket.socketpair()
  write.setblocking(False)
  handler = signal.signal(signal.SIGUSR1, lambda *_: None)
  signal.set_wakeup_fd(write.fileno())
  try:
    with signals.Stop(lambda: 1) as stop:
      signal.raise_signal(signal.SIGUSR1)
      read.settimeout(5)
      assert read.recv(1) == bytes([signal.SIGUSR1])
      assert not stop.requested
    assert signal.set_wakeup_fd(-1) == write.fileno()
  finally:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGUSR1, handler)
    read.close()
    write.close()


def test_it_is_acknowledged_although_another_has_taken_the_socket(capsys):
  """As an event loop that runs in the main thread does."""
  with signals.Stop(lambda: 3) as stop:
    mine = signal.set_wakeup_fd(-1)
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: stop._answered == 1)
    signal.set_wakeup_fd(mine)
  assert "since step 3." in capsys.readouterr().err


def test_outside_of_the_main_thread_nothing_is_changed():
  before = signal.getsignal(signal.SIGINT)
  found = []

  def enter():
    with signals.Stop(lambda: 1) as stop:
      found.append((stop.requested, signal.getsignal(signal.SIGINT)))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert found == [(False, before)]


def test_a_folder_that_vanishes_while_it_is_read_does_no_harm(capsys):
  answers = [OSError("gone"), 12]

  def saved():
    answer = answers.pop(0)
    if isinstance(answer, OSError):
      raise answer
    return answer

  with signals.Stop(saved) as stop:
    signal.raise_signal(signal.SIGTERM)
    wait_until(lambda: not answers)
  assert stop.requested and "since step 12." in capsys.readouterr().err
