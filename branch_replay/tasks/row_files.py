# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads rows of prompts from JSONL and Parquet files, and checks their form."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib

ENDINGS = (".jsonl", ".parquet")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
  """One row of a file.

  Attributes:
    id: its field `id`, or the split's name and the number of line or row.
    where: file and line or row, for messages.
    prompt: a text, or messages {"role": ..., "content": ...} in order, the last
      of which is not the assistant's.
    answer: the answer to learn from, or None.
    rejected: an answer that is worse, or None.
    fields: all fields of the row, as the file has them.
  """

  id: str
  where: str
  prompt: str | list[Mapping]
  answer: str | None
  rejected: str | None
  fields: dict


@dataclasses.dataclass(frozen=True)
class Table:
  """The rows of a file.

  Attributes:
    path: the file, as it was named.
    rows: its rows in order, at least one.
    digest: digest of the file's content.
  """

  path: str
  rows: Sequence[Row]
  digest: str


def read(path: str, *, split: str, prompt_field: str) -> Table:
  """Reads a whole file.

  Args:
    path: a .jsonl file, one JSON object a line, or a .parquet file.
    split: name of the split, for the ids of rows without one.
    prompt_field: field of the prompt. A row without it may have `messages`.

  Returns:
    Its rows.

  Raises:
    ValueError: no such file, another ending, a line that is no JSON object, a
      row without a prompt or with a field of another type, an id that two rows
      have, preference pairs in some rows only, or no rows at all.
  """
  file = pathlib.Path(path).expanduser()
  if file.suffix not in ENDINGS:
    raise ValueError(
        f"{split}={str(path)!r}: rows are read from files that end with "
        f"{' or '.join(ENDINGS)}, not with {file.suffix!r}."
    )
  if not file.is_file():
    raise ValueError(f"{split}={str(path)!r} is not a file.")
  content = file.read_bytes()
  values = _json_lines if file.suffix == ".jsonl" else _parquet
  rows, places = [], {}
  for number, where, value in values(path, content):
    if not isinstance(value, Mapping):
      raise ValueError(
          f"{where} must be an object with fields, not a "
          f"{type(value).__name__}."
      )
    row = _row(dict(value), where, f"{split}-{number:07d}", prompt_field)
    if row.id in places:
      raise ValueError(
          f"{where} has the id {row.id!r}, and so has {places[row.id]}: each "
          "row needs its own, or none."
      )
    places[row.id] = where
    rows.append(row)
  if not rows:
    raise ValueError(f"{path} has no rows.")
  for row in rows:
    if (row.rejected is None) != (rows[0].rejected is None):
      lacks, has = (row, rows[0]) if row.rejected is None else (rows[0], row)
      raise ValueError(
          f"{lacks.where} has no 'chosen' and 'rejected' and {has.where} has: "
          "all rows of a file need them, or none."
      )
  return Table(str(path), rows, hashlib.sha256(content).hexdigest()[:16])


def _json_lines(path, content: bytes) -> Iterator[tuple[int, str, object]]:
  # Not by `splitlines`, which also divides at characters that text may hold.
  for number, line in enumerate(content.split(b"\n"), 1):
    if not line.strip():
      continue
    where = f"{path}:{number}"
    try:
      value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except ValueError as error:
      raise ValueError(
          f"{where} is not JSON: {error}. A .jsonl file has one object a line."
      ) from error
    yield number, where, value


def _parquet(path, content: bytes) -> Iterator[tuple[int, str, object]]:
  import pyarrow
  from pyarrow import parquet

  try:
    table = parquet.read_table(pyarrow.BufferReader(content))
  except (pyarrow.ArrowException, OSError) as error:
    raise ValueError(
        f"{path} is not a Parquet file that can be read: {error}"
    ) from error
  for number, value in enumerate(table.to_pylist(), 1):
    yield number, f"{path}, row {number}", value


def _row(fields: dict, where: str, number: str, prompt_field: str) -> Row:
  # Every row of a Parquet file has every field: one that is null is not there.
  said = {name: x for name, x in fields.items() if x is not None}
  prompt = said.get(prompt_field, said.get("messages"))
  if prompt is None:
    raise ValueError(
        f"{where} has no {prompt_field!r} and no 'messages', but "
        f"{', '.join(said) or 'nothing'}. Name the field of the prompt: "
        "prompt_field=..."
    )
  answer = _answer(said, where)
  if isinstance(prompt, str):
    if not prompt.strip():
      raise ValueError(f"{where}: the prompt is empty.")
  else:
    prompt, last = _messages(prompt, where)
    if last is not None:
      if answer is not None:
        raise ValueError(
            f"{where} has two answers: its last message is the assistant's, "
            "and there is a field for it too. Take one of them out."
        )
      answer = last
  id_ = said.get("id", number)
  if not isinstance(id_, (str, int)) or isinstance(id_, bool) or id_ == "":
    raise ValueError(f"{where}: id must be text or a number, not {id_!r}.")
  return Row(str(id_), where, prompt, answer, said.get("rejected"), fields)


def _answer(said: dict, where: str) -> str | None:
  """The answer to learn from, after checking that answers are text."""
  for field in ("answer", "chosen", "rejected"):
    if not isinstance(said.get(field, ""), str):
      raise ValueError(
          f"{where}: {field} must be text, not {said[field]!r} of type "
          f"{type(said[field]).__name__}. Give a field that only the reward "
          "reads another name."
      )
  if ("chosen" in said) != ("rejected" in said):
    raise ValueError(
        f"{where} has only one of 'chosen' and 'rejected': a pair needs both."
    )
  if "chosen" in said and "answer" in said:
    raise ValueError(
        f"{where} has 'chosen' and 'answer': the chosen answer is the one to "
        "learn from. Give a field that only the reward reads another name."
    )
  return said.get("answer", said.get("chosen"))


def _messages(value, where: str) -> tuple[list[dict], str | None]:
  """Messages before the assistant's last answer, and the answer if any."""
  wanted = "a text or a list of messages {'role': ..., 'content': ...}"
  if not isinstance(value, list):
    raise ValueError(
        f"{where}: the prompt must be {wanted}, not {value!r} of type "
        f"{type(value).__name__}."
    )
  messages = []
  for message in value:
    if not isinstance(message, Mapping) or not all(
        isinstance(message.get(key), str) for key in ("role", "content")
    ):
      raise ValueError(
          f"{where}: the prompt must be {wanted} whose role and content are "
          f"text; one is {message!r}."
      )
    messages.append({k: x for k, x in message.items() if x is not None})
  last = None
  if messages and messages[-1]["role"] == "assistant":
    last = messages.pop()["content"]
  if not messages:
    raise ValueError(f"{where}: there is no message to answer.")
  return messages, last
