# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults to put into the code on purpose, and the command that does.

A list by room; `python -m tests.mutants` says which of them no test notices.
"""

from tests.mutants.band import BAND
from tests.mutants.fault import Fault
from tests.mutants.learning import RL
from tests.mutants.learning import TRAINING
from tests.mutants.loading import LOADING
from tests.mutants.ops import MIXERS
from tests.mutants.ops import OPS
from tests.mutants.precision import PRECISION
from tests.mutants.replay import PLANNING
from tests.mutants.replay import REPLAY
from tests.mutants.sampling import ROLLOUT
from tests.mutants.sampling import TASKS
from tests.mutants.sampling import WEIGHTS

ALL: list[Fault] = [
    *OPS, *BAND, *MIXERS, *PRECISION, *REPLAY, *PLANNING, *RL, *ROLLOUT,
    *TRAINING, *WEIGHTS, *LOADING, *TASKS,
]
