# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures are drawn from committed results; notebooks and pages name them."""

import json
import pathlib
import re

import PIL.Image
import pytest

from experiments.reporting import bias
from experiments.reporting import figures
from experiments.reporting import plans
from experiments.reporting import record
from experiments.reporting import rollouts
from experiments.reporting import training

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def is_drawn(path):
  """Whether a picture has more to it than a background."""
  image = PIL.Image.open(path).convert("RGB")
  return min(image.size) > 200 and len(image.getcolors(1 << 24)) > 9


@pytest.mark.parametrize("name", ("compare_smollm2", "reach", "bias_matrices"))
def test_a_figure_is_drawn_from_its_results(name, tmp_path):
  figures.draw(name, tmp_path / "sub" / "a.png")
  assert is_drawn(tmp_path / "sub" / "a.png")


def test_a_figure_without_results_names_the_command(tmp_path, monkeypatch,
                                                    capsys):
  monkeypatch.setattr(record, "RESULTS", tmp_path)
  assert figures.show("staleness") is None
  said = capsys.readouterr().out
  assert "experiments/results/staleness.json is not there" in said
  assert "experiments.staleness --config=configs/staleness.py" in said
  with pytest.raises(ValueError, match="is not there yet"):
    figures.draw("staleness", tmp_path / "a.png")
  with pytest.raises(ValueError, match="no figure 'odd'; there are compare"):
    figures.draw("odd", tmp_path / "a.png")


def test_every_command_names_what_is_there():
  makefile = (ROOT / "Makefile").read_text()
  for figure in figures.FIGURES.values():
    if figure.command.startswith("make "):
      assert f"\n{figure.command.split()[1]}:" in makefile
      continue
    module, *config = re.findall(r"experiments\.(\w+)|(configs/\w+\.py)",
                                 figure.command)
    assert (ROOT / "experiments" / f"{module[0]}.py").exists()
    for _, file in config:
      assert (ROOT / file).exists(), file


def test_pictures_of_the_pages_are_figures_and_committed():
  shown = [
      (page.parent / link).resolve()
      for page in PAGES
      for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
  ]
  drawn = {*figures.FIGURES, "simulate_rollouts"}  # that one by a notebook
  assert figures.FOLDER / "compare_smollm2.png" in shown
  for path in shown:
    assert path.exists() and path.parent == figures.FOLDER, path
    assert path.stem in drawn and path.stat().st_size < 150_000, path


def test_notebooks_show_every_figure_and_keep_no_output():
  shown = set()
  assert len(NOTEBOOKS) == 7
  for path in NOTEBOOKS:
    for cell in json.loads(path.read_text())["cells"]:
      source = "".join(cell["source"])
      shown |= set(re.findall(r'figures\.show\("(\w+)"\)', source))
      if cell["cell_type"] == "code":
        assert not cell["outputs"] and cell["execution_count"] is None, path
  assert shown == set(figures.FIGURES)


def test_the_notebook_on_extending_is_the_page():
  page = (ROOT / "docs" / "extending.md").read_text()
  _, first, *cells = [
      "".join(cell["source"])
      for cell in json.loads(NOTEBOOKS[-1].read_text())["cells"]
  ]
  assert "sys.path" in first
  blocks = [cell for cell in cells if f"```python\n{cell}\n```" in page]
  assert len(blocks) == 4  # names, a mixer, its suite, an objective


def test_matrices_are_compared_along_one_axis():
  found = record.committed("bias_sweep")
  rows = bias.along(found, "tail_tokens")
  assert [row["tail_tokens"] for row in rows] == [16, 32, 128]
  assert {(row["prompt_tokens"], row["branches"]) for row in rows} == {(512, 4)}
  for row in rows:
    assert set(bias.MATRICES.values()) <= set(row["per_matrix_cosine"])


def test_what_a_larger_group_costs():
  plan = lambda branches, flops, peak: {  # noqa: E731
      "mode": "exact", "branches": branches, "prefix": 100, "flops": flops,
      "trainable": "all", "compiled_bytes_per_device": peak,
  }
  published = {
      "positions": 100, "gigabytes_more_for_8_than_for_2": 0.21,
      "steps": [{"branches": 2, "seconds": 10}, {"branches": 8, "seconds": 13}],
  }
  found = plans.of_groups(
      {"plans": [plan(2, 5, 4e9), plan(8, 6, 7e9)]}, published
  )
  assert found["ours"] == {"gigabytes": 3.0, "ratio": 1.2}
  assert found["theirs"] == {"gigabytes": 0.21, "ratio": 1.3}


def run(**fields):
  return dict(
      compact=True, drafter="none", draft_length=0, tokens_per_second=10.0,
      speedup=1.0, accept_length=1.0, drafted=0, accepted=0,
  ) | fields


def test_figures_of_rollouts_and_of_staleness(tmp_path):
  drafted = run(drafter="ngram", draft_length=2, drafted=8, accepted=2)
  plain = run(compact=False)
  assert [rollouts.name_of(x) for x in (plain, run(), drafted)] == [
      "plain", "compacted", "ngram, 2"
  ]
  rollouts.draw({"runs": [plain, run(), drafted]}, tmp_path / "a.png")
  row = {
      "batch": 0, "log_prob_drift_mean": 0.0, "answer_loss_difference": 0.0,
      "gradient_cosine": 1.0,
  }
  training.draw_drift(
      {
          "config": {"updates": [0, 1]},
          "rows": [row | {"updates": 0}, row | {"updates": 1}],
      },
      tmp_path / "b.png",
  )
  assert is_drawn(tmp_path / "a.png") and is_drawn(tmp_path / "b.png")
