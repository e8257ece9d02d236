# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of files: rows as they were written, and mistakes by file and line."""

import json
import pathlib

import ml_collections
import numpy as np
import pyarrow
from pyarrow import parquet
import pytest

from branch_replay import tasks
from branch_replay.tasks import text as text_lib
from branch_replay.training import identity
from branch_replay.weights import chat as chat_lib
from experiments import prepare_tasks
from tests.tiny_tasks import CHARACTERS
from tests.tiny_tasks import chat


def write(path: pathlib.Path, rows) -> str:
  if path.suffix == ".parquet":
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
  else:
    path.write_text("".join(
        f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows
    ))
  return str(path)


def numbered(count: int) -> list[dict]:
  return [
      {"prompt": f"What is {n} + 1?", "answer": str(n + 1), "number": n}
      for n in range(count)
  ]


def right(answer, row):
  return answer == row["answer"]


@pytest.mark.parametrize("ending", (".jsonl", ".parquet"))
def test_rows_are_those_of_the_file(tmp_path, ending):
  rows = [row | {"id": f"sum {row['number']}"} for row in numbered(30)]
  train = write(tmp_path / f"rows{ending}", rows)
  recipe = tasks.recipe(
      "file", train=train, validation=train, test=train, reward=right
  )
  task = tasks.prepare(recipe)
  for split in ("train", "validation", "test"):
    assert len(task.split(split)) == 30
    for row, one in zip(rows, task.split(split), strict=True):
      asked = CHARACTERS.prompt(row["prompt"])
      assert one.id == row["id"] and one.details == row
      assert one.prompt_ids.tolist() == asked.ids
      assert one.prompt_ids.dtype == one.answer_ids.dtype == np.int32
      assert one.answer_ids.tolist() == CHARACTERS.answer(asked, row["answer"])
      assert task.reward(one, one.answer_ids) == 1.0
      assert task.reward(one, [*one.answer_ids[:-1], 9, 2]) == 0.0
  assert tasks.load(recipe).split("train")[-1].id == "sum 29"


def test_a_chat_model_reads_text_messages_and_raw_text(tmp_path):
  text = chat()
  turns = [
      {"role": "system", "content": "Be brief."},
      {"role": "user", "content": "Is it?"},
      {"role": "assistant", "content": "Yes<|end|>."},
      {"role": "user", "content": "Why?"},
  ]
  last = {"role": "assistant", "content": "Because."}
  train = write(tmp_path / "rows.parquet", [
      {"prompt": "Why?", "messages": None, "answer": "So."},
      {"prompt": None, "messages": turns, "answer": None},
      {"prompt": None, "messages": [*turns, last], "answer": None},
  ])
  task = tasks.from_files(train, validation=train, text=text)
  first, second, third = task.split("train")
  prompt = text.prompt("Why?")
  assert first.prompt_ids.tolist() == prompt.ids
  assert first.answer_ids.tolist() == text.answer(prompt, "So.")
  ids = chat_lib.encode_chat(text.pretrained, turns).ids
  assert second.prompt_ids.tolist() == third.prompt_ids.tolist() == ids
  assert second.answer_ids is None and second.details["messages"] == turns
  assert third.answer == "Because."
  assert text.decode(third.answer_ids.tolist()) == "Because.<|end|>"
  assert second.id == "train-0000002"

  train = write(tmp_path / "raw.jsonl", [{"prompt": "2 + 2 ="}] * 2)
  task = tasks.from_files(train, validation=train, text=text, raw=True)
  (row, _) = task.split("train")
  assert text.decode(row.prompt_ids.tolist()) == "2 + 2 ="
  task = tasks.from_files(train, validation=train, raw=True)
  (row, _) = task.split("train")
  assert row.prompt_ids.tolist() == [1, *CHARACTERS.encode("2 + 2 =")]


