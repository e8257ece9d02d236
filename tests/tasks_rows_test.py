# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of every task: right, of the length asked for, and without leaks."""

import itertools
import re
import sys
import types

import numpy as np
import pytest

from branch_replay import tasks
from branch_replay.tasks import arithmetic
from branch_replay.tasks import documents
from branch_replay.tasks import reasoning_gym
from branch_replay.tasks import splits
from branch_replay.tasks import task as task_lib
from tests import weights_gguf_test
from tests.tiny_tasks import CHARACTERS
from tests.tiny_tasks import RETRIEVALS
from tests.tiny_tasks import SMALL
from tests.tiny_tasks import chat
from tests.tiny_tasks import equal
from tests.tiny_tasks import reward_of
from tests.tiny_tasks import rows_of

# Retrieval.


@pytest.mark.parametrize("kind", RETRIEVALS)
def test_a_prompt_has_its_length_and_its_facts(kind):
  recipe, text = RETRIEVALS[kind]
  rows = sum(rows_of(recipe, text).values(), [])
  for row in rows:
    assert row.prompt_ids.shape == (recipe.prompt_tokens,)
    said = text.decode(row.prompt_ids.tolist())
    facts = row.details["facts"]
    assert len(facts) == len(set(facts.values())) == recipe.distractors + 1
    for name, code in facts.items():
      fact = recipe.fact.format(name=name, code=code)
      assert said.count(f"\n{fact}\n") == 1
      lead = fact[: fact.index(code)]
      asks_by_lead = text is CHARACTERS and name == row.details["name"]
      assert said.count(lead) == 1 + asks_by_lead
    assert row.answer == facts[row.details["name"]]
    after = text.decode(row.prompt_ids[row.details["position"]:].tolist())
    fact = recipe.fact.format(name=row.details["name"], code=row.answer)
    assert after.startswith(f"\n{fact}\n")
    own = text.decode(row.answer_ids.tolist()[:-1])
    end = text.decode(row.answer_ids.tolist()[-1:])
    assert own == row.answer
    assert end == ("\ufffd" if text is CHARACTERS else "<|end|>")
  assert len({row.prompt_ids.tobytes() for row in rows}) == len(rows)
  assert len({row.id for row in rows}) == len(rows) == 20


def test_the_fact_lies_in_the_range_of_depths_and_words_are_not_cut():
  recipe = tasks.recipe(
      "retrieval", min_depth=0.4, max_depth=0.6, **SMALL | {"train": 40}
  )
  rows = rows_of(recipe)["train"]
  depths = [row.details["depth"] for row in rows]
  # Steps back to the start of a word; most words are shorter than a tenth.
  assert 0.3 < min(depths) < 0.46 and 0.54 < max(depths) <= 0.6
  for row in rows:
    before = CHARACTERS.decode(row.prompt_ids.tolist())
    before = before[: row.details["position"]]
    after = CHARACTERS.decode(row.prompt_ids.tolist())[
        row.details["position"] + len("\nThe access code of the . is 1234\n")
        + len(row.details["name"]):
    ]
    assert before[-1].isspace() or after[0].isspace()


def test_no_fact_and_no_passage_is_in_two_splits(tmp_path):
  """The document is so short that any two rows of a split share a passage."""
  document = tmp_path / "document.txt"
  document.write_text("\n\n".join(f"<{n:05d}> passed." for n in range(1000)))
  recipe = tasks.recipe(
      "retrieval", document=str(document), prompt_tokens=400, train=80,
      validation=20, test=20,
  )
  facts, passages = {}, {}
  for split, rows in rows_of(recipe).items():
    facts[split] = [set(row.details["facts"].values()) for row in rows]
    said = [CHARACTERS.decode(row.prompt_ids.tolist()) for row in rows]
    passages[split] = [set(re.findall(r"<\d{5}>", text)) for text in said]
    assert min(map(len, passages[split])) >= 5
  for found in (facts, passages):
    everything = {split: set.union(*of) for split, of in found.items()}
    for one, other in itertools.combinations(splits.SPLITS, 2):
      assert not everything[one] & everything[other]
    for of in found.values():
      assert sum(map(len, of)) > len(set.union(*of))


def test_a_document_that_would_answer_for_the_fact_is_refused(tmp_path):
  document = tmp_path / "document.txt"
  recipe = tasks.recipe(
      "retrieval", document=str(document), naming="letters",
      fact="{name}{code}", prompt_tokens=100, **SMALL,
  )
  document.write_text("\n\n".join(f"{n} birds" for n in range(1000)))
  rows_of(recipe)
  alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
  document.write_text("\n\n".join(f"{n} {alphabet}" for n in range(1000)))
  with pytest.raises(ValueError, match="without a fact of the form"):
    rows_of(recipe)


