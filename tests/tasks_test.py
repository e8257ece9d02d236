# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks: the same order and rows everywhere, and rewards that cannot lie."""

import copy
import dataclasses
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from branch_replay import tasks
from branch_replay.tasks import arithmetic
from branch_replay.tasks import builder
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from tests.tiny_tasks import CHARACTERS
from tests.tiny_tasks import RETRIEVALS
from tests.tiny_tasks import SMALL
from tests.tiny_tasks import TEMPLATE
from tests.tiny_tasks import chat
from tests.tiny_tasks import equal
from tests.tiny_tasks import rows_of


def toy(score, *, count=7, **changes):
  """A task in memory: prompt [9, i], answer [5, i], stops 2 and 3."""
  rows = [
      task_lib.Example(
          f"toy-{i}", np.array([9, i]), np.array([5, i, 2]), f"5 {i}", {}
      )
      for i in range(10, 10 + count)
  ]
  settings = dict(
      name="toy", vocab_size=40, stop_ids=(2, 3), score=score,
      rows={"train": rows}, verifiable=True,
  )
  return tasks.Task(**(settings | changes))


def exact(example, ids):
  return float(ids == example.answer_ids[:-1].tolist())


# Order and position.


def test_an_epoch_has_every_example_once_and_its_own_order():
  stream = toy(exact).examples("train", seed=3)
  epochs = [[next(stream).id for _ in range(7)] for _ in range(3)]
  assert all(len(set(epoch)) == 7 for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 3
  other = toy(exact).examples("train", seed=4)
  assert [next(other).id for _ in range(7)] != epochs[0]


@pytest.mark.parametrize("stop", (0, 5, 7, 10, 14))
def test_a_stream_goes_on_from_its_position(stop):
  """7 and 14 are exactly the ends of epochs."""
  stream = toy(exact).examples("train", seed=3)
  straight = [next(stream).id for _ in range(20)]
  first = toy(exact).examples("train", seed=3)
  begun = [next(first).id for _ in range(stop)]
  assert first.position == stop
  second = toy(exact).examples("train", seed=3, start=first.position)
  assert begun + [x.id for x in itertools.islice(second, 20 - stop)] == straight


def test_orders_are_those_of_every_machine_and_version():
  """May change only together with a warning that old runs cannot resume."""
  assert splits.permutation(3, 0, 8).tolist() == [0, 1, 2, 7, 5, 6, 4, 3]
  assert splits.permutation(3, 1, 8).tolist() == [5, 6, 3, 7, 0, 1, 2, 4]
  owners = [splits.part_of(0, str(n)) for n in range(12)]
  assert owners.index("validation") == 3 and owners.index("test") == 10
  assert owners.count("train") == 10
  assert splits.generator(0, "a").randrange(10**6) == 978110


def test_cut_divides_without_overlap_or_loss():
  parts = [splits.cut(5, range(25), name) for name in splits.SPLITS]
  assert [len(part) for part in parts] == [21, 2, 2]
  assert sorted(sum(parts, [])) == list(range(25))
  assert sorted(parts[0]) != list(range(21))
  with pytest.raises(ValueError, match="9 items.*at least ten"):
    splits.cut(5, range(9), "test")


def test_splits_and_positions_that_are_not_there():
  with pytest.raises(ValueError, match="'trian'.*Did you mean 'train'"):
    toy(exact).examples("trian", seed=0)
  with pytest.raises(ValueError, match="start=-1"):
    toy(exact).examples("train", seed=0, start=-1)
  with pytest.raises(ValueError, match="no examples in 'train'"):
    toy(exact, rows={"train": []}).examples("train", seed=0)


# Rewards.


@pytest.mark.parametrize(
    "answer,right",
    [
        ([5, 10, 2], 1.0),
        ([5, 10, 3], 1.0),  # any stop id ends an answer
        ([5, 10, 2, 7, 3], 1.0),  # what follows is not part of it
        (jnp.asarray([5, 10, 2]), 1.0),
        ([5, 10], 0.0),  # cut off
        ([5, 2, 10], 0.0),
        ([2], 0.0),
        ([], 0.0),
        ([5, 10, 40, 2], 0.0),  # outside the vocabulary
        ([5, 10, -1, 2], 0.0),
    ],
)
def test_an_answer_ends_with_its_first_stop_id(answer, right):
  task = toy(exact)
  assert task.reward(task.split("train")[0], answer) == right


def test_ids_outside_the_vocabulary_never_reach_the_score():
  task = toy(lambda example, ids: 1.0)
  assert task.reward(task.split("train")[0], [40, 2]) == 0.0


def test_a_reward_is_given_the_sampled_ids_and_not_their_text():
  """Ids [1, 4] and [6] print the same and must not be taken for each other."""
  prints = {1: "a", 4: "b", 6: "ab"}
  seen = []

  def score(example, ids):
    seen.append(ids)
    return float("".join(prints[id_] for id_ in ids) == "ab")

  task = toy(score)
  example = task.split("train")[0]
  assert task.reward(example, [1, 4, 2]) == task.reward(example, [6, 3]) == 1.0
  assert seen == [[1, 4], [6]]


def failing(example, ids):
  return 1 / 0


@pytest.mark.parametrize(
    "score,message",
    [
        (failing, "failed on the ids.*ZeroDivisionError"),
        (lambda *_: float("nan"), "is nan"),
        (lambda *_: float("inf"), "is inf"),
        (lambda *_: None, "must be a number or a bool, not None"),
        (lambda *_: "1", "must be a number or a bool, not '1' of type str"),
        (lambda *_: 1j, "of type complex"),
        (lambda *_: np.ones(1), "of type ndarray"),
    ],
)
def test_a_reward_that_is_no_number_names_task_and_example(score, message):
  task = toy(score)
  with pytest.raises(ValueError, match=f"'toy'.*'toy-10'.*{message}"):
    task.reward(task.split("train")[0], [5, 10, 2])
  with pytest.raises(ValueError, match=f"'toy'.*'toy-10'.*{message}"):
    tasks.check(task)


def test_numpy_scalars_and_integers_are_numbers():
  for value in (1, np.float32(1), np.int64(1), True, np.True_, jnp.ones(())):
    task = toy(lambda *_, value=value: value)
    reward = task.reward(task.split("train")[0], [2])
    assert reward == 1.0 and type(reward) is float


@pytest.mark.parametrize(
    "changes,message",
    [
        ({}, None),
        ({"score": lambda *_: 1.0}, "an empty answer, .2., is 1.0"),
        ({"score": lambda _, ids: float(len(ids) > 0)}, "a meaningless answer"),
        ({"score": lambda *_: 0.0}, "its own answer.*is 0.0; it must be 1.0"),
        ({"stop_ids": ()}, "needs stop ids"),
        ({"stop_ids": (2, 99)}, "needs stop ids inside its vocabulary of 40"),
        ({"stop_ids": (3,)}, "must end with a stop id"),
        ({"stop_ids": (2, 5)}, "have no other"),
        ({"vocab_size": 10}, "prompt_ids must be ids below 10"),
        ({"vocab_size": 4}, "must be ids below 4"),
    ],
)
def test_check(changes, message):
  task = toy(**{"score": exact} | changes)
  if message is None:
    tasks.check(task)
    return
  with pytest.raises(ValueError, match=f"'?toy'?.*{message}"):
    tasks.check(task)


@pytest.mark.parametrize("score", [
    lambda _, ids: -0.01 * len(ids),  # a length penalty
    lambda _, ids: len(ids) > 1,
    lambda *_: 1e30,
])
def test_any_number_is_a_reward_and_answers_need_not_be_known(score):
  rows = [task_lib.Example(f"asked-{i}", np.array([9, i])) for i in (10, 11)]
  task = toy(score, rows={"train": rows}, verifiable=False)
  tasks.check(task)
  assert task.reward(rows[0], [5, 6, 2]) == float(score(rows[0], [5, 6]))
  with pytest.raises(ValueError, match="stop ids inside"):
    tasks.check(dataclasses.replace(task, stop_ids=(99,)))


def test_an_answer_that_was_cut_off_is_scored_as_it_stands():
  """Unless the task says that only one that stops can be right."""
  task = toy(lambda _, ids: len(ids) / 4, verifiable=False)
  row = task.split("train")[0]
  assert task.reward(row, [5, 6, 7]) == 0.75
  assert task.reward(row, [5, 6, 7, 2]) == 0.75
  assert dataclasses.replace(task, verifiable=True).reward(row, [5, 6]) == 0.0


# Text.


def test_characters_are_written_one_by_one():
  printable = "".join(map(chr, range(32, 127))) + "\n"
  ids = CHARACTERS.encode(printable)
  assert CHARACTERS.decode(ids) == printable
  assert sorted(ids) == list(range(4, 100)) and CHARACTERS.vocab_size == 100
  assert CHARACTERS.decode([0, 1, 2, 3]) == "\ufffd" * 4
  with pytest.raises(ValueError, match="has no .'é'."):
    CHARACTERS.encode("caf\u00e9")


def test_special_tokens_and_unknown_ids_break_a_number():
  text = chat()
  first, second = text.encode("48"), text.encode("21")
  assert text.decode(first + second) == "4821"
  start = text.pretrained.tokenizer.convert_tokens_to_ids("<|start|>")
  assert text.decode([*first, start, *second]) == "48<|start|>21"
  assert "4821" not in text.decode([*first, 299, *second])


def test_a_chat_is_framed_by_the_template():
  text = chat()
  assert text.decode(text.prompt("Why?", "Because.").ids) == (
      "<|start|>user\nBecause.\n\nWhy?<|end|>\n<|start|>assistant\n"
  )
  prompt = text.prompt("Why?")
  assert text.decode(prompt.ids) == (
      "<|start|>user\nWhy?<|end|>\n<|start|>assistant\n"
  )
  assert text.decode(text.answer(prompt, "12")) == "12<|end|>"
  plain = without_template(text.pretrained)
  assert text.decode(tasks.Chat(plain).prompt("Why?").ids) == "Why?"
  with pytest.raises(ValueError, match="no tokenizer or no stop ids"):
    tasks.Chat(dataclasses.replace(plain, stop_ids=()))


def without_template(pretrained, template=None):
  tokenizer = copy.deepcopy(pretrained.tokenizer)
  tokenizer.chat_template = template
  return dataclasses.replace(pretrained, tokenizer=tokenizer)


def test_places_of_a_document_are_found_among_the_ids():
  document = "the cat  in\nthe\u00e9 hat"
  for text in (chat(), tasks.Chat(without_template(chat().pretrained))):
    prompt = text.prompt("Why?", document)
    for at in range(len(document)):
      before = text.decode(prompt.ids[: prompt.position(at)])
      after = text.decode(prompt.ids[: prompt.position(at) + 1])
      whole = text.decode(prompt.ids)
      start = whole.index(document)
      assert len(before.rstrip("\ufffd")) <= start + at < len(after)


# On disk.


def prepared(tmp_path) -> list[pathlib.Path]:
  """Folders that hold, or seem to hold, prepared rows."""
  return [path.parent for path in tmp_path.glob("*/*/*/dataset_info.json")]


def test_what_is_read_is_what_was_made(tmp_path):
  for recipe, text in (
      (RETRIEVALS["chat"]), (tasks.recipe("arithmetic", **SMALL), CHARACTERS)
  ):
    task = tasks.prepare(recipe, text=text, data_dir=tmp_path)
    again = tasks.load(recipe, text=text, data_dir=tmp_path)
    for split, rows in rows_of(recipe, text).items():
      for read in (task.split(split), again.split(split)):
        assert len(read) == len(rows) and all(map(equal, read, rows))
    row = task.split("train")[-1]
    assert row.prompt_ids.dtype == np.int32 and isinstance(row.id, str)
    assert task.vocab_size == text.vocab_size
    assert task.stop_ids == text.stop_ids


def blocked(folder: pathlib.Path) -> pathlib.Path:
  """Modules that keep a process from TensorFlow and from the network."""
  (folder / "tensorflow.py").write_text("raise ImportError('blocked')\n")
  (folder / "sitecustomize.py").write_text(
      "import socket\n"
      "def refuse(*args): raise OSError('blocked')\n"
      "socket.socket.connect = refuse\n"
  )
  return folder


def test_the_command_of_the_message_prepares_the_same_rows_elsewhere(tmp_path):
  """Another process, its strings hashed otherwise, alone with its disk."""
  settings = SMALL | {"code_length": 3, "fact": "Item {name} has {code}."}
  recipe = tasks.recipe("retrieval", **settings)
  with pytest.raises(ValueError, match="has not been prepared") as caught:
    tasks.load(recipe, data_dir=tmp_path / "data")
  command = re.search("Run: (python -m .*)", str(caught.value)).group(1)
  away = tmp_path / "blocked"
  away.mkdir()
  root = pathlib.Path(tasks.__file__).parents[2]
  path = os.pathsep.join([str(blocked(away)), str(root), *sys.path])
  subprocess.run(
      [sys.executable, *shlex.split(command)[1:]],
      check=True, cwd=root, capture_output=True,
      env=os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": path},
  )
  task = tasks.load(recipe, data_dir=tmp_path / "data")
  for split, rows in rows_of(recipe).items():
    assert all(map(equal, task.split(split), rows))


def test_another_recipe_never_reads_old_rows(tmp_path):
  document = tmp_path / "document.txt"
  document.write_text("\n\n".join(f"{n} birds on a wire." for n in range(900)))
  base = tasks.recipe("retrieval", document=str(document), **SMALL)
  tasks.prepare(base, data_dir=tmp_path)
  for change in (
      {"seed": 1}, {"distractors": 2}, {"test": 5}, {"max_depth": 0.9}
  ):
    with pytest.raises(ValueError, match="has not been prepared"):
      tasks.load(dataclasses.replace(base, **change), data_dir=tmp_path)
  with pytest.raises(ValueError, match="config.model=MODEL"):
    tasks.load(base, text=chat(), data_dir=tmp_path)
  tasks.load(base, data_dir=tmp_path)
  document.write_text(document.read_text() + "\n\nAnd one more.")
  with pytest.raises(ValueError, match="has not been prepared"):
    tasks.load(base, data_dir=tmp_path)
  assert len(prepared(tmp_path)) == 1


def test_a_digest_is_the_same_on_every_machine():
  """May change only with the meaning of a recipe, or rows are made anew."""
  digest = builder.digest(tasks.recipe("arithmetic"), CHARACTERS)
  assert digest == "c505c747f94aff74"
  other = without_template(chat().pretrained, TEMPLATE + " ")
  recipe = tasks.recipe("arithmetic")
  assert builder.digest(recipe, chat()) != builder.digest(
      recipe, tasks.Chat(other)
  )


def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch):
  recipe = tasks.recipe("arithmetic", **SMALL)
  rows = arithmetic.Arithmetic.rows

  def interrupted(self, text, split):
    for at, row in enumerate(rows(self, text, split)):
      if split == "test" and at == 2:
        raise KeyboardInterrupt
      yield row

  monkeypatch.setattr(arithmetic.Arithmetic, "rows", interrupted)
  with pytest.raises(KeyboardInterrupt):
    tasks.prepare(recipe, data_dir=tmp_path)
  assert not prepared(tmp_path)
  with pytest.raises(ValueError, match="has not been prepared"):
    tasks.load(recipe, data_dir=tmp_path)
  monkeypatch.undo()
  # As a process that was killed leaves it.
  folder = builder.rows_builder(recipe, CHARACTERS, tmp_path).data_path
  killed = folder.parent / f"incomplete.AB12CD_{folder.name}"
  killed.mkdir(parents=True)
  (killed / "arithmetic-train.array_record-00000-of-00001").write_bytes(b"?")
  with pytest.raises(ValueError, match="has not been prepared"):
    tasks.load(recipe, data_dir=tmp_path)
  assert len(tasks.prepare(recipe, data_dir=tmp_path).split("test")) == 4


