# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One gradient by other systems and by this one, each in its own process.

measure      the experiment: python -m experiments.peers
session      the processes of one prompt length: started, timed, compared
report       ratios, table and figure

problem      weights, tokens and advantages that every system is given
worker       the main of a process; serve, client: what the two ends say
ours, torch_full, grouper, tunix_full (torch_llama): the systems
"""
