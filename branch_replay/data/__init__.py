# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What is run: a group of answers to one prompt, or a tree of branches."""