def test_paragraphs_belong_to_one_split_each():
  licence = "Licence\twith \u00e9."
  text = tuple(f"Paragraph {n}.\n\n{licence}\n\n" for n in range(40))
  parts = [documents.divide(text, seed=1, split=x) for x in splits.SPLITS]
  paragraphs = [part.split("\n\n") for part in parts]
  kept = sum(paragraphs, [])
  assert len(kept) == len(set(kept)) == 41
  assert kept.count("Licence with ?.") == 1
  assert all(len(part) >= 3 for part in paragraphs)
  assert documents.divide(text, seed=2, split="test") != parts[2]
  with pytest.raises(ValueError, match="document=FILE"):
    documents.divide(("One single paragraph.",), seed=0, split="test")


@pytest.mark.parametrize("kind", ("retrieval", "arithmetic"))
def test_more_rows_leave_the_first_ones_as_they_are(kind):
  few = rows_of(tasks.recipe(kind, **SMALL))
  many = rows_of(tasks.recipe(kind, train=15, validation=5, test=5))
  for split in splits.SPLITS:
    assert all(map(equal, few[split], many[split]))
  other = rows_of(tasks.recipe(kind, seed=1, **SMALL))
  assert not equal(few["train"][0], other["train"][0])


@pytest.mark.parametrize(
    "said,right",
    [
        ("{}", 1.0),
        ("The code is {}.", 1.0),
        ("**{}**", 1.0),
        ("In 2 words: {}, yes {}", 1.0),
        ("{} or {other}", 0.0),
        ("{other}", 0.0),
        ("{}0", 0.0),
        ("1{}", 0.0),
        ("{}.5", 0.0),
        ("3,{}", 0.0),
        ("A{}", 0.0),
        ("none", 0.0),
    ],
)
def test_in_a_chat_the_code_must_be_the_only_number_of_its_length(said, right):
  recipe, text = RETRIEVALS["chat"]
  row = next(recipe.rows(text, "train"))
  other = str((int(row.answer) + 1) % 10_000).zfill(4)
  said = said.format(*[row.answer] * 2, other=other)
  assert reward_of(recipe, row, said, text) == right


def test_in_characters_the_answer_is_the_code_alone():
  recipe, text = RETRIEVALS["characters"]
  row = next(recipe.rows(text, "train"))
  assert reward_of(recipe, row, row.answer) == 1.0
  for said in (f"{row.answer} ", row.answer[:-1], row.answer + "0", "0000"):
    assert reward_of(recipe, row, said) == 0.0
  broken = [*row.answer_ids[:2], 0, *row.answer_ids[2:]]
  assert recipe.task(text, {}).reward(row, broken) == 0.0


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"prompt_tokens": 100}, "prompt_tokens=100 leave no room"),
        ({"prompt_tokens": 10**7}, "shorten prompt_tokens=10000000"),
        ({"distractors": 26}, "distractors=26 need more names=26"),
        ({"names": 27, "naming": "letters"}, "has 26 of them"),
        ({"naming": "word"}, "'word'. Did you mean 'words'"),
        ({"haystack": "texts"}, "Did you mean 'text'"),
        ({"min_depth": 0.6, "max_depth": 0.5}, "min_depth=0.6"),
        ({"code_length": 1, "code_symbols": 9}, "give 9 codes"),
        ({"code_length": 7}, "give 10000000 codes"),
        ({"code_length": 1}, "'validation' split has 1 codes"),
        ({"fact": "{code} opens {name}"}, "needs {name} and then {code}"),
        ({"question": "Which?"}, "question='Which.' needs {name}"),
        ({"document": "no/such"}, "'no/such' is not a file"),
        ({"test": 0}, "test=0 rows"),
    ],
)
def test_retrievals_that_cannot_be(settings, message):
  with pytest.raises(ValueError, match=message):
    rows_of(tasks.recipe("retrieval", **SMALL | settings))


