# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The comparison of two gradients sees what is not a number."""

import numpy as np
import pytest

from branch_replay.planning import compare


@pytest.mark.parametrize("name", ("first", "second", "third"))
def test_a_parameter_that_is_not_a_number_is_the_worst(name):
  """Wherever it stands among parameters that are right or slightly off."""
  reference = {x: np.ones(4) for x in ("first", "second", "third")}
  gradient = {x: 1.01 * ones for x, ones in reference.items()}
  gradient[name] = np.array([1.0, np.nan, 1.0, 1.0])
  found = compare.compare(gradient, reference)
  assert found.worst_parameter == name
  assert not found.worst_error <= 1.0