def test_rows_that_went_missing_are_missed(tmp_path):
  recipe = tasks.recipe("arithmetic", **SMALL)
  tasks.prepare(recipe, data_dir=tmp_path)
  (folder,) = prepared(tmp_path)
  next(folder.glob("*validation*")).unlink()
  with pytest.raises(ValueError, match="does not hold the 4 rows of 'valid"):
    tasks.load(recipe, data_dir=tmp_path)


def test_a_wrong_reward_is_neither_written_nor_trained_on(
    tmp_path, monkeypatch
):
  good, other = (tasks.recipe("arithmetic", seed=x, **SMALL) for x in (0, 1))
  tasks.prepare(good, data_dir=tmp_path)
  monkeypatch.setattr(
      arithmetic.Arithmetic, "scorer", lambda self, text: lambda *_: 0.5
  )
  for attempt, recipe in ((tasks.prepare, other), (tasks.load, good)):
    with pytest.raises(ValueError, match="its own answer.*is 0.5"):
      attempt(recipe, data_dir=tmp_path)
  assert len(prepared(tmp_path)) == 1


def test_names_that_are_not_there():
  with pytest.raises(ValueError, match="'retreival'. Did you mean 'retrieval'"):
    tasks.recipe("retreival")
  with pytest.raises(ValueError, match="Did you mean 'distractors'"):
    tasks.recipe("retrieval", distractor=3)
