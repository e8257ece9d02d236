# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a step needs: memory and operations; how far gradients are apart."""
