# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts would not do is refused by its config."""

import dataclasses

import pytest

from tests import tiny


@pytest.mark.parametrize(
    "options", (dict(activation="gelu_tanh"), dict(post_norms=True))
)
def test_experts_with_a_gate_or_a_norm_that_they_do_not_have(options):
  dataclasses.replace(tiny.BASE, **options)
  with pytest.raises(ValueError, match="their gates are silu.*experts=None"):
    dataclasses.replace(tiny.ARCHITECTURES["experts"], **options)