def test_pairs_are_a_better_and_a_worse_answer(tmp_path):
  train = write(tmp_path / "rows.jsonl", [
      {"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(3)
  ])
  task = tasks.from_files(train)
  row = task.split("train")[0]
  assert row.answer_ids.tolist() == [*CHARACTERS.encode("yes"), 2]
  assert row.rejected_ids.tolist() == [*CHARACTERS.encode("no"), 2]
  assert row.answer == "yes" and task.score is None


# Splits.


def test_a_tenth_is_held_out_if_no_file_is_named(tmp_path):
  for count, held_out in ((2, 1), (19, 1), (50, 5), (4000, 256)):
    train = write(tmp_path / "rows.jsonl", numbered(count))
    task = tasks.from_files(train)
    parts = [
        [row.id for row in task.split(split)]
        for split in ("train", "validation")
    ]
    assert [len(part) for part in parts] == [count - held_out, held_out]
    assert not set(parts[0]) & set(parts[1])
    assert parts == [sorted(part) for part in parts]
  with pytest.raises(ValueError, match="Unknown split of task 'file': 'test'"):
    task.split("test")
  again = tasks.from_files(train).split("validation")
  assert [row.id for row in again] == parts[1]


def test_what_is_held_out_depends_on_prompts_alone_and_keeps_them_together(
    tmp_path
):
  rows = numbered(100) * 2
  train = write(tmp_path / "rows.jsonl", rows)
  task = tasks.from_files(train)
  prompts = [
      {row.details["prompt"] for row in task.split(split)}
      for split in ("train", "validation")
  ]
  assert len(task.split("validation")) == 20 and len(prompts[1]) == 10
  assert not prompts[0] & prompts[1]
  other = write(tmp_path / "other.jsonl", [
      row | {"number": -1} for row in reversed(rows)
  ])
  held_out = tasks.from_files(other).split("validation")
  assert {row.details["prompt"] for row in held_out} == prompts[1]
  same = write(tmp_path / "same.jsonl", numbered(1) * 5)
  for path in (same, write(tmp_path / "one.jsonl", numbered(1))):
    with pytest.raises(ValueError, match="cannot be divided.*validation="):
      tasks.from_files(path)


# Length.


def test_prompts_that_are_too_long_are_refused_or_counted(tmp_path):
  rows = [{"prompt": "?" * (10 + n), "answer": "!" * n} for n in range(1, 21)]
  train = write(tmp_path / "rows.jsonl", rows)
  with pytest.raises(
      ValueError, match=r"rows.jsonl:19: the prompt has 31 ids, more than 30.*"
      "too_long='skip'",
  ):
    tasks.from_files(train, max_prompt_tokens=30)
  with pytest.warns(UserWarning, match="Left out 2 of the 20 rows"):
    task = tasks.from_files(
        train, max_prompt_tokens=30, too_long="skip", validation=train
    )
  assert len(task.split("train")) == len(task.split("validation")) == 18
  assert max(row.prompt_ids.size for row in task.split("train")) == 30
  with pytest.raises(ValueError, match="rows.jsonl:10: an answer has 11 ids"):
    tasks.from_files(train, max_answer_tokens=10)
  with pytest.raises(ValueError, match="All 20 rows of .* are too long"):
    tasks.from_files(train, max_prompt_tokens=5, too_long="skip")
  assert len(tasks.from_files(train, max_prompt_tokens=32).split("train")) == 18


def test_ids_are_counted_where_the_bound_says_too_little(tmp_path):
  text = chat()
  rows = [{"prompt": "the the" * n, "answer": "the" * n} for n in (1, 20)]
  train = write(tmp_path / "rows.jsonl", rows)
  task = tasks.from_files(train, text=text, validation=train)
  row = task.split("train")[1]
  prompt, answer = row.prompt_ids.size, row.answer_ids.size
  assert prompt < text.bound(rows[1]["prompt"]) and answer == 21
  tasks.from_files(
      train, text=text, max_prompt_tokens=prompt, max_answer_tokens=answer
  )
  with pytest.raises(ValueError, match=f":2: the prompt has {prompt} ids"):
    tasks.from_files(train, text=text, max_prompt_tokens=prompt - 1)
  with pytest.raises(ValueError, match=f":2: an answer has {answer} ids"):
    tasks.from_files(train, text=text, max_answer_tokens=answer - 1)


def test_no_prompt_has_more_ids_than_its_bound():
  text = chat()
  for said in (
      "", "the the", "é 漢字 🙂" * 9, "<|end|>" * 3, "\n\n\t", "in" * 99
  ):
    messages = [{"role": "user", "content": said}] * 3
    assert len(text.prompt(said).ids) <= text.bound(said)
    assert len(text.plain(said).ids) <= text.bound(said)
    assert len(text.conversation(messages).ids) <= text.bound(messages)
    assert text.bound(said) < len(said.encode()) + 60
  with pytest.raises(ValueError, match="has no .'é'."):
    CHARACTERS.bound("é")


def test_a_pretrained_model_says_how_long_prompts_may_be(tmp_path):
  train = write(tmp_path / "rows.jsonl", [{"prompt": "ab " * 2000}] * 2)
  with pytest.raises(ValueError, match="rows.jsonl:1.*more than 4095"):
    tasks.from_files(train, text=chat())


def test_many_rows_are_not_encoded_before_they_are_needed(
    tmp_path, monkeypatch
):
  train = write(tmp_path / "rows.jsonl", numbered(20_000))
  seen = []
  prompt = text_lib.Chat.prompt

  def spy(self, *args):
    seen.append(args)
    return prompt(self, *args)

  monkeypatch.setattr(text_lib.Chat, "prompt", spy)
  task = tasks.from_files(train, text=chat(), max_prompt_tokens=100)
  assert len(task.split("train")) == 20_000 - 256 and len(seen) < 10
  identity.describe(task)
  assert len(seen) < 10


# Identity.


def test_a_run_knows_its_files(tmp_path):
  rows = numbered(600)
  train = write(tmp_path / "rows.jsonl", rows)

  def described(path=train, **settings):
    return identity.describe(tasks.from_files(path, **settings))

  base = described()
  assert described(write(tmp_path / "moved.jsonl", rows)) == base
  assert described(max_prompt_tokens=500) == base
  for at in (0, 333, 599):  # not only among those that a digest looks at
    other = [dict(row) for row in rows]
    other[at]["number"] = -1  # no id depends on it
    found = identity.differences(
        base, described(write(tmp_path / "other.jsonl", other))
    )
    assert {path for path, *_ in found} == {"rows.train", "rows.validation"}
  assert described(raw=True) != base
  assert described(prompt_field="answer") != base
  alone = described(validation=train)
  found = identity.differences(
      alone, described(validation=train, prompt_field="answer")
  )
  assert len(found) == 2 and alone != base


# Mistakes.


GOOD = {"prompt": "Why?"}


@pytest.mark.parametrize(
    "rows,message",
    [
        ([GOOD, '{"prompt": "a"'], ":2 is not JSON: .*one object a line"),
        ([GOOD, "", "[1]"], ":3 must be an object with fields, not a list"),
        ([GOOD, {"question": "a"}], ":2 has no 'prompt'.*question.*prompt_fi"),
        ([GOOD, {"prompt": " "}], ":2: the prompt is empty"),
        ([GOOD, {"prompt": 3}], ":2: the prompt must be a text or a list of"),
        ([GOOD, {"prompt": ["a"]}], ":2: the prompt must be .*one is 'a'"),
        (
            [GOOD, {"messages": [{"role": "assistant", "content": "a"}]}],
            ":2: there is no message to answer",
        ),
        (
            [{"messages": [{"role": "user", "content": "a"}]}] * 2,
            ":1: 1 messages need the chat template",
        ),
        (
            [GOOD | {"id": 1}, GOOD | {"id": "1"}],
            ":2 has the id '1', and so has .*rows.jsonl:1:",
        ),
        ([GOOD | {"id": True}], ":1: id must be text or a number"),
        ([GOOD | {"answer": 3}], ":1: answer must be text, not 3 of type int"),
        ([GOOD | {"chosen": "a"}], ":1 has only one of 'chosen' and"),
        (
            [GOOD | {"chosen": "a", "rejected": "b", "answer": "a"}],
            ":1 has 'chosen' and 'answer'",
        ),
        (
            [GOOD, GOOD | {"chosen": "a", "rejected": "b"}],
            ":1 has no 'chosen' and 'rejected' and .*:2 has",
        ),
        ([GOOD, {"prompt": "caf\u00e9"}], ":2: The character vocabulary has"),
        ([], " has no rows"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, rows, message):
  train = write(tmp_path / "rows.jsonl", rows)
  with pytest.raises(ValueError, match=f"rows.jsonl{message}"):
    tasks.from_files(train)


def test_two_answers_to_messages_are_refused(tmp_path):
  turns = [
      {"role": role, "content": "a"} for role in ("user", "assistant")
  ]
  train = write(tmp_path / "rows.jsonl", [{"prompt": turns, "answer": "b"}] * 2)
  with pytest.raises(ValueError, match=":1 has two answers"):
    tasks.from_files(train, text=chat())
  train = write(tmp_path / "rows.jsonl", [{"prompt": turns}] * 2)
  with pytest.raises(ValueError, match=":1: raw=True.*1 messages"):
    tasks.from_files(train, text=chat(), raw=True)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"train": ""}, "needs rows: name a file"),
        ({"train": "no.jsonl"}, "train='no.jsonl' is not a file"),
        ({"validation": "rows.csv"}, "validation='rows.csv'.*not with '.csv'"),
        ({"test": "bad.parquet"}, "bad.parquet is not a Parquet file"),
        ({"too_long": "skipp"}, "Did you mean 'skip'"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens must be at least 0"),
        ({"workers": 2}, "workers=2.*without a reward"),
        ({"weights": (1.0,)}, "without a reward"),
        ({"rewards": "a"}, "Did you mean 'reward'"),
        ({"reward": "no.py:f"}, "no.py is not a file"),
    ],
)
def test_settings_that_cannot_be(tmp_path, monkeypatch, settings, message):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / "rows.jsonl", numbered(3))
  (tmp_path / "bad.parquet").write_text("PAR1")
  with pytest.raises(ValueError, match=message):
    tasks.from_files(**{"train": "rows.jsonl"} | settings)


