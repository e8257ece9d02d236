# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the comparison with other systems."""

from experiments.peers import measure

if __name__ == "__main__":
  measure.main()
