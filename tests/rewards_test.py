# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Rewards from files: loaded, added up, limited in time, and never silent."""

import dataclasses
import os
import pathlib
import time

import jax
import numpy as np
import pytest

from branch_replay import tasks
from branch_replay.tasks import rewards
from branch_replay.training import experience
from branch_replay.training import identity
from branch_replay.training import phases
from tests import tiny
from tests.tiny_tasks import CHARACTERS

SOURCE = """
import os
import signal
import sys
import time

LIMIT = 4.0


def exact(answer, row):
  return answer == row["answer"]


def short(answer, row):
  return -len(answer) / LIMIT


def changes(answer, row):
  row["list"].append(answer)
  return len(row["list"])


def fails(answer, row):
  return 1 / len(answer)


def leaves(answer, row):
  if answer == "exit":
    sys.exit("enough")
  os._exit(3)


def waits(answer, row):
  with open(row["pids"], "a") as file:
    file.write(f"{os.getpid()}\\n")
  while answer == "wait":
    pass
  return len(answer)


def interrupted(answer, row):
  os.kill(os.getpid(), signal.SIGINT)
  os.kill(os.getpid(), signal.SIGTERM)
  return 1


def sleeps(answer, row):
  time.sleep(60)


def says(answer, row):
  return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1",
          "list": [1], "huge": 10**400, "true": True, "int": 3}[answer]


def modules(answer, row):
  return "jax" in sys.modules or "branch_replay" in sys.modules


def together(answer, row):
  open(os.path.join(row["folder"], str(os.getpid())), "w").close()
  while len(os.listdir(row["folder"])) < 3:
    time.sleep(0.01)
  return 1


def one(answer):
  return 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  path = tmp_path_factory.mktemp("rewards") / "reward.py"
  path.write_text(SOURCE)
  return path


def example(**fields):
  return tasks.Example("row-7", np.array([1, 3, 4]), details=fields)


def scored(reward, answers, *, row=None, **settings):
  """What answers, given as text, earn."""
  made = rewards.create(reward, text=CHARACTERS, **settings)
  ids = [CHARACTERS.encode(answer) for answer in answers]
  return made.scores(example(**(row or {})), ids)


HERE_AND_THERE = pytest.mark.parametrize("workers", (0, 2))


@HERE_AND_THERE
def test_rewards_are_added_up_by_weight(file, workers):
  found = scored(
      f"{file}:exact, {file}:short", ["ab", "abcd", ""], row={"answer": "ab"},
      weights=(2, 0.5), workers=workers,
  )
  assert [one.value for one in found] == [2 - 0.25, -0.5, 0.0]
  assert [one.parts for one in found] == [(1.0, -0.5), (0.0, -1.0), (0.0, 0.0)]
  (alone,) = scored(f"{file}:short", ["ab"], weights=[3], workers=workers)
  assert alone == (-1.5, ())


@HERE_AND_THERE
def test_a_row_stays_as_it_is(file, workers):
  row = {"list": []}
  found = scored(f"{file}:changes", ["a", "b"], row=row, workers=workers)
  assert [one.value for one in found] == [1, 1] and row == {"list": []}


def test_functions_are_rewards_too():
  def length(answer, row):
    return len(answer) + row["more"]

  class Half:

    def __call__(self, answer, row):
      return 0.5

  (found,) = scored([length, Half()], ["abc"], row={"more": 1})
  assert found == (4.5, (4.0, 0.5))
  with pytest.raises(ValueError, match="length.*given as functions"):
    scored(length, [], workers=1)
  with pytest.raises(ValueError, match="named length, length"):
    scored([length, length], [])


@HERE_AND_THERE
@pytest.mark.parametrize(
    "answer,message",
    [
        ("nan", "is nan for the answer 'nan'"),
        ("inf", "is inf for the answer 'inf'"),
        ("none", "must be a number or a bool, not None of type NoneType"),
        ("text", "must be a number or a bool, not '1' of type str"),
        ("list", r"must be a number or a bool, not \[1\] of type list"),
        ("huge", "answer"),
    ],
)
def test_what_is_no_number_names_row_and_answer(file, answer, message, workers):
  with pytest.raises(ValueError, match=f"'says' of row 'row-7'.*{message}"):
    scored(f"{file}:says", ["int", answer], workers=workers)
  values = scored(f"{file}:says", ["true", "int"], workers=workers)
  assert [one.value for one in values] == [1.0, 3.0]


@HERE_AND_THERE
def test_one_that_raises_names_row_and_answer_and_keeps_the_traceback(
    file, workers
):
  with pytest.raises(
      ValueError, match="'fails' of row 'row-7' failed: ZeroDivisionError.*''"
  ) as caught:
    scored(f"{file}:fails", ["ab", ""], workers=workers)
  cause = caught.value.__cause__
  if workers:
    assert "return 1 / len(answer)" in str(cause) and "reward.py" in str(cause)
  else:
    assert isinstance(cause, ZeroDivisionError)
    assert cause.__traceback__.tb_next.tb_frame.f_code.co_name == "fails"
  with pytest.raises(ValueError, match="SystemExit: enough"):
    scored(f"{file}:leaves", ["exit"], workers=workers)


def test_a_process_that_ends_is_named_and_replaced(file):
  with pytest.raises(ValueError, match="'leaves' of row.*with status 3"):
    scored(f"{file}:leaves", ["gone"], workers=1)
  with pytest.raises(ValueError, match="with status 3"):
    scored(f"{file}:leaves", ["gone", "gone"], workers=1)


@pytest.mark.parametrize("name,answer", [("waits", "wait"), ("sleeps", "")])
def test_one_that_hangs_is_stopped(file, tmp_path, name, answer):
  pids = tmp_path / "pids"
  limited = dict(timeout=0.3, workers=2, row={"pids": str(pids)})
  start = time.monotonic()
  with pytest.raises(
      ValueError, match=f"'{name}' of row 'row-7' took more than timeout=0.3"
  ):
    scored(f"{file}:{name}", [answer], **limited)
  assert time.monotonic() - start < 10
  if name == "waits":
    found = scored(
        f"{file}:waits", ["a", "wait", "abc", "wait", "abcd"],
        timeout_reward=-2, **limited,
    )
    assert [one.value for one in found] == [1, -2, 3, -2, 4]
    assert len(set(pids.read_text().split())) > 3
    assert sum(map(alive, set(pids.read_text().split()))) <= 2  # wait
    limited |= dict(timeout=5.0, workers=0)  # a process all the same
    assert scored(f"{file}:waits", ["ab"], **limited)[0].value == 2
    assert int(pids.read_text().split()[-1]) != os.getpid()


def alive(pid: str) -> bool:
  try:
    os.kill(int(pid), 0)
  except ProcessLookupError:
    return False
  return True


def test_signals_to_all_processes_leave_rewards_alone(file):
  """They ask the trainer to finish its step, for which it needs rewards."""
  found = scored(f"{file}:interrupted", ["a", "b"], workers=1)
  assert [one.value for one in found] == [1, 1]


def test_processes_score_side_by_side_and_load_nothing_else(file, tmp_path):
  """Each of three calls returns once three processes are there."""
  found = scored(
      f"{file}:together", ["a"] * 3, row={"folder": str(tmp_path)}, workers=3,
      timeout=60,
  )
  assert [one.value for one in found] == [1, 1, 1]
  (found,) = scored(f"{file}:modules", ["a"], workers=1)
  assert found.value == 0


def test_a_file_that_is_changed_changes_no_reward_that_runs(tmp_path):
  path = tmp_path / "reward.py"
  path.write_text("import beside\ndef f(answer, row): return beside.VALUE\n")
  (tmp_path / "beside.py").write_text("VALUE = 5\n")
  made = rewards.create(f"{path}:f", text=CHARACTERS, workers=1)
  path.write_text("def f(answer, row): return 6\n")
  assert made.scores(example(), [[4]])[0].value == 5
  other = rewards.create(f"{path}:f", text=CHARACTERS, workers=1)
  assert other.scores(example(), [[4]])[0].value == 6


@pytest.mark.parametrize(
    "name,message",
    [
        ("rewards.py:exact", "is not a file. Did you mean 'reward.py'"),
        ("reward.py:exakt", "no function 'exakt'. Did you mean 'exact'"),
        ("reward.py", "must be FILE.py:FUNCTION"),
        ("reward.py:one", r"takes \(answer\), and is called with"),
        ("broken.py:f", "failed when it was loaded: NameError"),
        ("reward.py:exact, ", "must be FILE.py:FUNCTION"),
    ],
)
def test_rewards_that_are_not_there(file, monkeypatch, name, message):
  monkeypatch.chdir(file.parent)
  pathlib.Path("broken.py").write_text("unknown\n")
  with pytest.raises(ValueError, match=message):
    rewards.create(name, text=CHARACTERS)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"weights": (1, 2)}, r"weights=\(1, 2\) for 1 rewards"),
        ({"weights": (float("nan"),)}, "weights must be finite"),
        ({"timeout_reward": 0}, "timeout_reward=0 without a limit"),
        ({"timeout": -1}, "timeout must be ≥ 0"),
        ({"workers": -1}, "workers must be at least 0"),
        ({"timeout": 1, "timeout_reward": float("inf")}, "must be finite"),
    ],
)
def test_settings_that_cannot_be(file, settings, message):
  with pytest.raises(ValueError, match=message):
    rewards.create(f"{file}:exact", text=CHARACTERS, **settings)


def test_names_of_parts_differ(tmp_path):
  for name in ("a", "b"):
    (tmp_path / f"{name}.py").write_text(
        "def score(answer, row): return 1\ndef mean(answer, row): return 2\n"
    )
  made = rewards.create(
      [f"{tmp_path}/{x}" for x in ("a.py:score", "b.py:score", "a.py:mean")],
      text=CHARACTERS,
  )
  assert made.names == ("a.score", "b.score", "a.mean")


# In a task.


def task_of(reward, **settings):
  row = example(answer="ab")
  return tasks.Task(
      "own", CHARACTERS.vocab_size, CHARACTERS.stop_ids,
      None if reward is None else rewards.create(
          reward, text=CHARACTERS, **settings
      ), {"train": [row]},
  )


def test_a_task_scores_a_group_at_once(file):
  task = task_of([f"{file}:exact", f"{file}:short"])
  stop, (row,) = [2], task.split("train")
  answers = [CHARACTERS.encode(x) + stop for x in ("ab", "abc")]
  found = task.rewards(row, [*answers, [4, 999], answers[0] + [7]])
  assert [one.value for one in found] == [0.5, -0.75, 0.0, 0.5]
  assert [one.parts for one in found] == [
      (1.0, -0.5), (0.0, -0.75), (0.0, 0.0), (1.0, -0.5)
  ]
  assert task.part_names == ("exact", "short")
  assert task.reward(row, answers[1]) == -0.75
  plain = tasks.Task("plain", 100, (2,), lambda _, ids: len(ids), task.rows)
  assert plain.rewards(row, [[5, 2], [2]]) == [(1.0, ()), (0.0, ())]


def test_a_task_without_a_reward_samples_nothing():
  task = task_of(None)
  tasks.check(task)
  with pytest.raises(ValueError, match="'own' has no reward.*FILE.py:FUNCTION"):
    task.reward(task.split("train")[0], [4, 2])


def test_parts_come_with_experience_and_are_logged(file):
  config = dataclasses.replace(tiny.BASE, vocab_size=100, num_layers=1)
  model, params = tiny.model(config)
  task = task_of([f"{file}:exact", f"{file}:short"], weights=(1.0, 2.0))
  (row,) = task.split("train")
  one = experience.collect(
      model, params, task, row, experience.Rollouts(3, 4),
      key=jax.random.key(0), version=0,
  )
  lengths = np.asarray(one.group.tail_lengths) - one.finished
  np.testing.assert_allclose(one.parts["short"], -lengths / 4)
  np.testing.assert_allclose(
      one.rewards, one.parts["exact"] + 2 * one.parts["short"]
  )
  logged = phases.reward_parts([one])
  assert logged == {
      "reward/exact": 0.0, "reward/short": pytest.approx(-lengths.mean() / 4)
  }
  taken, _ = experience.take(one, np.array([2, 0]))
  np.testing.assert_array_equal(
      taken.parts["short"], one.parts["short"][[2, 0]]
  )


def test_a_run_knows_its_rewards(file, tmp_path):
  def described(reward, **settings):
    return identity.describe(task_of(reward, **settings))

  two = [f"{file}:exact", f"{file}:short"]
  base = described(two)
  assert identity.differences(base, described(two, workers=2, timeout=3)) == []
  moved = tmp_path / "reward.py"
  moved.write_text(SOURCE)
  assert described([f"{moved}:exact", f"{moved}:short"]) == base
  moved.write_text(SOURCE.replace("LIMIT = 4.0", "LIMIT = 5.0"))
  (path, *_), *_ = identity.differences(
      base, described([f"{moved}:exact", f"{moved}:short"])
  )
  assert path == "score.parts[0].digest"
  (found,) = identity.differences(base, described(two, weights=(1, 2)))
  assert found == ("score.parts[1].weight", 1.0, 2.0)
  assert described(two[:1]) != described(two[1:])
  first = described(lambda answer, row: 1)
  assert first != described(lambda answer, row: 2)
