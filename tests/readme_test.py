# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The README says what the tree holds and what the results say."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import branch_replay as br
from branch_replay.training import metrics
from experiments.reporting import readme
from tests import tiny_tasks

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", readme.PAGES)
def test_tables_are_those_of_the_committed_results(page):
  text = (ROOT / page).read_text()
  assert readme.render(text) == text, (
      "run: python -m experiments.reporting.readme"
  )


@pytest.mark.parametrize("page", PAGES)
def test_no_table_of_measured_numbers_is_typed_in(page):
  text = re.sub(r"<!-- table:.*?<!-- end -->", "", page.read_text(),
                flags=re.DOTALL)
  rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)
  number = re.compile(r" *[+-]?\d[\d.,]*(e-?\d+)? ?(±.*|%|×|s|[MG]iB)? *")
  typed = [
      row for row in rows
      if sum(bool(number.fullmatch(x)) for x in row.split("|")) > 1
  ]
  assert not typed, "mark the table, and list its form in reporting/readme.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
  links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
  for link in links:
    assert (page.parent / link).exists(), link
  if page.name == "README.md":
    there = {f"docs/{other.name}" for other in (ROOT / "docs").glob("*.md")}
    assert there <= set(links), there - set(links)


@pytest.mark.exhaustive
def test_the_example_runs():
  (code, _) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  scope = {}
  exec(code, scope)
  norms = [abs(leaf).max() for leaf in jax.tree.leaves(scope["gradient"])]
  assert len(norms) > 5 and all(0 < norm < 1e6 for norm in norms)


def test_the_twenty_lines_train(tmp_path, monkeypatch):
  """On a tiny model, two steps of them; the rest as it stands there."""
  (_, code) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  assert len([line for line in code.splitlines() if line]) <= 20
  monkeypatch.chdir(tmp_path)
  rows = [{"prompt": f"What is {a} + 5?", "sum": str(a + 5)} for a in range(9)]
  pathlib.Path("prompts.jsonl").write_text(
      "".join(json.dumps(row) + "\n" for row in rows)
  )
  start = tiny_tasks.chat().pretrained
  token = jnp.zeros((1, 1), jnp.int32)
  start = dataclasses.replace(
      start, params=start.model.init(jax.random.key(0), token)["params"]
  )
  monkeypatch.setattr(br, "load", lambda name: start)
  changes = {
      "steps=20": "steps=2", "prompts=8": "prompts=2", "branches=8":
      "branches=4", "max_tokens=32": "max_tokens=6",
  }
  for old, new in changes.items():
    assert code.count(old) == 1
    code = code.replace(old, new)
  exec(code, {})
  trained = br.load_hf("runs/mine/model")
  moved = jax.tree.map(
      lambda x, y: float(abs(x - y).max()), trained.params, start.params
  )
  assert all(change > 0 for change in jax.tree.leaves(moved))
  found = metrics.read(pathlib.Path("runs/mine"))
  assert [row["step"] for row in found] == [0, 1, 2]
  lengths = [row["reward/mean"] for row in found[1:]]
  assert all(-1 < x < 1 for x in lengths)
  one, *_ = metrics.read(pathlib.Path("runs/mine"), metrics.COMPLETIONS)
  for answer in one["answers"]:
    sum_of_row = {row["prompt"]: row["sum"] for row in rows}
    (asked,) = [x for x in sum_of_row if x in one["prompt"]]
    right = sum_of_row[asked] in answer["text"]
    assert answer["reward"] == pytest.approx(
        right - len(answer["text"]) / 100, abs=1e-6
    )


def test_every_room_of_the_layout_is_there():
  layout = TEXT.split("## Layout")[1].split("```")[1]
  names = re.findall(r"^  (\S+)", layout, re.MULTILINE)
  names += re.findall(r"^  \S+ (\S+\.py) ", layout, re.MULTILINE)
  assert "config.py" in names and "rollout/" in names
  for name in names:
    assert (ROOT / "branch_replay" / name).exists(), name
  listed = {name.rstrip("/") for name in names}
  there = {
      path.name
      for path in (ROOT / "branch_replay").iterdir()
      if not path.name.startswith("__")
  }
  assert there <= listed, there - listed
