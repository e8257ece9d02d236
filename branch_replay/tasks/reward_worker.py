# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads reward functions from files; run as a script, it calls them for others.

As a script it imports nothing of this package, so that it starts at once. Its
parent is `reward_pool`, which says on a connection what to load and what to
call.
"""

from collections.abc import Callable
import hashlib
from multiprocessing import connection
import numbers
import os
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any

_SHOWN = 200  # characters of a value that is no number


def load(path: str, source: bytes) -> types.ModuleType:
  """The module that the source of a file makes; run once in a process.

  The file's folder is put at the end of the path that imports search.

  Args:
    path: absolute path of the file, for messages and imports.
    source: what is in the file.
  """
  content = path.encode() + b"\0" + source
  name = f"reward_{hashlib.sha256(content).hexdigest()[:16]}"
  if name in sys.modules:
    return sys.modules[name]
  module = types.ModuleType(name)
  module.__file__ = path
  sys.modules[name] = module  # before it runs, as dataclasses look for it
  folder = os.path.dirname(path)
  if folder not in sys.path:
    sys.path.append(folder)
  try:
    exec(compile(source, path, "exec"), module.__dict__)
  except BaseException:
    del sys.modules[name]
    raise
  return module


def outcome(function: Callable, answer: str, row: dict) -> tuple[str, Any, str]:
  """Calls a reward, and describes what came of it in plain values.

  Returns:
    ("value", number, ""); or ("other", text of the value, its type) for what is
    no number; or ("error", what was raised, its traceback).
  """
  try:
    value = function(answer, row)
    if getattr(value, "ndim", None) == 0:
      value = value.item()  # an array of one number
    if isinstance(value, numbers.Real):
      return "value", float(value), ""
    return "other", repr(value)[:_SHOWN], type(value).__name__
  except (Exception, SystemExit) as error:
    said = f"{type(error).__name__}: {error}"
    return "error", said, traceback.format_exc()


def serve(channel: connection.Connection) -> None:
  """Calls rewards for the process at the other end, until that end closes."""
  path, sources = channel.recv()
  sys.path[:] = path
  try:
    functions = [
        getattr(load(file, source), name) for file, source, name in sources
    ]
  except BaseException:
    channel.send(("failed", None, traceback.format_exc()))
    return
  channel.send(("ready", None, ""))
  while True:
    try:
      number, answer, row = channel.recv()
    except (EOFError, ConnectionResetError):
      return
    channel.send(outcome(functions[number], answer, row))


def end_with(parent: int) -> None:
  """Ends this process soon after its parent, even while a reward runs."""
  while os.getppid() == parent:
    time.sleep(1)
  os._exit(1)


def main() -> None:
  # A signal to the whole group of processes, as Ctrl-C sends it, asks the
  # parent to finish its step, for which it needs this process.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
  threading.Thread(
      target=end_with, args=(int(sys.argv[2]),), daemon=True
  ).start()
  serve(connection.Connection(int(sys.argv[1])))


if __name__ == "__main__":
  main()