def test_a_real_model_is_asked_in_its_own_chat():
  text = tasks.Chat(weights_gguf_test.smollm2())  # loaded once for both
  recipe = tasks.recipe("retrieval", prompt_tokens=300, **SMALL)
  row = next(recipe.rows(text, "train"))
  said = text.decode(row.prompt_ids.tolist())
  assert len(row.prompt_ids) == 300
  assert said.endswith(
      f"\n\nWhat is the access code of the {row.details['name']}? Answer with "
      "the code alone.<|im_end|>\n<|im_start|>assistant\n"
  )
  assert f"of the {row.details['name']} is {row.answer}." in said
  assert reward_of(recipe, row, f"It is {row.answer}.", text) == 1.0
  assert row.answer_ids[-1] in text.stop_ids
  task_lib.check_example(recipe.task(text, {}), row)


# Arithmetic.


def problems(row):
  """Every problem of a row, whichever way round it is written."""
  shown = [*row.details["examples"], row.details["problem"]]
  return {arithmetic.canonical(*problem) for problem in shown}


def test_worked_examples_are_right_and_the_question_is_not_among_them():
  recipe = tasks.recipe("arithmetic", operations="+-*", max_digits=3, **SMALL)
  for row in sum(rows_of(recipe).values(), []):
    *shown, asked = CHARACTERS.decode(row.prompt_ids.tolist())[1:].split("\n")
    assert len(shown) == 8 and len(problems(row)) == 9
    for line in shown:
      problem, result = line.split("=")
      assert eval(problem) == int(result)
    assert asked[0] == "\ufffd"
    assert eval(asked[1:].rstrip("=")) == int(row.answer)


def test_no_problem_is_in_two_splits_even_turned_round():
  recipe = tasks.recipe("arithmetic", train=100, validation=30, test=30)
  found = {
      split: set.union(*map(problems, rows))
      for split, rows in rows_of(recipe).items()
  }
  for one, other in itertools.combinations(splits.SPLITS, 2):
    assert not found[one] & found[other]
  assert arithmetic.canonical(7, "+", 2) == arithmetic.canonical(2, "+", 7)
  assert arithmetic.canonical(7, "-", 2) != arithmetic.canonical(2, "-", 7)


def test_arithmetic_is_exact():
  recipe = tasks.recipe("arithmetic", **SMALL)
  row = task_lib.Example("x", np.ones(1), np.ones(1), "-12", {})
  for text in (CHARACTERS, chat()):
    for said, right in (
        ("-12", 1.0), (" -12\n", 1.0), ("12", 0.0), ("-12.0", 0.0),
        ("-12 -12", 0.0), ("7-19=-12", 0.0),
    ):
      assert reward_of(recipe, row, said, text) == right, said


def test_operands_have_the_digits_asked_for():
  recipe = tasks.recipe("arithmetic", min_digits=2, max_digits=3, **SMALL)
  rows = rows_of(recipe)["train"]
  operands = [abs(row.details["problem"][at]) for row in rows for at in (0, 2)]
  assert {len(str(operand)) for operand in operands} == {2, 3}


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"operations": "+/"}, "operations='\\+/'"),
        ({"operations": "++"}, "once each"),
        ({"operations": ""}, "operations=''"),
        ({"min_digits": 3}, "min_digits=3, max_digits=2"),
        ({"max_digits": 1, "examples": 60}, "too few problems"),
    ],
)
def test_arithmetic_that_cannot_be(settings, message):
  with pytest.raises(ValueError, match=message):
    rows_of(tasks.recipe("arithmetic", **SMALL | settings))


# reasoning-gym.


class Gym:
  """As much of reasoning-gym as the adapter uses; every question comes twice.

  Its scorer is as lenient as many there: a half for any text with the answer
  in it, a hundredth for any other, and it fails on what is not a number.
  """

  answer = staticmethod(str)

  def __init__(self, size, seed, **parameters):
    self.size, self.offset = size, seed + parameters.get("offset", 0)

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    number = index // 2 + self.offset
    return {
        "question": f"How many are {number} and 1?\n",
        "answer": self.answer(number + 1),
        "metadata": {"pair": [number, 1]},
    }

  def score_answer(self, answer, entry):
    right = sum(entry["metadata"]["pair"])
    if int(answer.split()[0]) == right and answer == str(right):
      return 1.0
    return 0.5 if str(right) in answer else 0.01


@pytest.fixture
def gym(monkeypatch):
  """A stand-in for the package, which is not installed by default."""

  def create_dataset(name, **settings):
    return Gym(**settings)

  module = types.SimpleNamespace(
      factory=types.SimpleNamespace(DATASETS={"counting": None}),
      create_dataset=create_dataset,
  )
  monkeypatch.setattr(reasoning_gym, "package", lambda: module)


