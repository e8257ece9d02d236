# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The parent's half of the conversation with a worker, see `serve`."""

from collections.abc import Sequence
import json
import os
import pathlib
import select
import subprocess
import time


class Worker:
  """A process that answers; whatever ends it becomes an answer too."""

  def __init__(
      self, command: Sequence[str], *, folder: pathlib.Path, log: pathlib.Path
  ):
    """Starts a command in a folder; the log takes its standard error."""
    self._log, self._pending = log, b""
    with log.open("wb") as errors:
      self._process = subprocess.Popen(
          command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
          stderr=errors,
      )

  def ask(self, command: str, timeout: float) -> dict:
    """Sends a line and returns the answer, {"not_run": reason} for none.

    A worker that takes more than `timeout` seconds is ended.
    """
    if self._process.poll() is not None:
      return {"not_run": self._ended()}
    try:
      self._process.stdin.write(command.encode() + b"\n")
      self._process.stdin.flush()
    except BrokenPipeError:
      return {"not_run": self._ended()}
    return self.answer(timeout)

  def answer(self, timeout: float) -> dict:
    """Waits for an answer that was not asked for, as the first one."""
    deadline = time.monotonic() + timeout
    pipe = self._process.stdout.fileno()
    while b"\n" not in self._pending:
      left = max(0.0, deadline - time.monotonic())
      if not select.select([pipe], [], [], left)[0]:
        self.close()
        return {"not_run": f"no answer within {timeout:.0f} s"}
      data = os.read(pipe, 1 << 16)
      if not data:
        return {"not_run": self._ended()}
      self._pending += data
    line, _, self._pending = self._pending.partition(b"\n")
    return json.loads(line)

  def _ended(self) -> str:
    code = self._process.wait()
    said = self._log.read_text(errors="replace").strip().splitlines()
    last = f": {said[-1][:200]}" if said else ""
    return f"the worker ended with code {code}{last}"

  def close(self) -> None:
    """Ends it, if it runs."""
    self._process.kill()
    self._process.wait()
    self._process.stdin.close()
    self._process.stdout.close()
