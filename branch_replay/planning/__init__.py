# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans the memory and operations of a training step; compares gradients."""
