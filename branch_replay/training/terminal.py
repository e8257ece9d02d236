# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run shows in the terminal: a line a step, and some sampled answers.

Everything is plain lines on stderr, the same in a terminal and in a file.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import shutil
import statistics
import sys
import time

from branch_replay.training import writers

# Title, name of the number, format.
_COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("held-out", "eval/reward", ".3f"),
    ("length", "answer_length", ".1f"),
    ("entropy", "entropy", ".3f"),
    ("KL", "kl_reference", ".2g"),
    ("loss", "loss", ".3g"),
    ("grad", "grad_norm", ".3g"),
    ("tokens/s", "tokens_per_second", ".0f"),
)
_HEADER_EVERY = 20  # lines
_LATEST = 20  # steps whose median time tells how much is left
_ANSWERS = 4  # shown of a prompt
_PROMPT = 60  # characters of a prompt's end


class Terminal:
  """A writer to stderr, see `writers.Writer`.

  The time left is the median time of the latest steps, evaluation and saving
  included, times the steps left. The first step of a phase, which compiles, is
  not among them.
  """

  def __init__(self, place: writers.Place):
    self._steps = place.steps
    self._times = collections.deque(maxlen=_LATEST)
    self._titles, self._lines, self._phase = (), 0, None
    done = max(place.done, 0)
    if done < place.steps:
      _say(
          f"Training for {place.steps} steps, from step {done + 1}. The first "
          "step of a phase compiles, which may take minutes."
      )
    self._at = time.monotonic()

  def write(self, step: int, phase: str, scalars: Mapping[str, float]) -> None:
    now = time.monotonic()
    seconds, self._at = now - self._at, now
    if phase == self._phase:
      self._times.append(seconds)
    else:
      self._times.clear()
    cells = [(f"{step}/{self._steps}", 2 * len(str(self._steps)) + 1)]
    cells.append((phase, max(len(phase), 9)))
    titles = ["step", "phase"]
    for title, name, form in _COLUMNS:
      if name in scalars or name == "eval/reward":
        value = format(scalars[name], form) if name in scalars else ""
        titles.append(title)
        cells.append((value, max(len(title), 7)))
    left = ""
    if self._times:
      left = duration(
          statistics.median(self._times) * (self._steps - step)
      )
    titles += ["s", "left"]
    cells += [(f"{seconds:.3g}", 6), (left, 10)]
    self._header(phase, titles, [width for _, width in cells])
    _say("  ".join(text.rjust(width) for text, width in cells))
    self._lines += 1

  def _header(self, phase, titles, widths) -> None:
    known = (phase, titles) == (self._phase, self._titles)
    if known and self._lines < _HEADER_EVERY:
      return
    self._phase, self._titles, self._lines = phase, titles, 0
    _say("  ".join(
        title.rjust(width) for title, width in zip(titles, widths, strict=True)
    ))

  def completions(self, step: int, rows: Sequence[dict]) -> None:
    width = shutil.get_terminal_size((100, 24)).columns
    for row in rows:
      _say(f"Step {step}, {row['phase']}, sampled for {row['example']}:")
      prompt = _end(_plain(row["prompt"]), min(_PROMPT, width - 12))
      _say(f"   prompt  {prompt}")
      for answer in row["answers"][:_ANSWERS]:
        end = "" if answer["finished"] else " (cut off)"
        text = _start(_plain(answer["text"]), width - 12 - len(end)) + end
        _say(f"{answer['reward']:9.3f}  {text}")
      more = len(row["answers"]) - _ANSWERS
      if more > 0:
        _say(f"     and {more} more in completions.jsonl")

  def close(self) -> None:
    pass


def duration(seconds: float) -> str:
  """A time in words, roughly.

  Example:
    >>> [duration(x) for x in (7.2, 600, 11_100, 200_000)]
    ['7 s', '10 min', '3 h 05 min', '2 d 7 h']
  """
  minutes = round(seconds / 60)
  if seconds < 59.5:
    return f"{seconds:.0f} s"
  if minutes < 60:
    return f"{minutes} min"
  hours, minutes = divmod(minutes, 60)
  if hours < 48:
    return f"{hours} h {minutes:02} min"
  return f"{hours // 24} d {hours % 24} h"


def _plain(text: str) -> str:
  """The text in one line, with nothing that would steer a terminal."""
  text = text.replace("\n", "⏎").replace("\t", " ")
  return "".join(x if x.isprintable() else "·" for x in text)


def _start(text: str, most: int) -> str:
  return text if len(text) <= most else f"{text[: max(most, 1) - 1]}…"


def _end(text: str, most: int) -> str:
  return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"


def _say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