def test_reasoning_gym_asks_no_question_twice(gym):
  recipe = tasks.recipe("reasoning_gym", dataset="counting", **SMALL)
  rows = rows_of(recipe)
  assert [len(rows[split]) for split in splits.SPLITS] == [12, 4, 4]
  asked = [row.prompt_ids.tobytes() for of in rows.values() for row in of]
  assert len(set(asked)) == len(asked)
  row = rows["train"][0]
  assert CHARACTERS.decode(row.prompt_ids.tolist()).endswith("and 1?")
  task_lib.check_example(recipe.task(CHARACTERS, {}), row)


def test_reasoning_gym_gives_full_marks_or_nothing(gym):
  recipe = tasks.recipe("reasoning_gym", dataset="counting", **SMALL)
  row = next(recipe.rows(CHARACTERS, "train"))
  for said, right in (
      (row.answer, 1.0), (f" {row.answer}\n", 1.0), ("0", 0.0),
      (f"{row.answer} {row.answer}", 0.0), ("no number", 0.0),
  ):
    assert reward_of(recipe, row, said) == right, said


def test_solved_questions_of_reasoning_gym_stand_before_every_question(gym):
  text = chat()
  recipe = tasks.recipe("reasoning_gym", dataset="counting", shots=2, **SMALL)
  for rows in rows_of(recipe, text).values():
    for row in rows:
      shots = [
          {"role": "user", "content": "How many are 0 and 1?"},
          {"role": "assistant", "content": "1"},
          {"role": "user", "content": "How many are 1 and 1?"},
          {"role": "assistant", "content": "2"},
      ]
      asked = {"role": "user", "content": row.details["question"].strip()}
      assert asked not in shots, "shots are in no split"
      wanted = text.conversation([*shots, asked]).ids
      assert row.prompt_ids.tolist() == wanted
  with pytest.raises(ValueError, match="chat template"):
    rows_of(recipe, CHARACTERS)
  with pytest.raises(ValueError, match="shots"):
    rows_of(
        tasks.recipe("reasoning_gym", dataset="counting", shots=-1, **SMALL),
        text,
    )


def test_reasoning_gym_that_cannot_be(gym, monkeypatch):
  def of(**settings):
    return tasks.recipe(
        "reasoning_gym", **SMALL | {"dataset": "counting"} | settings
    )

  with pytest.raises(ValueError, match="'countin'.*Did you mean 'counting'"):
    rows_of(of(dataset="countin"))
  with pytest.raises(ValueError, match="refused parameters='{'"):
    rows_of(of(parameters="{"))
  monkeypatch.setattr(Gym, "__len__", lambda self: 20)
  with pytest.raises(ValueError, match="different questions to the 'train'"):
    rows_of(of())
  monkeypatch.setattr(Gym, "answer", lambda self, number: None)
  with pytest.raises(ValueError, match="no single answer"):
    rows_of(of())


def test_without_reasoning_gym_one_is_told_what_to_install(
    monkeypatch, tmp_path
):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  monkeypatch.setattr(
      reasoning_gym, "package", reasoning_gym.package.__wrapped__
  )
  with pytest.raises(ValueError, match=r'pip install .*".\[reasoning\]"'):
    tasks.prepare(tasks.recipe("reasoning_gym"), data_dir=tmp_path)


@pytest.mark.parametrize("dataset", ("leg_counting", "word_sorting"))
def test_the_real_reasoning_gym(dataset, tmp_path):
  pytest.importorskip("reasoning_gym", reason="the extra [reasoning]")
  recipe = tasks.recipe("reasoning_gym", dataset=dataset, **SMALL)
  task = tasks.prepare(recipe, data_dir=tmp_path)
  for split, rows in rows_of(recipe).items():
    assert all(map(equal, rows, task.split(split)))
  row = task.split("test")[0]
  assert reward_of(recipe, row, row.answer * 2) == 0.0


@pytest.mark.parametrize(
    "dataset,message",
    [
        ("graph_color", "no single answer"),
        ("arc_agi", "the reward of its own answer"),  # tuples, not JSON
        ("game_of_life_halting", "a meaningless answer"),
    ],
)
def test_unverifiable_data_sets_of_reasoning_gym(dataset, message, tmp_path):
  pytest.importorskip("reasoning_gym", reason="the extra [reasoning]")
  recipe = tasks.recipe("reasoning_gym", dataset=dataset, **SMALL)
  with pytest.raises(ValueError, match=message):
    tasks.prepare(recipe, data_dir=tmp_path)
