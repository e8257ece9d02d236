# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md run, and do what the page says."""

import pathlib
import re

import chex
import jax
import numpy as np
import pytest

import branch_replay as br
from tests import mixer_suite
from tests import tiny

_PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs/extending.md"


@pytest.fixture(scope="module")
def scope():
  """The names of the page after all of its code has run."""
  names = {}
  for code in re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL):
    exec(code, names)
  return names


def test_the_mixer_is_another_than_full_attention(scope):
  """What the suite compares it with is not the model it came from."""
  _, params, group, _ = mixer_suite.problem(scope["unrotated_config"])
  with jax.enable_x64(True):
    ours, full = (
        br.dense_log_probs(br.Decoder(tiny.in_float64(config)), params, group)
        for config in (scope["unrotated_config"], scope["config"])
    )
  assert not np.allclose(ours, full, atol=1e-3)


def test_a_mixer_that_lacks_the_way_back_fails_the_suite(scope):
  class Broken(scope["Unrotated"]):
    def backward(*arguments):
      d_mixed, d_params, accumulator = scope["Unrotated"].backward(*arguments)
      return [0.9 * d for d in d_mixed], d_params, accumulator

  kind = scope["dataclasses"].replace(scope["unrotated"], mixer=Broken)
  config = scope["dataclasses"].replace(
      scope["config"], num_layers=1, layer_pattern=(kind,)
  )
  with jax.enable_x64(True), pytest.raises(AssertionError, match="differs"):
    mixer_suite.exact_is_full(config)


def test_a_kind_without_all_functions_is_refused(scope):
  attention = scope["attention"]
  with pytest.raises(ValueError, match="'rotate': it must be 'mix'"):
    scope["dataclasses"].replace(scope["unrotated"], mixer=attention)
  with pytest.raises(ValueError, match="'odd' lacks MIXED, .* decode"):
    br.LayerKind("odd", object(), None, None, None)


def test_the_objective_has_one_gradient(scope):
  chex.assert_trees_all_close(scope["grads"], scope["same"], rtol=1e-4,
                              atol=1e-6)
  assert np.isfinite(scope["evaluation"].loss)


def test_the_readout_returns_both(scope):
  outputs, group = scope["outputs"], scope["group"]
  np.testing.assert_allclose(
      outputs["log_probs"],
      br.log_probs(scope["model"], scope["params"], group), rtol=1e-6,
  )
  assert (np.asarray(outputs["norm"])[np.asarray(group.mask())] > 0.1).all()


def test_the_drafter_changes_no_token(scope):
  np.testing.assert_array_equal(
      scope["drafted"].tokens, scope["rollout"].tokens
  )
  assert scope["drafted"].drafted.sum() > 0


def test_the_task_knows_right_from_wrong(scope):
  task = scope["repeat"]
  one = task.split("train")[0]
  assert task.reward(one, one.answer_ids) == 1.0
  assert task.reward(one, [int(one.prompt_ids[0]) ^ 1, 0]) == 0.0
