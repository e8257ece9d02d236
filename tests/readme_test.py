# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The README says what the tree holds and what the results say."""

import pathlib
import re

import jax
import pytest

from experiments.reporting import readme

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
  (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  scope = {}
  exec(code, scope)
  norms = [abs(leaf).max() for leaf in jax.tree.leaves(scope["gradient"])]
  assert len(norms) > 5 and all(0 < norm < 1e6 for norm in norms)


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
