# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/extending.md run, and do what the page says."""

import dataclasses
import pathlib
import re

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest

import branch_replay as br
from branch_replay import mixers
from branch_replay.engine import fingerprint
from branch_replay.engine import schedule
from branch_replay.planning import flops
from branch_replay.planning import plan
from branch_replay.training import identity
from tests import mixer_suite
from tests import tiny

pytestmark = pytest.mark.exhaustive
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


def _config(scope, kind, **fields):
  return dataclasses.replace(scope["config"], layer_pattern=(kind,), **fields)


def test_a_mixer_that_lacks_the_way_back_fails_the_suite(scope):
  class Broken(scope["Unrotated"]):
    def backward(self, *arguments):
      d_mixed, d_params, accumulator = super().backward(*arguments)
      return [0.9 * d for d in d_mixed], d_params, accumulator

  with jax.enable_x64(True), pytest.raises(AssertionError, match="differs"):
    mixer_suite.exact_is_full(_config(scope, Broken, num_layers=1))


def test_a_mixer_costs_what_the_layer_it_comes_from_does(scope):
  ours, full = scope["unrotated_config"], scope["config"]
  step = plan.Step(full, prefix=64, branches=2, tail=8, devices=1)
  of_ours = dataclasses.replace(step, config=ours)
  assert plan.bytes_per_device(of_ours) == plan.bytes_per_device(step)
  assert plan.work(of_ours) == plan.work(step)


def test_a_mixer_with_costs_of_its_own_is_counted_with_them(scope):
  class Dearer(scope["Unrotated"]):
    def weights(self):
      return super().weights() + 7

    def operations(self, tokens, prefix):
      return super().operations(tokens, prefix) + 1000 * tokens

    def stage_bytes(self):
      return super().stage_bytes() + 5

  plain, dearer = scope["unrotated_config"], _config(scope, Dearer)
  more = [
      flops.gradient(
          config, prefix=10, branches=3, tail=4, mode="exact", policy="keep"
      )
      for config in (plain, dearer)
  ]
  # In 2 layers 1000 + 2 · 7 a token: 10 of the prefix and 3 · 4 of tails go
  # there once, and back at twice that.
  assert more[1] - more[0] == 2 * 3 * (10 + 3 * 4) * (1000 + 2 * 7)
  held = [schedule.layers_bytes(config) for config in (plain, dearer)]
  assert held[1] - held[0] == 2 * 5


def test_a_subclass_needs_the_geometry_of_its_base(scope):
  class Unturned(mixers.SlidingWindow):
    def rotate(self, module, mixed, positions_GT):
      return super().rotate(module, mixed, 0 * positions_GT)

  with pytest.raises(ValueError, match="window=None.*need a window"):
    _config(scope, Unturned)
  mixer_suite.check(_config(scope, Unturned, window=4))


class _Tripled(mixers.FullAttention):
  """Its output is projected by a kernel that is not of `layers.Linear`."""

  def join(self):
    return _Join(self.config)


class _Join(nn.Module):
  config: br.ModelConfig

  @nn.compact
  def __call__(self, x_GTM, out_KGRTD):
    flat_GTA = out_KGRTD.transpose(1, 3, 0, 2, 4).reshape(*x_GTM.shape[:2], -1)
    dense = nn.Dense(x_GTM.shape[-1], False, param_dtype=x_GTM.dtype)
    return x_GTM + 3 * dense(flat_GTA)


def test_modules_of_its_own_may_have_any_kernels(scope):
  assert mixers.FullAttention.transposes and not _Tripled.transposes
  mixer_suite.check(_config(scope, _Tripled))


def test_a_class_that_is_no_whole_mixer_is_refused(scope):
  class Odd(br.Mixer):
    positional, recurrent = True, False

  with pytest.raises(ValueError, match="Odd .*lacks stage, takes, accumul"):
    _config(scope, Odd)
  with pytest.raises(ValueError, match="object .*lacks positional, .* join"):
    _config(scope, object)
  class Wide(scope["Unrotated"]):
    geometry = "width"

  with pytest.raises(ValueError, match="Wide has geometry='width'"):
    _config(scope, Wide)
  with pytest.raises(ValueError, match="has 3: use some of full, sliding"):
    _config(scope, 3)


def test_a_run_and_a_state_know_the_class(scope):
  ours, full = scope["unrotated_config"], scope["config"]
  (found,) = identity.describe(ours)["layer_pattern"]
  assert found == f"{scope['Unrotated'].__module__}.Unrotated"
  assert fingerprint.difference(
      fingerprint.of_config(ours), fingerprint.of_config(full)
  ).startswith("layer_pattern=('full',)")


def test_a_run_tells_two_classes_of_one_name_apart(scope):
  one, other = (
      identity.describe(_config(
          scope, type("Own", (mixers.FullAttention,), {"__module__": module})
      ))
      for module in ("first", "second")
  )
  assert identity.differences(one, other) == [
      ("layer_pattern[0]", "first.Own", "second.Own")
  ]


def test_a_mixer_of_ones_own_is_not_saved_for_others(scope, tmp_path):
  for fields in ({}, {"post_norms": True}):
    config = _config(scope, scope["Unrotated"], **fields)
    with pytest.raises(ValueError, match="layer_pattern.*Unrotated"):
      br.save_hf(tmp_path, config, {"embed": {"table": np.zeros(1)}})


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
