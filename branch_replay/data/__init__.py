# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The data that is run: groups of answers to one prompt, and trees."""
