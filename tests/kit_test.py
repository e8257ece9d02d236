# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What experiments share: turns, tables, variants of configs, models."""

import importlib
import pathlib

import jax
import pytest

import branch_replay as br
from branch_replay.weights import load
from configs import variants
from experiments.reporting import record
from experiments.reporting import tables
from experiments.reporting import timing

CONFIGS = pathlib.Path(variants.__file__).parent


def test_turns_call_every_function_once_each_in_changing_order():
  calls = []
  functions = {name: lambda name=name: calls.append(name) for name in "abcd"}
  times = timing.in_turns(functions, 5, warm=False)
  turns = [tuple(calls[i : i + 4]) for i in range(0, 24, 4)]
  assert all(sorted(turn) == list("abcd") for turn in turns)
  assert len(set(turns)) > 1
  for found in times:  # the first turn is not timed
    assert {name: len(x) for name, x in found.items()} == dict.fromkeys(
        "abcd", 5
    )
  assert timing.medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
  with pytest.raises(ValueError, match="repeats=0"):
    timing.in_turns(functions, 0)


def test_a_table_has_a_line_a_row_and_a_dash_for_what_is_missing():
  columns = {
      "name": "{name}", "s": lambda row: tables.number(row, "s", ".1f", " s"),
  }
  rows = [{"name": "a", "s": 1.25}, {"name": "b"}]
  assert tables.markdown(columns, rows) == (
      "| name | s |\n|---|---|\n| a | 1.2 s |\n| b | – |\n"
  )
  assert tables.spread([1.0, 3.0]) == {
      "mean": 2.0, "std": 1.4142, "min": 1.0, "max": 3.0, "n": 2,
  }
  assert tables.plus_minus(tables.spread([1.0])) == "1.00 ± 0.00"


def test_fields_that_differ_are_named_with_both_values():
  assert record.differences(
      {"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": 4}
  ) == ["a.b: 1 there, 3 here", "d: missing there, 4 here"]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("[a-z]*.py")))
def test_a_config_says_what_it_costs_and_names_its_variants(file):
  module = importlib.import_module(f"configs.{file.stem}")
  if file.stem == "variants":
    return
  assert "Cost" in module.__doc__ or "An hour" in module.__doc__
  assert "  python -m experiments." in module.__doc__ or (
      "  make " in module.__doc__
  )
  assert module.get_config().to_dict()
  known = getattr(module, "_VARIANTS", getattr(module, "_STUDIES", {}))
  for name in filter(None, known):
    assert module.get_config(name) != module.get_config() or name == "modes"
    assert f"`:{name}`" in module.__doc__ or f"\n{name}: " in module.__doc__
  if known:
    with pytest.raises(ValueError, match="use one of .*tiny"):
      module.get_config("odd")


@pytest.mark.exhaustive
def test_models_by_name():
  tiny, same = load.load("tiny", seed=1), load.load("tiny", seed=1)
  assert tiny.tokenizer is None and tiny.config == load.TINY
  assert all(
      (x == y).all() for x, y in zip(
          jax.tree.leaves(tiny.params), jax.tree.leaves(same.params),
          strict=True,
      )
  )
  half = load.load("tiny", param_dtype="bfloat16", compute_dtype="file")
  assert half.config.compute_dtype == "float32"
  assert {x.dtype.name for x in jax.tree.leaves(half.params)} == {"bfloat16"}
  with pytest.raises((ValueError, OSError), match="no/such"):
    load.load("no/such/model")
  assert isinstance(load.random(load.TINY)[0], br.Decoder)