def test_a_reward_is_tried_before_training(tmp_path):
  train = write(tmp_path / "rows.jsonl", numbered(3))

  def begins_well(answer, row):
    return answer[0] == "1"

  with pytest.raises(
      ValueError, match="'begins_well' of row 'train-0000001'.*IndexError.*''"
  ):
    tasks.from_files(train, reward=begins_well)


def test_the_prompt_may_have_another_name(tmp_path):
  train = write(tmp_path / "rows.jsonl", [
      {"question": f"{n}?", "prompt": 1} for n in range(2)
  ])
  task = tasks.from_files(train, prompt_field="question")
  row = task.split("train")[0]
  asked = CHARACTERS.prompt(row.details["question"])
  assert row.prompt_ids.tolist() == asked.ids and row.details["prompt"] == 1


def test_prepare_tasks_shows_a_row(tmp_path, capsys):
  config = ml_collections.ConfigDict({
      "task": "file", "model": "", "data_dir": "",
      "file": {"train": write(tmp_path / "rows.jsonl", numbered(20))},
  })
  prepare_tasks.run(config, tmp_path)
  said = capsys.readouterr().out
  assert "file: 18 train, 2 validation rows" in said and "What is" in said


def test_prepared_rows_hold_no_pairs():
  pair = tasks.Example(
      "x", np.ones(2), np.array([4, 2]), "", {}, np.array([5, 2])
  )
  with pytest.raises(ValueError, match="'x' has rejected_ids"):
    tasks.builder.as_row(pair)
