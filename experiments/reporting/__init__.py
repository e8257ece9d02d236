# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What experiments share: measuring, keeping and showing results.

timing       compiles functions; times them in turns, in a random order
record       environment of a run, partial results, writing of JSON
tables       a Markdown table from columns and rows; mean and spread
plots        a figure that is saved when it is drawn
readme       redraws the tables and numbers of README and docs; a command
figures      redraws the figures of README, docs and notebooks; a command

Tables and figures by topic, each from result files alone:

comparisons  one gradient by several modes; rounding of the accumulator
bias         distance of estimators from the exact gradient
speed        times over shapes, parts of a step, long runs
training     learning curves, stale captures, drafters that adapt
rollouts     tokens a second
plans        memory of plans and of compiled steps
"""
