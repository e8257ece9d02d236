# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures are drawn from committed results; notebooks and pages name them."""

import json
import pathlib
import re

from matplotlib import figure as figure_lib
import numpy as np
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


@pytest.fixture
def saved(monkeypatch):
  """The figures that a test writes, with all that is drawn in them."""
  found, savefig = [], figure_lib.Figure.savefig

  def keep(figure, *args, **options):
    found.append(figure)
    savefig(figure, *args, **options)

  monkeypatch.setattr(figure_lib.Figure, "savefig", keep)
  return found


def heights(axis):
  """Of the bars; their lengths if they lie."""
  bars = axis.containers[0]
  return [
      bar.get_height() if bars.orientation == "vertical" else bar.get_width()
      for bar in bars
  ]


def points(axis, **looks):
  """(x, y) of lines with such a marker, style or color, in drawing order."""
  return [
      (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
      for line in axis.lines
      if all(getattr(line, f"get_{name}")() == look
             for name, look in looks.items())
  ]


def test_a_comparison_is_drawn_as_it_was_measured(saved, tmp_path):
  figures.draw("compare_smollm2", tmp_path / "sub" / "a.png")
  assert min(PIL.Image.open(tmp_path / "sub" / "a.png").size) > 200
  runs = record.committed("compare_smollm2")["runs"]
  ((time, memory, cosine),) = (figure.axes for figure in saved)
  assert heights(time) == [run["seconds_median"] for run in runs]
  assert heights(memory) == [run["temp_bytes"] / 2**20 for run in runs]
  ideal = [one.get_segments()[0][:, 1].tolist() for one in time.collections]
  np.testing.assert_allclose(ideal, [
      [runs[0]["seconds_median"] / run["ideal_speedup"]] * 2 for run in runs
  ])
  names = [label.get_text() for label in cosine.get_yticklabels()]
  assert "embed/table" in names and "project/query" in names
  dots = points(cosine, marker="o")
  for (values, rows), run in zip(dots, runs[1:], strict=True):
    of = run["per_matrix_cosine"]
    assert rows.tolist() == list(range(len(names)))
    assert values.tolist() == [
        of.get(name, of.get(f"layers/{name}/kernel")) for name in names
    ]


def test_memory_is_drawn_as_planned_and_as_compiled(saved, tmp_path):
  figures.draw("reach", tmp_path / "a.png")
  plotted, published = record.committed("plan"), record.committed("published")
  ((left, middle, right),) = (figure.axes for figure in saved)
  groups = plans.of_groups(plotted, published)
  assert heights(middle) == [one["gigabytes"] for one in groups.values()]
  assert heights(right) == [one["ratio"] for one in groups.values()]
  mine = [
      one for one in plotted["plans"]
      if (one["model"], one["trainable"], one["branches"],
          one["flags"]["accumulator_dtype"])
      == ("qwen3-8b", "all", 8, "bfloat16")
  ]
  dots = {(x.item(), y.item()) for x, y in points(left, marker="o")}
  assert dots == {
      (one["prefix"], one["compiled_bytes_per_device"] / 2**30)
      for one in mine if "compiled_bytes_per_device" in one
  }
  curves = points(left, linestyle="-", marker="None")
  assert len(curves) == 2  # exact and stop
  for mode, (prefixes, sizes) in zip(("exact", "stop"), curves, strict=True):
    one = next(x for x in mine if x["mode"] == mode and x["prefix"] == 2**21)
    at = prefixes.tolist().index(2**21)
    wanted = one["bytes_per_device"]["total"] / 2**30
    np.testing.assert_allclose(sizes[at], wanted, rtol=1e-12)


def test_matrices_are_drawn_along_each_axis(saved, tmp_path):
  figures.draw("bias_matrices", tmp_path / "a.png")
  found, (figure,) = record.committed("bias_sweep"), saved
  for plot, axis in zip(
      figure.axes, ("prompt_tokens", "tail_tokens", "branches"), strict=True
  ):
    rows = bias.along(found, axis)
    assert len(rows) >= 2
    for bars, (name, parameter) in zip(
        plot.containers, bias.MATRICES.items(), strict=True
    ):
      assert bars.get_label() == name
      x, y = bars.lines[0].get_data()
      assert x.tolist() == [row[axis] for row in rows]
      of = [row["per_matrix_cosine"][parameter] for row in rows]
      assert y.tolist() == [one["mean"] for one in of]
      ends = [one[:, 1] for one in bars.lines[2][0].get_segments()]
      np.testing.assert_allclose(
          [end[1] - end[0] for end in ends],
          [2 * (one["std"] or 0) for one in of], atol=1e-12,
      )


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


def test_rollouts_are_drawn_a_bar_a_variant(saved, tmp_path):
  drafted = run(
      drafter="ngram", draft_length=2, drafted=8, accepted=2,
      tokens_per_second=25.0, speedup=2.5, accept_length=1.5,
  )
  plain = run(compact=False)
  assert [rollouts.name_of(x) for x in (plain, run(), drafted)] == [
      "plain", "compacted", "ngram, 2"
  ]
  rollouts.draw({"runs": [plain, run(), drafted]}, tmp_path / "a.png")
  (figure,) = saved
  assert [heights(axis) for axis in figure.axes] == [
      [10, 10, 25], [1, 1, 1.5], [0, 0, 0.25]
  ]
  assert [
      [text.get_text() for text in axis.texts] for axis in figure.axes
  ] == [
      ["1.00×", "1.00×", "2.50×"], ["1.00", "1.00", "1.50"],
      ["no drafts", "no drafts", "25%"],
  ]
  names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
  assert names == ["plain", "compacted", "ngram, 2"]


def test_staleness_is_drawn_a_dot_a_batch_and_a_line_of_means(saved, tmp_path):
  measured = (  # batch, updates, drift, difference of loss, cosine
      (0, 0, 0.0, 0.0, 1.0), (1, 0, 0.0, 0.0, 1.0),
      (0, 2, 0.1, 0.3, 0.9), (1, 2, 0.3, 0.4, 0.7),
  )
  fields = (
      "batch", "updates", "log_prob_drift_mean", "answer_loss_difference",
      "gradient_cosine",
  )
  rows = [dict(zip(fields, one, strict=True)) for one in measured]
  training.draw_drift(
      {"config": {"updates": [0, 2]}, "rows": rows}, tmp_path / "b.png"
  )
  (figure,) = saved
  for axis, place, means in zip(
      figure.axes, (2, 3, 4), ([0, 0.2], [0, 0.35], [1, 0.8]), strict=True
  ):
    dots = [(x.item(), y.item()) for x, y in points(axis, marker=".")]
    assert dots == [(one[1], one[place]) for one in measured]
    ((x, y),) = points(axis, marker="o")
    assert x.tolist() == [0, 2]
    np.testing.assert_allclose(y, means, atol=1e-12)
