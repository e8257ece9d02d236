# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, names, and what a run is made of."""

import importlib
import inspect
import pkgutil

import pytest

from branch_replay import training
from branch_replay.training import fields
from branch_replay.training import settings
from tests import tiny_tasks


def test_no_class_of_the_training_package_needs_more_than_four_things():
  found = {}
  for info in pkgutil.walk_packages(
      training.__path__, "branch_replay.training."
  ):
    module = importlib.import_module(info.name)
    for name, kind in vars(module).items():
      # Tuples are what functions return, and nobody else makes them.
      if not inspect.isclass(kind) or kind.__module__ != info.name or (
          issubclass(kind, (tuple, Exception)) or name.startswith("_")
      ):
        continue
      needed = [
          x for x, one in inspect.signature(kind).parameters.items()
          if one.default is one.empty
          and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
      ]
      if len(needed) > 4:
        found[f"{info.name}.{name}"] = needed
  assert not found


def test_kinds_of_fields():
  def function(
      a: int, b: float | None = None, c: str | tuple = "", d: tuple = (),
  ):
    """Nothing.

    Args:
      a: the first,
        on two lines.
      b: the second.
    """

  found = fields.of(function)
  assert [one.kind for one in found.values()] == [int, float, str, None]
  assert found["a"].meaning == "the first, on two lines."
  assert found["a"].default is inspect.Parameter.empty
  assert found["b"].default is None


def test_settings_are_made_of_nested_values():
  made = fields.make(settings.ReinforceSettings, {
      "steps": 3, "optimizer": {"b2": 0.5},
      "speculation": {"draft_lengths": [0, 1], "studies": {"rows": 2}},
  })
  assert made.optimizer == settings.OptimizerSettings(b2=0.5)
  assert made.speculation.draft_lengths == (0, 1)
  assert made.speculation.studies.rows == 2 and made.steps == 3
  with pytest.raises(ValueError, match="field of optimizer: 'b3'"):
    fields.make(settings.ReinforceSettings, {"optimizer": {"b3": 1}})
  with pytest.raises(ValueError, match="optimizer must be a mapping"):
    fields.make(settings.ReinforceSettings, {"optimizer": 3})


def test_what_a_call_cannot_use_is_refused(tmp_path):
  start = tiny_tasks.chat().pretrained
  phase = settings.ReinforceSettings()
  with pytest.raises(ValueError, match="pretrained='smollm2' is for a run"):
    training.train(start, None, phase, tmp_path, pretrained="smollm2")
  with pytest.raises(ValueError, match="changes a task that is made by name"):
    training.train(
        start, None, settings.SupervisedSettings(task={"seed": 1}), tmp_path
    )
